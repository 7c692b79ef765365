"""How fast this machine reads memory: the limit of decode, measured in the same rounds as what it limits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

READ_BYTES = 512 << 20
"""What one linear read covers: many times what a cache holds."""


class LinearRead:
    """A block of memory, and calls that read it from one end to the other.

    Each thread reads a part of its own, without the GIL, in a loop that Numba compiles; where Numba is missing
    it is torch's sum, which has no number of threads of its own.

    Args:
        num_bytes: size of the block, a multiple of 8.
    """

    def __init__(self, num_bytes: int = READ_BYTES) -> None:
        self._words = torch.ones(num_bytes // 8, dtype=torch.int64)
        self._sum = _compiled_sum()
        self._pool = ThreadPoolExecutor(thread_name_prefix="linear-read")

    @property
    def num_bytes(self) -> int:
        return self._words.numel() * 8

    def call(self, threads: int) -> Callable[[], int] | None:
        """A call that reads all of the block on so many threads and returns the number of its words.

        None: it cannot be done, because Numba is missing and torch has another number of threads.
        """
        total = self._sum
        if total is None:
            return (lambda: int(self._words.sum())) if torch.get_num_threads() == threads else None
        first, *others = (part.numpy() for part in self._words.tensor_split(threads))

        def read() -> int:
            running = [self._pool.submit(total, part) for part in others]
            return total(first) + sum(future.result() for future in running)

        return read

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _compiled_sum() -> Callable[[Any], int] | None:
    try:
        import numba
    except ImportError:
        return None
    compiled: Callable[[Any], int] = numba.njit(nogil=True)(_sum)
    return compiled


def _sum(words: Any) -> int:
    """The compiler makes vectors of this, several side by side, because integers may be added in any order. Doing
    so by hand (four sums in the loop) was 15 % slower."""
    total = 0
    for i in range(len(words)):
        total += words[i]
    return total
