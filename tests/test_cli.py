"""The command line as a user runs it: what goes to which stream, exit codes, one-line errors."""

from __future__ import annotations

import io
import json
import os
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import octavo
from octavo import kernels
from octavo.backend import Backend
from octavo.cli import main
from octavo.cli.checks import parse_size
from octavo.cli.errors import CommandError, print_error
from octavo.cli.prompts import DEFAULT_PROMPT
from octavo.cli.show import print_json, print_many, progress, stream
from octavo.engine import llm as engine
from octavo.engine.models import LoadedModel
from octavo.engine.request import TokenLogprob
from octavo.engine.results import Delta, Result

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT
BROKEN = "!"
"""A character whose embedding is not a number: prompts that hold it fail in the model's first step."""

Run = Callable[..., tuple[int, str, str]]


def tiny_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """One token a printable character."""
    vocab = {character: i for i, character in enumerate([*string.printable, "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", chat_template=chat_template, model_max_length=256
    )


def tiny_model() -> LlamaForCausalLM:
    """Random weights, the same ones each time; writes letters, never ends by itself."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(string.printable) + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[string.printable.index(BROKEN)] = torch.nan
        model.lm_head.weight[36 + 26 :] = 0.0  # digits and letters only
    return model


@pytest.fixture
def chat_template() -> str | None:
    """The tiny model's; tests parametrise it."""
    return CHAT


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], chat_template: str | None
) -> Iterator[Run]:
    """Runs a command line in this process, with "tiny" for its model."""
    real_load = engine.load

    def load(model: str, dtype: Any, device: Any) -> LoadedModel:
        if model != "tiny":
            return real_load(model, dtype=dtype, device=device)
        return LoadedModel(tiny_model(), tiny_tokenizer(chat_template), Path("tiny"))

    monkeypatch.setattr(engine, "load", load)
    monkeypatch.setattr("octavo.cli.show.quieten_transformers", lambda: None)

    def call(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def tiny(*arguments: str) -> list[str]:
    return ["generate", "--model", "tiny", "--max-tokens", "8", "--num-blocks", "32", *arguments]


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], check=False, capture_output=True, text=True, timeout=120)


def only_error(err: str) -> str:
    """The error, where nothing but one error line (and the message of loading) is on standard error."""
    lines = [line for line in err.splitlines() if not line.startswith("loading")]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: "), err
    return lines[0]


# Processes of their own: start-up, doctor, usage


def test_help_and_doctor_do_not_load_transformers() -> None:
    code = (
        "import sys; from octavo.cli import main\n"
        "codes = [main(a) for a in ([], ['--help'], ['generate', '--help'], ['--version'], ['doctor'])]\n"
        "heavy = {'transformers', 'triton', 'numba', 'matplotlib', 'vllm'} & set(sys.modules)\n"
        "print('codes', codes, 'heavy', heavy)"
    )
    done = process("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "codes [0, 0, 0, 0, 0] heavy set()" in done.stdout
    assert f"octavo {octavo.__version__}" in done.stdout
    for word in (
        "generate",
        "doctor",
        "--max-num-batched-tokens",
        "gluon",
        "int8_per_token",
        "encoder_decoder",
    ):
        assert word in done.stdout


def test_doctor_json_gives_the_codes_own_answers() -> None:
    done = process("-m", "octavo", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["versions"]["octavo"] == octavo.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["devices"]["cpu"]["logical_cpus"] == os.cpu_count()
    assert bool(facts["devices"]["cuda"]) != bool(facts["devices"]["cuda_reason"])
    assert [row["name"] for row in facts["backends"]] == ["reference", *kernels.BACKENDS]
    assert {row["name"]: row["reason"] for row in facts["backends"]}["cpu"] is None
    on_cpu = {(row["option"], row["value"]): row["reason"] for row in facts["support"] if row["device"] == "cpu"}
    assert [value for option, value in on_cpu if option == "attention kind"] == list(Backend.kinds)
    for name in Backend.kv_formats:
        assert on_cpu["cache format", name] is None
    assert "512" in on_cpu["head dim", "576"]
    assert on_cpu["feature", "sinks"] is None


def test_wrong_use_is_one_line_and_exit_code_2() -> None:
    done = process("-m", "octavo", "generate", "hello", "--kv-format", "int8_kv")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "octavo calibrate" in only_error(done.stderr)


def test_a_closed_pipe_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "octavo", "doctor", "--json"],
            check=False,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1


def test_without_typer_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main(["doctor"]) == 2
    assert "octavo[models,cpu]" in only_error(capsys.readouterr().err)


# generate: what goes where


def test_one_prompt_streams_its_text_alone_to_stdout(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr("octavo.cli.generate.stream", lambda delta: (pieces.append(delta.text), stream(delta)))
    code, out, err = run(*tiny("hello"))
    assert code == 0
    assert len(out) == 9
    assert out == "".join(pieces) + "\n"
    assert sum(piece != "" for piece in pieces) == 8
    for name in ("prompt", "generated", "first token", "cache", "pages", "preemptions"):
        assert f"\n{name} " in err
    assert out.strip() not in err


def test_the_summary_counts_what_the_engine_counts(run: Run) -> None:
    code, out, err = run(*tiny("hello", "--json", "--block-size", "4"))
    assert code == 0
    document = json.loads(out)
    (result,), summary = document["results"], document["summary"]
    prompt = len("user: hello\nassistant: ")
    assert result["num_prompt_tokens"] == summary["num_prompt_tokens"] == prompt
    assert summary["num_generated_tokens"] == len(result["token_ids"]) == 8
    assert summary["cache_bytes_per_token"] == 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, head_dim, float32
    assert (summary["dtype"], summary["kv_format"], summary["device"]) == ("float32", "float32", "cpu")
    assert (summary["num_blocks"], summary["block_size"]) == (32, 4)
    assert summary["peak_blocks"] == -(-(prompt + 7) // 4)
    assert 0 < summary["time_to_first_token"] <= summary["seconds"] < summary["start_to_first_token"]
    assert summary["generated_tokens_per_second"] == pytest.approx(8 / summary["seconds"])
    assert "generated" not in err


def test_many_prompts_print_each_text_in_order(run: Run) -> None:
    alone = [run(*tiny(prompt))[1] for prompt in ("hello", "good day")]
    code, out, err = run(*tiny("hello", "good day"))
    assert code == 0
    assert alone[0] != alone[1]
    assert out == "".join(alone)
    assert err.index("[1/2] hello") < err.index("[2/2] good day")


def test_quiet_prints_nothing_but_text(run: Run) -> None:
    code, out, err = run(*tiny("hello", "--quiet"))
    assert (code, len(out), err) == (0, 9, "")


def test_no_prompt_is_the_built_in_one(run: Run) -> None:
    code, out, err = run(*tiny("--max-tokens", "1"))
    assert (code, len(out)) == (0, 2)
    assert f"prompt: {DEFAULT_PROMPT}" in err


def test_prompts_from_a_file_and_from_standard_input(run: Run, tmp_path: Path) -> None:
    expected = run(*tiny("hello", "good day"))[1]
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n\n  \ngood day\n")
    assert run(*tiny("--file", str(file)))[:2] == (0, expected)
    assert run(*tiny("--file", "-"), stdin="hello\ngood day")[:2] == (0, expected)


def test_json_has_log_probabilities(run: Run) -> None:
    code, out, _ = run(*tiny("hello", "--json", "--logprobs", "2"))
    assert code == 0
    result = json.loads(out)["results"][0]
    assert [entry["token_id"] for entry in result["logprobs"]] == result["token_ids"]
    for entry in result["logprobs"]:
        assert entry["top"][0]["token_id"] == entry["token_id"]  # greedy
        assert len(entry["top"]) == 2
        assert 0 >= entry["logprob"] == entry["top"][0]["logprob"] >= entry["top"][1]["logprob"]


def test_stop_ends_before_the_text(run: Run) -> None:
    text = run(*tiny("hello"))[1].strip()
    stop = text[3:5]
    code, out, _ = run(*tiny("hello", "--json", "--stop", "no such text", "--stop", stop))
    result = json.loads(out)["results"][0]
    assert code == 0
    assert (result["text"], result["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_a_seed_repeats_the_same_text(run: Run) -> None:
    sampled = [run(*tiny("hello", "--temperature", "2", "--seed", seed))[1] for seed in ("7", "7", "8")]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_second_prompt_with_the_same_beginning_hits_the_prefix_cache(run: Run) -> None:
    arguments = tiny("--json", "--max-num-seqs", "1", "--block-size", "4", "one two three 1", "one two three 2")
    summary = json.loads(run(*arguments)[1])["summary"]
    assert summary["num_cached_tokens"] == len("user: one two three 1") // 4 * 4
    assert json.loads(run(*arguments, "--no-prefix-cache")[1])["summary"]["num_cached_tokens"] == 0


def test_system_message_and_raw_prompt_reach_the_model(run: Run) -> None:
    def length(*arguments: str) -> int:
        return int(json.loads(run(*tiny("hello", "--json", *arguments))[1])["results"][0]["num_prompt_tokens"])

    assert length("--raw") == len("hello")
    assert length("--system", "be brief") == len("system: be brief\nuser: hello\nassistant: ")


@pytest.mark.parametrize("chat_template", [None])
def test_a_model_without_chat_template_gets_plain_text_and_a_note(run: Run) -> None:
    code, out, err = run(*tiny("hello", "--json"))
    assert code == 0
    assert json.loads(out)["results"][0]["num_prompt_tokens"] == len("hello")
    assert "note: tiny has no chat template" in err
    assert "note" not in run(*tiny("hello", "--raw"))[2]
    code, out, err = run(*tiny("hello", "--system", "be brief"))
    assert (code, out) == (2, "")
    assert "no chat template for --system" in only_error(err)


@pytest.mark.parametrize("chat_template", [NO_SYSTEM])
def test_a_template_that_refuses_fails_the_prompt(run: Run) -> None:
    code, out, err = run(*tiny("hello", "--system", "be brief", "--quiet"))
    assert (code, out) == (1, "")
    assert "no system role" in only_error(err)


def test_every_option_reaches_the_engine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def params(**fields: Any) -> None:
        seen.append(fields)

    def llm(model: str, **fields: Any) -> None:
        seen.append({"model": model, **fields})
        raise ValueError("enough")

    monkeypatch.setattr("octavo.cli.generate.SamplingParams", params)
    monkeypatch.setattr(engine, "LLM", llm)
    sampling = "--max-tokens 3 --temperature 0.5 --top-k 4 --top-p 0.6 --min-p 0.1 --repetition-penalty 1.2 --seed 9"
    cache = "--dtype bfloat16 --kv-format float16 --device cpu --block-size 8 --cache-memory 1MiB"
    batch = "--max-num-seqs 5 --max-num-batched-tokens 6 --max-model-len 7 --no-prefix-cache --kv-scales s.safetensors"
    flags = "--stop a --stop b --ignore-eos --logprobs 2 --json"
    code, _, err = run("generate", "hello", "--model", "m", *" ".join([sampling, cache, batch, flags]).split())
    assert code == 2
    assert only_error(err) == "error: enough"
    assert seen[0] == {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.6,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "seed": 9,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "logprobs": 2,
    }
    assert seen[1] == {
        "model": "m",
        "dtype": "bfloat16",
        "kv_format": "float16",
        "kv_scales": Path("s.safetensors"),
        "device": "cpu",
        "block_size": 8,
        "num_blocks": None,
        "kv_cache_bytes": 1 << 20,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 6,
        "max_model_len": 7,
        "enable_prefix_caching": False,
    }


# generate: errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--stop", ""], "stop"),
        (["--num-blocks", "0"], "--num-blocks"),
        (["--max-model-len", "257"], "at most 256"),
        (["--num-blocks", str(10**14)], "do not fit"),
        (["--num-blocks", "99999999999999999999"], "do not fit"),
        (["--cache-memory", "lots"], "'lots' is not a size"),
        (["--cache-memory", "1GiB"], "give one of them"),
        (["--kv-format", "float17"], "unknown cache format 'float17'"),
        (["--dtype", "float17"], "unknown dtype 'float17'"),
        (["--device", "toaster"], "unknown device 'toaster'"),
        (["--device", "cuda"], "needs GPU kernels"),
        (["--logprobs", "1"], "add --json"),
        (["--raw", "--system", "be brief"], "--system needs the chat template"),
        (["--file", "/nowhere/prompts.txt"], "give one of them"),
        (["--no-such-option"], "--no-such-option"),
        (["--top-k", "many"], "--top-k"),
        (["--model", "./nowhere/model"], "no model './nowhere/model'"),
    ],
)
def test_wrong_use(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*tiny("hello", *arguments))
    assert (code, out) == (2, "")
    assert message in only_error(err)


def test_a_cache_without_room_for_a_page_is_wrong_use(run: Run) -> None:
    code, out, err = run("generate", "--model", "tiny", "hello", "--cache-memory", "1kB")
    assert (code, out) == (2, "")
    assert "the cache holds 0 blocks" in only_error(err)


def test_files_that_hold_no_prompts_are_wrong_use(run: Run, tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("\n\n")
    binary.write_bytes(b"\xff\xfe")
    for path, message in (
        (empty, "holds no prompt"),
        (binary, "no UTF-8 text"),
        (tmp_path / "none.txt", "No such file"),
        (tmp_path, "Is a directory"),
    ):
        code, out, err = run(*tiny("--file", str(path)))
        assert (code, out) == (2, "")
        assert message in only_error(err)
        assert str(path) in err


def test_a_corrupt_gguf_is_wrong_use(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64)
    code, out, err = run("generate", "hello", "--model", str(file))
    assert (code, out) == (2, "")
    assert str(file) in only_error(err)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ("x" * 300, "at most 255"),
        ("half a letter \udcff", "no UTF-8 text"),
        (f"wow{BROKEN}", "not finite"),
    ],
)
def test_a_prompt_that_fails_leaves_the_others_alone(run: Run, prompt: str, message: str) -> None:
    good = run(*tiny("hello"))[1]
    code, out, err = run(*tiny("--raw", prompt))
    assert (code, out) == (1, "")
    assert message in err.splitlines()[1]
    code, out, err = run(*tiny("hello", prompt, "hello"))
    assert (code, out) == (1, good * 2)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: prompt 2: ")
    assert message in errors[0]
    code, out, err = run(*tiny("hello", prompt, "hello", "--json"))
    assert code == 1
    document = json.loads(out)
    assert [entry["finish_reason"] for entry in document["results"]] == ["length", "error", "length"]
    assert errors[0] == f"error: prompt 2: {document['results'][1]['error']}"
    assert document["results"][0]["text"] + "\n" == good
    assert document["summary"]["num_failed"] == 1


@pytest.mark.parametrize("arguments", [["hello"], ["hello", "hello"], ["hello", "--json"]])
def test_ctrl_c_keeps_what_was_generated(run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    whole = run(*tiny("hello"))[1].strip()
    sample, calls = engine.Sampler.sample, [0]

    def interrupted(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            raise KeyboardInterrupt
        return sample(*args)

    monkeypatch.setattr(engine.Sampler, "sample", interrupted)
    code, out, err = run(*tiny(*arguments))
    assert code == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    if "--json" in arguments:
        document = json.loads(out)
        assert document["summary"]["interrupted"]
        assert document["results"][0]["finish_reason"] == "aborted"
        assert document["results"][0]["text"] == whole[:4]
    else:
        assert out == (whole[:4] + "\n") * len(arguments)


def test_ctrl_c_while_loading_ends_without_a_word(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "load", interrupted)
    assert run(*tiny("hello")) == (130, "", "loading tiny ...\n")


# The parts


def test_text_is_never_markup(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[bold]x[/bold] [/] [link=y] :smile: \N{SNOWMAN}"
    console = Console(stderr=True)
    stream(Delta(0, text))
    print_many([text, text], [Result(text, (1,), "stop"), Result("", (), "error", error="no")], console)
    out, err = capsys.readouterr()
    assert out == text + text + "\n"
    assert err.splitlines() == [f"[1/2] {text}", f"[2/2] {text}"]


def test_json_writes_an_impossible_tokens_logprob_as_null(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("octavo.cli.generate.print_json", lambda *args: seen.append(args))
    run(*tiny("hello", "--json"))
    (texts, _, summary) = seen[0]
    logprobs = (TokenLogprob(5, -1.5, ((5, -1.5), (6, float("-inf")))),)
    print_json(texts, [Result("x", (5,), "length", logprobs=logprobs)], summary)
    (entry,) = json.loads(capsys.readouterr().out)["results"]
    assert entry["logprobs"][0]["top"] == [{"token_id": 5, "logprob": -1.5}, {"token_id": 6, "logprob": None}]


def test_an_error_is_one_line_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("two\n  lines [bold]")
    assert capsys.readouterr().err == "error: two lines [bold]\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_shows_on_a_terminal_only(is_terminal: bool) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=is_terminal, width=100)
    with progress(console, 2) as feed:
        feed(Delta(0, "a", (1,)))
        feed(Delta(0, "b", (2,), Result("ab", (1, 2), "length")))
        feed(Delta(1, "", (), Result("", (), "error", error="no")))
    assert ("2/2" in screen.getvalue()) == is_terminal
    assert ("2 tokens" in screen.getvalue()) == is_terminal
    assert is_terminal or screen.getvalue() == ""


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512MiB", 512 << 20),
        ("2 GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("1.5GB", 1_500_000_000),
        ("3k", 3000),
        ("4Ki", 4096),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "0.2", "1iB", "1XB", "1GiB2", "nan", "inf", "1e9"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(CommandError, match="size"):
        parse_size(text)


@pytest.mark.model
def test_a_real_model_answers() -> None:
    done = process("-m", "octavo", "generate", "--json", "--max-tokens", "24", "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert "Paris" in result["text"]
    assert done.stderr.splitlines() == ["loading smollm2 ..."]
