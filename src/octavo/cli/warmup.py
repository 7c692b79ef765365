"""`octavo warmup`: compile the CPU kernels now, so that nothing waits for them later."""

from __future__ import annotations

import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Annotated

import torch
import typer
from rich.console import Console

import octavo
from octavo.cli.errors import CommandError
from octavo.formats import FLOAT_FORMATS

_SEQS = (1, 32)
"""New tokens of the sequences of the step that is run: one for the decode kernel, one for the prefill kernel."""


def warmup(
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="A dtype of the cache; may be given again. None: all.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Compile the CPU kernels and keep them on disk, where later processes find them."""
    names = list(dict.fromkeys(dtype or FLOAT_FORMATS))
    for name in names:
        if name not in FLOAT_FORMATS:
            raise CommandError(f"unknown dtype {name!r}; known dtypes: {', '.join(FLOAT_FORMATS)}")
    from octavo.kernels import cpu

    if not cpu.HAS_NUMBA:
        raise CommandError("nothing is compiled without Numba; install it with: pip install 'octavo[cpu]'")
    # One process each: Numba compiles one function of a process at a time.
    with ProcessPoolExecutor(len(names), mp_context=get_context("spawn")) as pool:
        seconds = dict(zip(names, pool.map(compile_kernels, names), strict=True))
    if as_json:
        print(json.dumps(seconds))
        return 0
    console = Console(highlight=False)
    for name, taken in seconds.items():
        console.print(f"{name}: {taken:.1f} s")
    return 0


def compile_kernels(name: str) -> float:
    """Run every CPU kernel once on a cache of this dtype; the seconds it took."""
    begin = time.perf_counter()
    dtype, tokens = FLOAT_FORMATS[name], sum(_SEQS)
    cache = octavo.PagedKVCache(
        num_layers=1, num_blocks=4, block_size=16, num_kv_heads=1, head_dim=8, dtype=dtype
    ).layer(0)
    slots = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(16, 48)])
    new = torch.zeros(2, tokens, 1, 8, dtype=dtype)
    octavo.append(cache, new[0], new[1], slots)
    octavo.paged_attention(
        torch.zeros(tokens, 1, 8, dtype=dtype),
        cache.k_cache,
        cache.v_cache,
        block_table=torch.tensor([[0, 0], [1, 2]], dtype=torch.int32),
        seq_lens=torch.tensor(_SEQS, dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, tokens], dtype=torch.int32),
        num_splits=2,  # so that there is something to merge
    )
    return time.perf_counter() - begin
