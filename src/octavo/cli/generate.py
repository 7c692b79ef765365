"""`octavo generate`: run a model on prompts."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from octavo.cli.checks import check_early, parse_size
from octavo.cli.errors import INTERRUPTED, CommandError, print_error
from octavo.cli.outcome import collect
from octavo.cli.prompts import encode, read_prompts
from octavo.cli.show import (
    Summary,
    end_stream,
    loading,
    print_json,
    print_many,
    print_summary,
    progress,
    quieten_transformers,
    stream,
)
from octavo.engine.request import SamplingParams
from octavo.formats import EIGHT_BIT_FORMATS, FLOAT_FORMATS

_DTYPES = ", ".join(["auto", *FLOAT_FORMATS])
_FORMATS = f"{_DTYPES}, {', '.join(EIGHT_BIT_FORMATS)}"

_model = partial(typer.Option, rich_help_panel="Model")
_sampling = partial(typer.Option, rich_help_panel="Sampling")
_cache = partial(typer.Option, rich_help_panel="Cache and batch")
_output = partial(typer.Option, rich_help_panel="Output")


def generate(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(help="One or more prompts; none: a built-in one.", show_default=False),
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="Prompts, one a line, empty lines left out; - is standard input.")
    ] = None,
    model: Annotated[str, _model(help="A folder, GGUF file or hub name, or smollm2, gemma3-270m.")] = "smollm2",
    dtype: Annotated[str, _model(help=f"Of the model: {_DTYPES}.")] = "auto",
    device: Annotated[
        str | None, _model(help="Where the model runs, cpu or cuda; none: a GPU if there is one.")
    ] = None,
    system: Annotated[str | None, _model(help="System message for the chat template.")] = None,
    raw: Annotated[bool, _model("--raw", help="Do not apply the chat template.")] = False,
    max_tokens: Annotated[int, _sampling(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, _sampling(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, _sampling(help="Keep the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, _sampling(help="Keep the fewest likeliest tokens whose probabilities reach p.")
    ] = None,
    min_p: Annotated[
        float | None, _sampling(help="Keep tokens at least this fraction as likely as the likeliest.")
    ] = None,
    repetition_penalty: Annotated[float | None, _sampling(help="Above 1: repeat less.")] = None,
    seed: Annotated[int | None, _sampling(help="Of each prompt's own random stream.")] = None,
    stop: Annotated[
        list[str] | None, _sampling(help="End before this text; may be given again.", show_default=False)
    ] = None,
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    logprobs: Annotated[
        int | None,
        _sampling(help="Log-probabilities, in the JSON document: of the chosen token (0), of the n likeliest too."),
    ] = None,
    kv_format: Annotated[str, _cache(help=f"How K and V are stored: {_FORMATS}.")] = "auto",
    kv_scales: Annotated[
        Path | None, _cache(help="The format's static scales, a file that `octavo calibrate` wrote.")
    ] = None,
    block_size: Annotated[int, _cache(min=1, help="Tokens of a page.")] = 16,
    num_blocks: Annotated[int | None, _cache(min=1, help="Pages of the cache.")] = None,
    cache_memory: Annotated[
        str | None, _cache(help="Memory of the cache, such as 512MiB; none: a quarter of what is free.")
    ] = None,
    max_num_seqs: Annotated[int, _cache(min=1, help="Prompts that run together.")] = 64,
    max_num_batched_tokens: Annotated[
        int, _cache(min=1, help="Tokens of a step; longer prompts are computed in chunks.")
    ] = 512,
    max_model_len: Annotated[
        int | None, _cache(min=2, help="Tokens of a prompt and its output; none: what the model allows.")
    ] = None,
    no_prefix_cache: Annotated[
        bool, _cache("--no-prefix-cache", help="Do not share pages between prompts that begin alike.")
    ] = False,
    quiet: Annotated[bool, _output("--quiet", help="Print text and errors only.")] = False,
    as_json: Annotated[bool, _output("--json", help="Print one JSON document.")] = False,
) -> int:
    """Run a model on prompts; one prompt's text is shown as it comes.

    Standard output gets the text alone, the summary goes to standard error.
    """
    console = Console(stderr=True, quiet=quiet, highlight=False)
    texts = read_prompts(prompt or [], file)
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop or (),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    if logprobs is not None and not as_json:
        raise CommandError("--logprobs is shown in the JSON document only; add --json")
    if raw and system is not None:
        raise CommandError("--system needs the chat template; leave out --raw, or write it into the prompt")
    kv_cache_bytes = None if cache_memory is None else parse_size(cache_memory)
    if num_blocks is not None and cache_memory is not None:
        raise CommandError("--num-blocks and --cache-memory both size the cache; give one of them")
    check_early(dtype, kv_format, device, kv_scales=kv_scales, model=model)
    loading_since = time.perf_counter()
    with loading(console, model):
        try:
            from octavo.engine.llm import LLM  # loads Transformers, which takes seconds

            quieten_transformers()
            llm = LLM(
                model,
                dtype=dtype,
                kv_format=kv_format,
                kv_scales=kv_scales,
                device=device,
                block_size=block_size,
                num_blocks=num_blocks,
                kv_cache_bytes=kv_cache_bytes,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                enable_prefix_caching=not no_prefix_cache,
            )
        except ImportError as error:
            raise CommandError(f"{error}; install it with: pip install 'octavo[models,cpu]'") from error
        except ValueError as error:
            raise CommandError(str(error)) from error
    load_seconds = time.perf_counter() - loading_since
    chat = not raw and llm.tokenizer is not None and llm.tokenizer.chat_template is not None
    if not chat and not raw:
        if system is not None:
            raise CommandError(f"{model} has no chat template for --system; write it into the prompt")
        console.print(
            Text(f"note: {model} has no chat template; it continues the prompt as plain text"), soft_wrap=True
        )
    if not prompt and file is None:
        console.print(Text(f"prompt: {texts[0]}", style="bold"), soft_wrap=True)
    prompts = [encode(llm, text, system, chat) for text in texts]
    alone = len(prompts) == 1
    with nullcontext(stream) if alone and not as_json else progress(console, len(prompts)) as show:
        outcome = collect(llm, prompts, params, show)
    summary = Summary.of(llm, model, kv_format, outcome, load_seconds)
    if as_json:
        print_json(texts, outcome.results, summary)
    elif alone:
        end_stream(outcome.results[0])
    else:
        print_many(texts, outcome.results, console)
    for i, result in enumerate(outcome.results):
        if result.error is not None:
            print_error(result.error if alone else f"prompt {i + 1}: {result.error}")
    if outcome.interrupted:
        console.print("interrupted")
    if not as_json:
        print_summary(summary, console)
    return INTERRUPTED if outcome.interrupted else int(outcome.num_failed > 0)
