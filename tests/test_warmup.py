"""`octavo warmup`: what is compiled, and what is refused."""

from __future__ import annotations

import pytest

import octavo.kernels.cpu
from octavo.cli import main
from octavo.cli.warmup import _models, compile_kernels
from octavo.kernels.cpu import jobs, prefill_matrix_products
from octavo.kernels.cpu.prefill_matrix_products import UNITS


@pytest.mark.parametrize(
    ("name", "dtype", "attend"),
    [
        ("float32", "float32", "attend_float32_float32"),
        ("bfloat16", "bfloat16", "attend_bfloat16_bfloat16"),
        ("float16", "float16", "attend_float16_float16"),
        ("fp8_e4m3", "bfloat16", "attend_float8_e4m3fn_float8_e4m3fn"),
        ("fp8_e5m2", "bfloat16", "attend_float8_e5m2_float8_e5m2"),
        ("int8_kv", "bfloat16", "attend_int8_int8"),
        ("int8_per_token", "bfloat16", "attend_int8_int8"),
        ("int8_k", "float16", "attend_int8_float16"),
    ],
)
def test_every_kernel_of_a_format_is_compiled(name: str, dtype: str, attend: str) -> None:
    jobs._MADE.clear()
    assert compile_kernels(name, dtype) > 0
    on_units = UNITS == "tiles" or (UNITS == "dots" and dtype == "bfloat16")
    assert jobs._MADE.keys() == {f"{attend}_{UNITS}" if on_units else attend, "append", "merge"}


def test_for_which_models_a_format_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are dot products of bfloat16, another kernel serves models that they do not."""
    for units, default, given in (
        ("", ["bfloat16"], ["bfloat16"]),
        ("tiles", ["bfloat16"], ["bfloat16"]),
        ("dots", ["bfloat16", "float32"], ["float16"]),
    ):
        monkeypatch.setattr(prefill_matrix_products, "UNITS", units)
        assert _models("int8_kv", None) == default
        assert _models("fp8_e4m3", ["float16"]) == given
        assert _models("int8_k", None) == ["bfloat16"]
        assert _models("int8_k", ["float16"]) == ["float16"]


def test_an_unknown_dtype_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--dtype", "float8"]) == 2
    assert "unknown dtype 'float8'; known dtypes: " in capsys.readouterr().err


def test_an_unknown_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--kv-format", "int4"]) == 2
    assert "unknown 8-bit format 'int4'; known formats: fp8_e4m3, " in capsys.readouterr().err


def test_without_numba_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(octavo.kernels.cpu, "HAS_NUMBA", False)
    assert main(["warmup"]) == 2
    assert "octavo[cpu]" in capsys.readouterr().err
