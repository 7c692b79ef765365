"""The kernels compile for GPUs that are not there, fit them, and keep their accumulators in registers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from compiling import TARGETS, Binary, compile_call, matrix_loops
from octavo.bench.cases import Case, build
from octavo.launch import Operands, State
from octavo.planner import Planner
from octavo.spec import AttentionSpec

attend_module = importlib.import_module("octavo.kernels.triton.attend")

FEW = 128
"""Bytes that may be spilled: what is needed only before or after the loop over keys may wait in memory."""

MORE = 384
"""The same where registers are capped, so that two programs share a multiprocessor: more has to wait."""

IN_LOOP = 20
"""Numbers that may go to memory and back in a turn of the loop where registers are capped."""

CAREFUL = 2048
"""The same with the careful pass, which runs only when an output is not finite: its own loop may spill."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A launch to compile; capped: its tile has `max_registers`."""

    name: str
    spec: AttentionSpec
    query_len: int
    gpu: str
    dtype: torch.dtype = torch.bfloat16
    capped: bool = False
    kv_format: str = "auto"


PLAIN = AttentionSpec(32, 8, 128)
ALL = AttentionSpec(32, 8, 128, window_left=100, logits_soft_cap=30.0, alibi="linear", sinks=True)
ENCODER = AttentionSpec(32, 8, 128, causal=False)
PARTS = AttentionSpec(32, 8, 80)
LAUNCHES = (
    *(Compiled("decode", PLAIN, 1, gpu) for gpu in ("sm_80", "sm_90", "sm_100", "gfx942")),
    *(Compiled("prefill", PLAIN, 300, gpu, capped=gpu == "sm_90") for gpu in ("sm_80", "sm_90", "sm_100", "gfx942")),
    Compiled("encoder", ENCODER, 300, "sm_80"),
    *(Compiled("two-parts", PARTS, 300, gpu, capped=gpu == "sm_90") for gpu in ("sm_80", "sm_90")),
    Compiled("everything", ALL, 1, "sm_90"),
    Compiled("everything", ALL, 300, "sm_90", capped=True),
    Compiled("everything", ALL, 300, "gfx942"),
    Compiled("encoder-256", AttentionSpec(8, 1, 256, causal=False), 300, "sm_90"),
    Compiled("decode-512", AttentionSpec(8, 1, 512), 1, "sm_80"),
    *(Compiled("decode-fp8", PLAIN, 1, gpu, kv_format="fp8_e4m3") for gpu in ("sm_80", "sm_90", "gfx942")),
    *(Compiled("decode-int8", PLAIN, 1, gpu, kv_format="int8_kv") for gpu in ("sm_80", "sm_90", "sm_100")),
    Compiled("decode-int8-k", PLAIN, 1, "sm_90", kv_format="int8_k"),
    Compiled("decode-per-token", PLAIN, 1, "sm_80", kv_format="int8_per_token"),
    Compiled("decode-e5m2-80", AttentionSpec(32, 8, 80), 1, "sm_90", kv_format="fp8_e5m2"),
    Compiled("everything-int8", ALL, 1, "sm_90", kv_format="int8_per_token"),
    Compiled("prefill-fp8", PLAIN, 300, "sm_90", kv_format="fp8_e4m3"),
    Compiled("prefill-int8", PLAIN, 300, "sm_90", kv_format="int8_kv"),
    Compiled("prefill-per-token", PLAIN, 300, "sm_100", kv_format="int8_per_token"),
    Compiled("prefill-int8-k", PLAIN, 300, "gfx942", kv_format="int8_k"),
    Compiled("prefill-int8-k", PLAIN, 300, "sm_90", capped=True, kv_format="int8_k"),
)


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: f"{launch.name}-{launch.query_len}-{launch.gpu}")
def test_it_fits(launch: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the careful pass, so that what spills belongs to the loop that always runs."""
    monkeypatch.setattr(attend_module, "same_interval", lambda spec, plan, launch: True)
    binary = compile_launch(launch, tmp_path, monkeypatch)
    assert binary.spilled <= (MORE if launch.capped else FEW)


@pytest.mark.parametrize(
    "launch",
    [launch for launch in LAUNCHES if launch.query_len > 1 and launch.spec.causal and launch.gpu != "sm_100"],
    ids=lambda launch: f"{launch.name}-{launch.gpu}",
)
def test_it_fits_with_the_careful_pass(launch: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = compile_launch(launch, tmp_path, monkeypatch)
    assert binary.spilled <= CAREFUL
    if launch.name == "prefill" and launch.gpu in ("sm_80", "sm_90"):
        loop, _ = matrix_loops(binary)
        assert loop.copies == 2 * 64 * 128 * 2 // 16 // 256  # all of K and V: keys, columns, bytes, threads
        assert loop.loads == 0
        assert loop.spills <= (IN_LOOP if launch.capped else 2)


@pytest.mark.parametrize("block_size", [1, 16])
def test_two_programs_of_a_decode_share_a_multiprocessor(
    block_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not three: the schedule cuts keys for two, and a third makes some multiprocessors wait for others."""
    binary = compile_launch(Compiled("decode", PLAIN, 1, "sm_90"), tmp_path, monkeypatch, block_size)
    assert 65_536 // 3 < binary.registers * 4 * 32 <= 65_536 // 2
    assert 2 * (binary.shared + 1024) <= 233_472


def compile_launch(launch: Compiled, cache: Path, monkeypatch: pytest.MonkeyPatch, block_size: int = 16) -> Binary:
    """The launch's kernel, which is within the GPU's shared memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(attend_module, "shared_limit", lambda device: TARGETS[launch.gpu])
    monkeypatch.setattr(attend_module, "has_warpgroups", lambda device: launch.gpu == "sm_90")
    isa = int(launch.gpu[3:]) if launch.gpu.startswith("sm_") else 0
    monkeypatch.setattr(attend_module, "instructions", lambda device: isa)
    (binary,) = compile_call(launch.gpu, lambda: attend(launch, block_size))
    assert binary.shared <= TARGETS[launch.gpu]
    return binary


def attend(launch: Compiled, block_size: int) -> None:
    """Make the launch."""
    spec = launch.spec
    lens = (launch.query_len,), (launch.query_len + 300,)
    problem = build(Case(launch.name, spec, *lens, block_size, dtype=launch.dtype, kv_format=launch.kv_format))
    planner = Planner(num_q_heads=spec.num_q_heads, value_dim=spec.v_dim, block_size=problem.case.block_size)
    plan = planner.plan(problem.batch)
    out = torch.empty(1, launch.query_len, spec.num_q_heads, spec.v_dim, dtype=launch.dtype)
    state = State(out, torch.empty(out.shape[:3]))
    operands = Operands(problem.q, problem.cache, problem.alibi_slopes, problem.sinks)
    (whole,) = plan.launches
    if launch.query_len == 1:  # as a plan on a GPU is
        tickets = torch.zeros(spec.num_kv_heads, dtype=torch.int32)
        whole = replace(whole, pieces=torch.zeros(1, 8, dtype=torch.int32), tickets=tickets)
    attend_module.attend(spec, plan, whole, operands, state, {})
