"""The kernels compile for GPUs that are not there, fit them, and keep their accumulators in registers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from compiling import TARGETS, compile_call
from octavo.bench.cases import Case, build
from octavo.launch import Operands, State
from octavo.planner import Planner
from octavo.spec import AttentionSpec

attend_module = importlib.import_module("octavo.kernels.triton.attend")

FEW = 128
"""Bytes that may be spilled: what is needed only before or after the loop over keys may wait in memory."""

MORE = 384
"""The same where registers are capped, so that two programs share a multiprocessor: more has to wait."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A launch to compile; capped: its tile has `max_registers`."""

    name: str
    spec: AttentionSpec
    query_len: int
    gpu: str
    dtype: torch.dtype = torch.bfloat16
    capped: bool = False


PLAIN = AttentionSpec(32, 8, 128)
ALL = AttentionSpec(32, 8, 128, window_left=100, logits_soft_cap=30.0, alibi="linear", sinks=True)
ENCODER = AttentionSpec(32, 8, 128, causal=False)
PARTS = AttentionSpec(32, 8, 80)
LAUNCHES = (
    *(Compiled("decode", PLAIN, 1, gpu) for gpu in ("sm_80", "sm_90", "sm_100", "gfx942")),
    *(Compiled("prefill", PLAIN, 300, gpu, capped=gpu == "sm_90") for gpu in ("sm_80", "sm_90", "sm_100", "gfx942")),
    *(Compiled("encoder", ENCODER, 300, gpu, capped=gpu == "sm_90") for gpu in ("sm_80", "sm_90", "sm_100")),
    *(Compiled("two-parts", PARTS, 300, gpu, capped=gpu == "sm_90") for gpu in ("sm_80", "sm_90", "sm_100")),
    Compiled("everything", ALL, 1, "sm_90"),
    Compiled("everything", ALL, 300, "sm_90", capped=True),
    Compiled("everything", ALL, 300, "gfx942"),
    Compiled("encoder-256", AttentionSpec(8, 1, 256, causal=False), 300, "sm_90"),
    Compiled("decode-512", AttentionSpec(8, 1, 512), 1, "sm_80"),
)


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: f"{launch.name}-{launch.query_len}-{launch.gpu}")
def test_it_fits(launch: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(attend_module, "shared_limit", lambda device: TARGETS[launch.gpu])
    monkeypatch.setattr(attend_module, "has_warpgroups", lambda device: launch.gpu == "sm_90")
    (binary,) = compile_call(launch.gpu, lambda: attend(launch))
    assert binary.shared <= TARGETS[launch.gpu]
    assert binary.spilled <= (MORE if launch.capped else FEW)


def attend(launch: Compiled) -> None:
    """Make the launch."""
    spec = launch.spec
    problem = build(Case(launch.name, spec, (launch.query_len,), (launch.query_len + 300,), dtype=launch.dtype))
    planner = Planner(num_q_heads=spec.num_q_heads, value_dim=spec.v_dim, block_size=problem.case.block_size)
    plan = planner.plan(problem.batch)
    out = torch.empty(1, launch.query_len, spec.num_q_heads, spec.v_dim, dtype=launch.dtype)
    state = State(out, torch.empty(out.shape[:3]))
    operands = Operands(problem.q, problem.cache, problem.alibi_slopes, problem.sinks)
    attend_module.attend(spec, plan, plan.launches[0], operands, state)
