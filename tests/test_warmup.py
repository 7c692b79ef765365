"""`octavo warmup`: what is compiled, and what is refused."""

from __future__ import annotations

import pytest

import octavo.kernels.cpu
from octavo.cli import main
from octavo.cli.warmup import compile_kernels
from octavo.kernels.cpu import jobs


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_every_kernel_of_a_dtype_is_compiled(name: str) -> None:
    assert compile_kernels(name) > 0
    assert jobs._MADE.keys() >= {f"attend_{name}", "append", "merge"}


def test_an_unknown_dtype_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--dtype", "float8"]) == 2
    assert "unknown dtype 'float8'; known dtypes: " in capsys.readouterr().err


def test_without_numba_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(octavo.kernels.cpu, "HAS_NUMBA", False)
    assert main(["warmup"]) == 2
    assert "octavo[cpu]" in capsys.readouterr().err
