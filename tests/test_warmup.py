"""`octavo warmup`: what is compiled, and what is refused."""

from __future__ import annotations

import pytest
import torch

import octavo.kernels.cpu
from conformance.harness import Cut, attend, make_plan
from octavo.bench.cases import Case, build
from octavo.cli import main
from octavo.cli.warmup import names_for
from octavo.formats import EIGHT_BIT_FORMATS, FLOAT_FORMATS
from octavo.kernels.cpu import jobs
from octavo.spec import AttentionSpec


@pytest.mark.parametrize("dtype", FLOAT_FORMATS)
@pytest.mark.parametrize("name", ["auto", *EIGHT_BIT_FORMATS])
def test_nothing_but_what_a_format_uses_is_compiled(name: str, dtype: str) -> None:
    """A step of decode and prefill, in two parts, so that there is something to merge."""
    jobs._MADE.clear()
    jobs.pages_of.cache_clear()
    case = Case("warm", AttentionSpec(2, 1, 8), (1, 32), (40, 32), 8, dtype=FLOAT_FORMATS[dtype], kv_format=name)
    problem = build(case)
    attend(problem, make_plan(problem, Cut(num_splits=2)))
    new = problem.q[:, :1].contiguous()
    octavo.append(problem.cache, new, new, torch.full((33,), -1, dtype=torch.int64))
    assert jobs._MADE.keys() == set(names_for([(dtype if name == "auto" else name, dtype)]))


def test_the_longest_come_first() -> None:
    are_kernels = [
        name.startswith(("decode", "prefill")) for name in names_for([("auto", "bfloat16"), ("int8_k", "float32")])
    ]
    assert are_kernels == sorted(are_kernels, reverse=True)
    assert sum(are_kernels) >= 3


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
