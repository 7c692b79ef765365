"""`octavo warmup`: compile the CPU kernels now, so that nothing waits for them later."""

from __future__ import annotations

import gc
import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Annotated

import typer
from rich.console import Console

from octavo.cli.errors import CommandError
from octavo.cpus import usable_cpus
from octavo.formats import ALIASES, EIGHT_BIT_FORMATS, FLOAT_FORMATS, KVFormat


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

    With a dtype or a format the others are left out; 8-bit formats are compiled for models of the dtypes that are
    given.
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
    names = names_for(
        [(name, name) for name in dtypes] + [(name, of) for name in formats for of in dtype or FLOAT_FORMATS]
    )
    # Processes, as Numba compiles one function of a process at a time; hardly anything that it makes is garbage.
    processes = min(len(names), usable_cpus())
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=gc.disable) as pool:
        seconds = dict(zip(names, pool.map(compile_function, names), strict=True))
    if as_json:
        print(json.dumps(seconds))
        return 0
    console = Console(highlight=False)
    for label, one in seconds.items():
        console.print(f"{label}: {one:.1f} s")
    return 0


def names_for(caches: list[tuple[str, str]]) -> list[str]:
    """What caches of these formats need, of models of these dtypes; the longest first."""
    from octavo.kernels.cpu import compiled, jobs

    names = {"append", "merge", "attend"}
    for name, of in caches:
        cache = KVFormat.parse(name, FLOAT_FORMATS[of])
        dtypes = FLOAT_FORMATS[of], cache.k_dtype, cache.v_dtype
        names.update(jobs.names_of(*dtypes, compiled.on_units(*dtypes)).values())
    return sorted(names, key=lambda name: (not name.startswith(("decode", "prefill")), name))


def compile_function(name: str) -> float:
    """Compile one of `jobs`; the seconds it took."""
    from octavo.kernels.cpu import jobs

    begin = time.perf_counter()
    jobs.compiled(name)
    return time.perf_counter() - begin
