"""The same kernels in plain PyTorch: where Numba is missing, and rows that the compiled ones do not write or merge."""

from octavo.kernels.cpu.plain.append import append
from octavo.kernels.cpu.plain.attend import attend
from octavo.kernels.cpu.plain.merge import merge

__all__ = ["append", "attend", "merge"]
