"""Which kernels serve a device, and the reasons where none do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from octavo import kernels
from octavo.errors import Unsupported
from octavo.kernels import _device_reason, for_device, select, unsupported
from octavo.spec import AttentionSpec

SPEC = AttentionSpec(4, 2, 64)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with one GPU of capability 9.0 and no Triton, to be changed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "octavo.kernels.triton", raising=False)
    monkeypatch.delattr(kernels, "triton", raising=False)
    _device_reason.cache_clear()
    yield monkeypatch
    _device_reason.cache_clear()


def test_the_cpu() -> None:
    assert unsupported(SPEC, CPU, torch.float32) is None
    assert select(SPEC, CPU, torch.float32) is for_device(CPU) is select(SPEC, CPU, torch.float32, "cpu")
    assert for_device(CPU).__name__ == "octavo.kernels.cpu"


@pytest.mark.parametrize(
    ("device", "backend", "message"),
    [
        (CPU, "triton", "do not run on device cpu"),
        (CPU, "gluon", "this version does not have"),
        (GPU, "gluon", "this version does not have"),
        (GPU, "cpu", "the tensors are on cuda"),
        (torch.device("meta"), None, "device meta needs GPU kernels, which this version does not have"),
        (torch.device("cuda", 3), None, "torch finds 1; give a number below that"),
        (GPU, None, r"need Triton \(.*triton.*\); pip install 'octavo\[gpu\]'"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_reasons(device: torch.device, backend: str | None, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        select(SPEC, device, torch.float32, backend)
    if backend is None:
        with pytest.raises(Unsupported, match=message):
            for_device(device)


def test_no_gpu(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds none; move the tensors to the CPU" in unsupported(SPEC, GPU, torch.float32)


def test_an_old_gpu(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    machine.setattr(torch.version, "hip", None)
    assert "need compute capability 8.0, it has 7.5" in unsupported(SPEC, GPU, torch.float32)


def test_an_old_triton(machine: pytest.MonkeyPatch) -> None:
    machine.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.5.1"))
    assert "triton 3.5.1 is too old, the kernels need 3.6" in unsupported(SPEC, GPU, torch.float32)


def test_the_family_of_a_gpu(machine: pytest.MonkeyPatch) -> None:
    family = SimpleNamespace()
    machine.setitem(sys.modules, "octavo.kernels.triton", family)
    machine.setattr(kernels, "triton", family, raising=False)
    assert unsupported(SPEC, GPU, torch.bfloat16) is None
    assert select(SPEC, GPU, torch.bfloat16) is select(SPEC, GPU, torch.bfloat16, "triton") is family
    assert "q of torch.float64" in unsupported(SPEC, GPU, torch.float64)
