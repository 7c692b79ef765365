"""Compile what a call would launch, for a GPU that need not be there, and read what the binary needs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest

TARGETS = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
"""GPU to the bytes of shared memory that one program may have."""


@dataclass(frozen=True, slots=True)
class Binary:
    """One compiled kernel.

    Args:
        name: of the kernel.
        shared: bytes of shared memory, the dynamic part included.
        spilled: bytes (NVIDIA: of stack; AMD: of scratch memory) that a thread keeps outside registers.
        registers: of a thread.
        cubin: NVIDIA's binary, for `matrix_loops`.
    """

    name: str
    shared: int
    spilled: int
    registers: int
    cubin: bytes | None


@dataclass(frozen=True, slots=True)
class Loop:
    """Instructions of a loop around matrix multiplications.

    Args:
        copies: loads of 16 bytes that reach shared memory while the loop goes on.
        loads: loads of other global memory that a register waits for.
        spills: loads and stores of what registers had no room for.
    """

    copies: int
    loads: int
    spills: int


def compile_call(gpu: str, call: Callable[[], object]) -> list[Binary]:
    """The kernels that `call` launches, compiled for `gpu` and not launched. Its tensors may be on the CPU."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launch, kernels = JITFunction.run, []

    def only_compile(self: Any, *args: Any, **options: Any) -> None:
        kernels.append(launch(self, *args, **options | {"warmup": True}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", pretended(gpu))
        patch.setattr(JITFunction, "run", only_compile)
        call()
    assert all(kernels), "a kernel was not compiled"
    return [
        Binary(kernel.name, kernel.metadata.shared, *_needed(kernel.asm), kernel.asm.get("cubin")) for kernel in kernels
    ]


def matrix_loops(binary: Binary) -> list[Loop]:
    """The loops of NVIDIA's binary that multiply matrices, in the program's order."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", _dump(binary.cubin, "-sass"))
    code = [(int(address, 16), instruction) for address, instruction in found]
    loops = []
    for end, instruction in code:
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        inside = [text for address, text in code if jump and int(jump[1], 16) <= address <= end]
        if any("MMA." in text for text in inside):
            copies = sum("LDGSTS" in text and ".128" in text for text in inside)
            loads = sum(bool(re.search(r"\bLDG\b", text)) for text in inside)
            loops.append(Loop(copies, loads, sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in inside)))
    return loops


def pretended(gpu: str) -> SimpleNamespace:
    """A driver under which Triton believes that `gpu` is there."""
    from triton.backends.compiler import GPUTarget

    cuda = gpu.startswith("sm_")
    target = GPUTarget("cuda", int(gpu[3:]), 32) if cuda else GPUTarget("hip", gpu, 64)
    return SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: f"pretended {gpu}",
        get_current_stream=lambda device: 0,
    )


def _needed(asm: dict[str, Any]) -> tuple[int, int]:
    """Bytes spilled and registers."""
    if "cubin" not in asm:
        spilled, registers = (
            max(int(n) for n in re.findall(rf"\.{name}:\s*(\d+)", asm["amdgcn"]))
            for name in ("private_segment_fixed_size", "vgpr_count")
        )
        return spilled, registers
    found = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", _dump(asm["cubin"], "--dump-resource-usage"))
    return max(int(stack) + int(local) for _, stack, local in found), max(int(n) for n, _, _ in found)


def _dump(cubin: bytes, option: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
