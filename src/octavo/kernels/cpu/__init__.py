"""The embedded path: plain PyTorch on the CPU."""

from octavo.kernels.cpu.append import append
from octavo.kernels.cpu.attend import attend
from octavo.kernels.cpu.merge import merge

__all__ = ["append", "attend", "merge"]
