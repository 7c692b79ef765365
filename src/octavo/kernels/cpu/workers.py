"""Threads of our own for kernels that run without the GIL.

Numba's thread layers would load a second OpenMP beside PyTorch's and change its settings; these threads know of
neither.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait


class Workers:
    """A pool that the caller joins: `run` with n threads uses n - 1 of the pool's and the caller's own.

    Several Python threads may call it at once. A forked child starts with a pool of its own.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._pool = None

    def run(self, work: Callable[[], None], threads: int) -> None:
        """Call `work` on so many threads; return when all are done."""
        if threads <= 1:
            work()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="octavo")
        others = [self._pool.submit(work) for _ in range(threads - 1)]
        try:
            work()
        finally:
            wait(others)  # all of them: they write into the caller's memory
            for other in others:
                other.result()
