"""The threads that kernels run on: PyTorch's own where that is possible, else a pool.

PyTorch's threads wait for the next matrix product in a loop that takes their cores for milliseconds. Work that comes
in between is done soonest by these very threads; others would share the cores with the loop (docs/adr/0010).
Nothing here changes a setting of PyTorch or OpenMP.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import torch

Job = ctypes.Array[ctypes.c_char]
Kernel = Callable[[int], None]
"""Machine code that takes a job's address, as a ctypes function: it runs without the GIL."""

LEAST_BYTES = 1 << 19
"""Bytes to read from which PyTorch's threads do it sooner than the caller alone. Between matrix products, on two
threads: 16 sequences of 40 keys 310 instead of 354 us, 8 of 1,500 keys 1,589 instead of 2,708."""

POOL_LEAST_BYTES = 1 << 23
"""The same for a pool, whose threads must be woken and find PyTorch's waiting on their cores: 2,799 us there."""


class Workers:
    """Calls a kernel on several threads at once, the caller's among them.

    Several Python threads may call `run` at once. A forked child uses a pool of its own: OpenMP's threads do not
    survive a fork, and OpenMP does not notice.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._openmp = torch_openmp()
        self.least_bytes = POOL_LEAST_BYTES if self._openmp is None else LEAST_BYTES
        """Work that reads fewer bytes, or takes less time than reading them, belongs on one thread."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._pool = self._openmp = None
        self.least_bytes = POOL_LEAST_BYTES

    def run(self, kernel: Kernel, job: Job, threads: int) -> None:
        """Call `kernel(address of job)` on so many threads; return when all are done."""
        address = ctypes.addressof(job)
        if threads <= 1:
            kernel(address)
        elif self._openmp is not None:
            self._openmp(kernel, address, threads, 0)
        else:
            self._run_in_pool(kernel, address, threads)

    def _run_in_pool(self, kernel: Kernel, address: int, threads: int) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="octavo")
        others = [self._pool.submit(kernel, address) for _ in range(threads - 1)]
        try:
            kernel(address)
        finally:
            wait(others)  # all of them: they write into the caller's memory
            for other in others:
                other.result()


@cache
def torch_openmp() -> Any:
    """GNU OpenMP's entry to a parallel region, of the library that PyTorch loaded: called with (function, its
    argument, number of threads, 0). None: PyTorch runs on something else."""
    if not sys.platform.startswith("linux") or "OpenMP" not in torch.__config__.parallel_info():
        return None
    installed = Path(torch.__file__).parent
    for path in (
        *installed.glob("lib/libgomp*.so*"),
        *installed.parent.glob("torch.libs/libgomp*.so*"),
        "libgomp.so.1",
    ):
        try:
            entry = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LOCAL).GOMP_parallel
        except (OSError, AttributeError):  # not loaded, or another OpenMP under this name
            continue
        entry.argtypes, entry.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        return entry
    return None
