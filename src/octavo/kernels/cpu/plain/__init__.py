"""The same kernels in plain PyTorch: where Numba is missing, and for the few dtypes that the compiled ones lack."""

from octavo.kernels.cpu.plain.append import append
from octavo.kernels.cpu.plain.attend import attend
from octavo.kernels.cpu.plain.merge import merge

__all__ = ["append", "attend", "merge"]
