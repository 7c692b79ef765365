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
from octavo.cpus import usable_cpus
from octavo.formats import ALIASES, EIGHT_BIT_FORMATS, FLOAT_FORMATS

_SEQS = (1, 32)
"""New tokens of the sequences of the step that is run: one for the decode kernel, one for the prefill kernel."""

_SAME_CODE = {"int8_per_token": "int8_kv"}
"""Formats that need no kernels but those of another."""


def warmup(
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="A dtype of the cache; may be given again. None: all.", show_default=False),
    ] = None,
    kv_format: Annotated[
        list[str] | None,
        typer.Option(help="An 8-bit format of the cache; may be given again. None: all.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Compile the CPU kernels and keep them on disk, where later processes find them.

    With a dtype or a format the others are left out. int8_k, whose V is 16-bit, is compiled for models of the dtypes
    that are given, or of bfloat16; so are the other 8-bit formats where the machine multiplies bfloat16 without matrix
    units, which only bfloat16 models use: for them and for float32.
    """
    dtypes = list(dict.fromkeys(dtype or ([] if kv_format else FLOAT_FORMATS)))
    for name in dtypes:
        if name not in FLOAT_FORMATS:
            raise CommandError(f"unknown dtype {name!r}; known dtypes: {', '.join(FLOAT_FORMATS)}")
    formats = [ALIASES.get(name, name) for name in kv_format or ([] if dtype else EIGHT_BIT_FORMATS)]
    for name in formats:
        if name not in EIGHT_BIT_FORMATS:
            raise CommandError(f"unknown 8-bit format {name!r}; known formats: {', '.join(EIGHT_BIT_FORMATS)}")
    from octavo.kernels import cpu

    if not cpu.HAS_NUMBA:
        raise CommandError("nothing is compiled without Numba; install it with: pip install 'octavo[cpu]'")
    formats = list(dict.fromkeys(_SAME_CODE.get(name, name) for name in formats))
    jobs = [(name, name) for name in dtypes]
    for name in formats:
        jobs += [(name, of) for of in _models(name, dtype)]
    # Processes, as Numba compiles one function of a process at a time.
    with ProcessPoolExecutor(min(len(jobs), usable_cpus()), mp_context=get_context("spawn")) as pool:
        taken = list(pool.map(compile_kernels, *zip(*jobs, strict=True)))
    seconds = {name if name == of else f"{name} {of}": s for (name, of), s in zip(jobs, taken, strict=True)}
    if as_json:
        print(json.dumps(seconds))
        return 0
    console = Console(highlight=False)
    for label, one in seconds.items():
        console.print(f"{label}: {one:.1f} s")
    return 0


def _models(name: str, dtypes: list[str] | None) -> list[str]:
    """Dtypes of the models that an 8-bit format is compiled for."""
    from octavo.kernels.cpu import prefill_matrix_products

    if name == "int8_k":
        return dtypes or ["bfloat16"]
    return (dtypes or ["bfloat16", "float32"]) if prefill_matrix_products.UNITS == "dots" else ["bfloat16"]


def compile_kernels(name: str, dtype_name: str) -> float:
    """Run every CPU kernel once on a cache of this format, for a model of this dtype; the seconds it took."""
    begin = time.perf_counter()
    dtype, tokens = FLOAT_FORMATS[dtype_name], sum(_SEQS)
    pages = octavo.PagedKVCache(
        num_layers=1, num_blocks=4, block_size=16, num_kv_heads=1, head_dim=8, dtype=dtype, format=name
    )
    cache = pages.layer(0, v_descale=torch.ones(1, 8) if name == "int8_kv" else None)
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
        k_descale=cache.k_descale,
        v_descale=cache.v_descale,
    )
    return time.perf_counter() - begin
