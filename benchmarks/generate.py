"""Tokens a second of whole generation: Octavo's engine beside Transformers' own two ways, same model, same prompts.

Protocol: all providers in one process, each with a warm-up whose tokens must be equal; then rounds in which the
providers take turns, starting with another one each round; medians, and the ratio of medians to each peer. Greedy,
end-of-text ignored, so that everybody generates exactly the same number of tokens.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from octavo import LLM, SamplingParams, __version__
from octavo.engine.models import load

Ids = list[list[int]]
Provider = Callable[[Ids, int], Ids]

TEXT = (
    "Printers fold a sheet three times to make an octavo: eight leaves, sixteen pages, a book that a hand can hold. "
    "The size of a page decides how it is read, how it is stored and how far it travels. A librarian who must find "
    "one line among a million books does not carry the books about; she keeps a table that says where each page "
    "stands, and walks only to the shelves that matter. "
)


def prompts(tokenizer: transformers.PreTrainedTokenizerBase, count: int, shortest: int, longest: int) -> Ids:
    """Token ids of `count` prompts, lengths spread evenly, no two with a common beginning."""
    ids: list[int] = tokenizer(TEXT * (2 + (longest + count) // 80))["input_ids"]
    lengths = [shortest + (longest - shortest) * i // max(count - 1, 1) for i in range(count)]
    return [ids[i : i + n] for i, n in enumerate(lengths)]


def octavo_provider(model: str, dtype: str) -> Provider:
    llm = LLM(model, dtype=dtype, enable_prefix_caching=False)

    def run(batch: Ids, tokens: int) -> Ids:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return [list(result.token_ids) for result in llm.generate(batch, params)]

    return run


def padded_provider(model: PreTrainedModel) -> Provider:
    """`generate` on one left-padded batch."""

    def run(batch: Ids, tokens: int) -> Ids:
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch])
        out = model.generate(ids, attention_mask=mask, generation_config=_greedy(tokens))
        rows: Ids = out[:, longest:].tolist()
        return rows

    return run


def continuous_provider(model: PreTrainedModel) -> Provider:
    """`generate_batch`, Transformers' continuous batching, its cache sized so that all prompts run together."""

    def run(batch: Ids, tokens: int) -> Ids:
        pages = sum(-(-(len(row) + tokens) // 16) for row in batch) + 16
        config = ContinuousBatchingConfig(page_size=16, num_blocks=pages, max_batch_tokens=512)
        out = model.generate_batch(
            batch, generation_config=_greedy(tokens), continuous_batching_config=config, progress_bar=False
        )
        ordered = sorted(out.values(), key=lambda row: int(row.request_id.split("_")[-1]))
        return [list(row.generated_tokens) for row in ordered]

    return run


def _greedy(tokens: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--shortest", type=int, default=8, help="tokens of the shortest prompt")
    parser.add_argument("--longest", type=int, default=128, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: torch's own choice)")
    parser.add_argument("--csv", type=Path, default=None, help="append one row a provider")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)

    # Two copies of the stock model: continuous batching switches a model's attention while it runs.
    stock = [load(args.model, dtype=args.dtype) for _ in range(2)]
    providers = {
        "octavo": octavo_provider(args.model, args.dtype),
        "transformers generate (padded, sdpa)": padded_provider(stock[0].model),
        "transformers generate_batch (sdpa)": continuous_provider(stock[1].model),
    }
    batch = prompts(stock[0].tokenizer, args.prompts, args.shortest, args.longest)
    expected = providers["transformers generate (padded, sdpa)"](batch, args.tokens)
    for name, run in providers.items():
        same = sum(a == b for a, b in zip(run(batch, args.tokens), expected, strict=True))
        if same != len(batch):
            sys.exit(f"{name}: {same} of {len(batch)} prompts gave the tokens of padded generate; not timed")

    seconds: dict[str, list[float]] = {name: [] for name in providers}
    for turn in range(args.rounds):
        names = list(providers)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            providers[name](batch, args.tokens)
            seconds[name].append(time.perf_counter() - start)
    report(args, seconds, sum(map(len, batch)))


def report(args: argparse.Namespace, seconds: dict[str, list[float]], prompt_tokens: int) -> None:
    generated = args.prompts * args.tokens
    ours = statistics.median(seconds["octavo"])
    table = Table(
        title=f"{args.model} {args.dtype}: {args.prompts} prompts ({prompt_tokens} tokens) x {args.tokens} tokens, "
        f"{torch.get_num_threads()} threads, medians of {args.rounds}"
    )
    for column in ("provider", "tokens/s", "min", "max", "octavo is"):
        table.add_column(column, justify="left" if column == "provider" else "right")
    rows = []
    for name, times in seconds.items():
        rate = generated / statistics.median(times)
        ratio = statistics.median(times) / ours
        low, high = generated / max(times), generated / min(times)
        table.add_row(name, f"{rate:.1f}", f"{low:.1f}", f"{high:.1f}", f"{ratio:.2f}x")
        rows.append(
            {
                "octavo": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads",
                "model": args.model,
                "dtype": args.dtype,
                "prompts": args.prompts,
                "prompt_tokens": prompt_tokens,
                "tokens": args.tokens,
                "provider": name,
                "tokens_per_s": f"{rate:.2f}",
                "ratio": f"{ratio:.3f}",
            }
        )
    Console().print(table)
    if args.csv is not None:
        is_new = not args.csv.exists()
        with args.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            if is_new:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
