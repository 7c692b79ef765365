"""The operators: `opcheck`, the plain functions' results, and whole graphs under `torch.compile`."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from conformance.common import CASES, CUTS, EIGHT_BIT_CASES
from conformance.harness import Cut, make_plan, skip_if_unserved
from octavo import ops
from octavo import run as plain_run
from octavo.bench.cases import Case, Problem, build
from octavo.cache import LayerCache
from octavo.launch import Launch, Plan
from octavo.run import merge_states as plain_merge_states
from octavo.spec import KVShard
from tolerance import assert_same_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def op_run(problem: Problem, plan: Plan, run=ops.run) -> tuple[Tensor, Tensor]:
    sharded = problem.shard.dcp_world > 1
    out = problem.q.new_full((len(problem.q), problem.spec.num_q_heads, problem.spec.v_dim), 99.0)
    lse = problem.q.new_full(out.shape[:2], 99.0, dtype=torch.float32)
    terms = {"alibi_slopes": problem.alibi_slopes, "sinks": None if sharded else problem.sinks}
    run(plan, problem.spec, problem.q, problem.cache, out, lse, **terms)
    return out, lse


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("case", [*CASES, *EIGHT_BIT_CASES], ids=lambda case: case.name)
def test_the_operator_runs_the_plan(device: str, case: Case, cut: Cut) -> None:
    for rank in range(cut.world):
        problem = build(case, shard=KVShard(cut.world, rank, cut.interleave), device=device)
        skip_if_unserved(problem)
        plan = make_plan(problem, cut)
        for name, actual, wanted in zip(
            ("out", "lse"), op_run(problem, plan), op_run(problem, plan, plain_run), strict=True
        ):
            assert_same_bits(name, actual, wanted)


def test_every_fact_of_a_plan_travels() -> None:
    """A field that is new in a plan or launch must be new in the operator too."""
    on_the_way = {"launches", "positions", "seq_lens", "block_table", "num_states", "shard", "batch_invariant"}
    known_or_not_needed = {"slot_mapping", "block_size", "num_blocks", "workspace", "check", "memo"}
    assert {field.name for field in dataclasses.fields(Plan)} == on_the_way | known_or_not_needed
    launch = ["query_start_loc", "kv_splits", "first_state", "rows", "seqs", "max_query_len", "pieces", "tickets"]
    assert [field.name for field in dataclasses.fields(Launch)] == launch


def attend_arguments(device: str, case: Case, cut: Cut) -> tuple:
    """What `ops.run` hands to the operator."""
    problem = build(case, device=device)
    skip_if_unserved(problem)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_attend", lambda *arguments: seen.append(arguments))
        op_run(problem, make_plan(problem, cut))
    return seen[0]


@pytest.mark.parametrize("name", ["everything", "half", "encoder-window", "int8-kv", "int8-per-token"])
@pytest.mark.parametrize("cut", ["whole", "splits", "cascade"])
def test_opcheck_attend(device: str, name: str, cut: str) -> None:
    case = next(case for case in (*CASES, *EIGHT_BIT_CASES) if case.name == name)
    torch.library.opcheck(torch.ops.octavo.attend.default, attend_arguments(device, case, CUTS[cut]))


def test_opcheck_append(device: str) -> None:
    k, v = torch.randn(2, 6, 3, 16, device=device)
    slots = torch.tensor([13, -1, 0, 19], device=device)
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        shape = [(5, 4, 3, 16)[i] for i in order]
        caches = [torch.zeros(shape, device=device).permute(order) for _ in "kv"]
        torch.library.opcheck(torch.ops.octavo.append.default, (*caches, None, None, None, None, k, v, slots))


@pytest.mark.parametrize("name", ["int8-kv", "int8-k-half", "int8-per-token-bfloat16"])
def test_opcheck_append_with_scales(device: str, name: str) -> None:
    """Scales of rows are written, static ones are not. (opcheck itself cannot compare fp8.)"""
    case = next(case for case in EIGHT_BIT_CASES if case.name == name)
    problem = build(case, device=device)
    skip_if_unserved(problem)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_append", lambda *arguments: seen.append(arguments))
        k, v = torch.randn(2, 17, 2, 16, device=device)
        ops.append(problem.cache, k, v, problem.batch.slot_mapping)
    torch.library.opcheck(torch.ops.octavo.append.default, seen[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_merge(device: str, dtype: torch.dtype) -> None:
    """L01: the fake result has the strides of the real one, for views too."""
    outs, lses = torch.randn(3, 5, 4, 8, device=device, dtype=dtype), torch.randn(3, 5, 4, device=device)
    sinks = torch.randn(4, device=device)
    for dims in ((0, 1), (1, 2), (0, 2)):
        views = [x.transpose(*dims).contiguous().transpose(*dims) for x in (outs, lses)]
        torch.library.opcheck(torch.ops.octavo.merge.default, (*views, sinks))
        torch.library.opcheck(torch.ops.octavo.merge.default, (*views, None))


def test_merge_states(device: str) -> None:
    outs, lses, sinks = torch.randn(3, 5, 4, 8), torch.randn(3, 5, 4), torch.randn(4)
    arguments = [x.to(device) for x in (outs, lses, sinks)]
    for actual, wanted in zip(ops.merge_states(*arguments), plain_merge_states(*arguments), strict=True):
        assert_same_bits("merged", actual, wanted)


@pytest.mark.parametrize("cut", ["whole", "splits", "cascade"])
def test_a_layer_in_one_graph(device: str, cut: str) -> None:
    """L02: two steps of other lengths under `torch.compile`: nothing stale, pages written, few traces."""

    def layer(q, k, v, cache, plan, spec, slots, sinks):
        ops.append(cache, k * 2, v, slots)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        ops.run(plan, spec, q + 1, cache, out, lse, sinks=sinks)
        return out * 2, lse

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(layer, fullgraph=True, backend=counter)
    for lengths in ((45, 70, 38, 52, 1), (44, 70, 39, 50, 3), (48, 66, 37, 53, 2), (41, 71, 36, 49, 5)):
        case = next(case for case in CASES if case.name == "window")
        case = replace(case, seq_lens=lengths, spec=replace(case.spec, sinks=True))
        results = []
        for function in (layer, traced):
            problem = build(case, device=device)
            k, v = (torch.linspace(-1, 1, 17 * 2 * 16, device=device).view(17, 2, 16) for _ in "kv")
            out, lse = function(
                problem.q, k, v, problem.cache, make_plan(problem, CUTS[cut]), problem.spec,
                problem.batch.slot_mapping, problem.sinks,
            )  # fmt: skip
            results.append((out, lse, problem.cache.k_cache, problem.cache.v_cache))
        for name, actual, wanted in zip(("out", "lse", "K", "V"), *reversed(results), strict=True):
            assert_same_bits(name, actual, wanted)
    assert counter.frame_count <= 2, "a graph was traced for new lengths"


def test_errors_are_those_of_the_functions() -> None:
    cache = LayerCache(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8))
    with pytest.raises(ValueError, match="slot_mapping holds 8"):
        ops.append(cache, torch.ones(1, 1, 8), torch.ones(1, 1, 8), torch.tensor([8]))
    with pytest.raises(ValueError, match=r"outs must be \[num_parts"):
        ops.merge_states(torch.ones(2, 3, 4), torch.ones(2, 3, 4))
