"""What only a device can show: no waiting, no compiling while serving, graphs that outlive a step, wide offsets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import octavo
from octavo.batch import AttentionBatch
from octavo.bench.cases import Case, Problem, build
from octavo.cache import LayerCache, PagedKVCache
from octavo.launch import Plan, PlanBuffers
from octavo.planner import Planner, PrefixGroup
from octavo.spec import AttentionSpec
from octavo.warm_up import warm_up
from tolerance import assert_attention, assert_same_bits

pytestmark = pytest.mark.gpu

SPEC = AttentionSpec(8, 2, 64, window_left=200, logits_soft_cap=30.0, sinks=True)
LENGTHS = (300, 1, 77, 1000, 16, 530, 44, 9)
CAP = 1024
"""The longest sequence that a graph is captured for."""


@dataclass(frozen=True, slots=True)
class Step:
    """A problem on a device with what it takes to run it again and again."""

    problem: Problem
    planner: Planner
    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, case: Case, device: str = "cuda", **options: object) -> Step:
        problem, spec = build(case, device=device, poison=float("nan")), case.spec
        planner = Planner(
            num_q_heads=spec.num_q_heads,
            value_dim=spec.v_dim,
            block_size=case.block_size,
            num_blocks=problem.cache.num_blocks,
            device=problem.q.device,
            **options,
        )
        out = problem.q.new_empty(len(problem.q), spec.num_q_heads, spec.v_dim)
        return cls(problem, planner, out, out.new_empty(out.shape[:2], dtype=torch.float32))

    def run(self, **options: object) -> None:
        problem = self.problem
        plan = self.planner.plan(problem.batch, **options)
        octavo.run(
            plan,
            problem.spec,
            problem.q,
            problem.cache,
            self.out,
            self.lse,
            alibi_slopes=problem.alibi_slopes,
            sinks=problem.sinks,
        )


def decode(lengths: tuple[int, ...], new: int = 1, **options: object) -> Case:
    query_lens = tuple(min(new, n) for n in lengths)
    return Case("decode", SPEC, query_lens, lengths, **{"dtype": torch.bfloat16} | options)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def compiling_is_an_error() -> Iterator[None]:
    from triton.runtime.jit import JITFunction

    def refuse(self: object, *_: object, **__: object) -> None:
        raise AssertionError(f"{self} was compiled again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", refuse)
        yield


CUTS = {
    "default": {},
    "splits": {"num_splits": 3},
    "invariant": {"batch_invariant": True},
    "cascade": {"prefix_levels": [[PrefixGroup((0, 3, 5), 256)]]},
}


FORMATS = ("auto", "fp8_e4m3", "int8_kv", "int8_per_token")


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("cut", ["default", "splits", "invariant"])
@pytest.mark.parametrize("new", [1, 4, 300])
def test_a_step_does_not_wait(new: int, cut: str, kv_format: str) -> None:
    """L05: making a plan, writing and attending copy nothing from the device and wait for nothing."""
    options = dict(CUTS[cut])
    step = Step.of(decode(LENGTHS, new, kv_format=kv_format), batch_invariant=options.pop("batch_invariant", False))
    batch = step.problem.batch
    k = torch.randn(batch.slot_mapping.numel(), 2, 64, dtype=torch.bfloat16, device="cuda")

    def everything() -> None:
        octavo.append(step.problem.cache, k, k, batch.slot_mapping)
        step.run(**options)

    everything()
    with waiting_is_an_error():
        everything()


def test_a_merge_does_not_wait() -> None:
    outs, lses = torch.randn(3, 5, 4, 8, device="cuda"), torch.randn(3, 5, 4, device="cuda")
    with waiting_is_an_error():
        octavo.merge_states(outs, lses)


@pytest.mark.parametrize(
    ("cut", "kv_format"),
    [*((cut, "auto") for cut in ("default", "splits", "invariant")), ("default", "int8_kv"), ("default", "fp8_e4m3")],
)
def test_nothing_compiles_while_serving(cut: str, kv_format: str) -> None:
    """L04: after warming up, batches of 1, 8, 16 and 17 (values that Triton specialises on), lengths likewise."""
    options = dict(CUTS[cut])
    invariant = options.pop("batch_invariant", False)

    def serve(case: Case, before: bool = False) -> None:
        step = Step.of(replace(case, kv_format=kv_format), batch_invariant=invariant)
        if before:
            problem = step.problem
            sizes = {"max_num_seqs": 32, "max_seq_len": CAP, "prefixes": True, "lse": True}
            warm_up(step.planner, problem.spec, problem.cache, torch.bfloat16, **sizes, sinks=problem.sinks)
        batch = replace(step.problem.batch, max_seq_len=CAP)
        step = replace(step, problem=replace(step.problem, batch=batch))
        k = torch.zeros(batch.slot_mapping.numel(), 2, 64, dtype=torch.bfloat16, device="cuda")
        octavo.append(step.problem.cache, k, k, batch.slot_mapping)
        step.run(**options)

    serve(decode((40, 50, 60)), before=True)
    if cut == "splits":  # not the planner's own choice
        serve(decode((40, 50, 60), 30))
        serve(decode((40, 50, 60), 60))
    with compiling_is_an_error():
        for n in (1, 8, 16, 17):
            serve(decode((33,) * n))
            serve(decode((16,) * n))
            serve(decode((1,) * n))
        for lengths in ((48,), (64, 33, 40), (40,) * 16):
            serve(decode(lengths, 30))


def with_lengths(step: Step, buffers: PlanBuffers | None, lengths: tuple[int, ...]) -> Plan:
    """The plan of a step whose sequences have other lengths; its graph is captured for the longest."""
    batch = step.problem.batch
    batch.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
    return step.planner.plan(replace(batch, max_seq_len=CAP), buffers=buffers)


def attend(step: Step, plan: Plan, out: Tensor) -> None:
    problem = step.problem
    octavo.run(plan, problem.spec, problem.q, problem.cache, out, step.lse, sinks=problem.sinks)


@pytest.mark.parametrize(
    ("cut", "kv_format"), [*(("default", name) for name in FORMATS), ("invariant", "auto"), ("invariant", "int8_kv")]
)
def test_a_graph_sees_plans_that_are_built_outside(cut: str, kv_format: str) -> None:
    """J06, J11: an engine captures its layers and plans each step before the replay."""
    step = Step.of(decode((CAP,) * 8, kv_format=kv_format), **CUTS[cut])
    buffers = step.planner.buffers(max_num_tokens=32, max_num_seqs=32, max_seq_len=CAP)
    plan = with_lengths(step, buffers, (CAP,) * 8)
    attend(step, plan, step.out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(step, plan, step.out)
    wanted, expected = Step.of(step.problem.case, **CUTS[cut]), torch.empty_like(step.out)
    for lengths in (LENGTHS, (1024,) * 8, (5, 900, 512, 256, 1024, 3, 3, 70), LENGTHS[::-1]):
        with_lengths(step, buffers, lengths)
        step.out.fill_(99.0)
        graph.replay()
        attend(wanted, with_lengths(wanted, None, lengths), expected)
        assert_same_bits("out", step.out, expected)


@pytest.mark.parametrize("cut", ["default", "invariant"])
def test_a_plan_is_built_while_the_last_one_runs(cut: str) -> None:
    """J12, J16: the device is busy, the host plans two steps ahead into one memory, allocating nothing."""
    step = Step.of(decode((CAP,) * 8), **CUTS[cut])
    buffers = step.planner.buffers(max_num_tokens=32, max_num_seqs=32, max_seq_len=CAP)
    batches = [(LENGTHS, torch.empty_like(step.out)), ((1024,) * 8, torch.empty_like(step.out))]
    lens = [torch.tensor(lengths, dtype=torch.int32, device="cuda") for lengths, _ in batches]
    expected = [torch.empty_like(step.out) for _ in batches]
    for (lengths, _), out in zip(batches, expected, strict=True):
        attend(step, with_lengths(step, None, lengths), out)
    planned = [replace(step.problem.batch, seq_lens=x, max_seq_len=CAP) for x in lens]
    step.planner.plan(planned[0], buffers=buffers)
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    for batch, (_, out) in zip(planned, batches, strict=True):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        plan = step.planner.plan(batch, buffers=buffers)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        attend(step, plan, out)
    for (_, out), wanted in zip(batches, expected, strict=True):
        assert_same_bits("out", out, wanted)


@pytest.mark.parametrize("cut", ["default", "splits", "invariant"])
def test_two_streams_share_a_planner(cut: str) -> None:
    """Plans of one planner that run side by side leave their parts in memory of their own."""
    options = dict(CUTS[cut])
    step = Step.of(decode((CAP,) * 8), batch_invariant=options.pop("batch_invariant", False))
    streams = [torch.cuda.Stream() for _ in "ab"]
    lengths = [LENGTHS, LENGTHS[::-1]]
    lens = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in lengths]
    planned = [replace(step.problem.batch, seq_lens=x, max_seq_len=CAP) for x in lens]
    plans = [step.planner.plan(batch, **options) for batch in planned]
    expected = [torch.empty_like(step.out) for _ in plans]
    for plan, out in zip(plans, expected, strict=True):
        attend(step, plan, out)
    outs = [torch.empty(50, *step.out.shape, dtype=step.out.dtype, device="cuda") for _ in plans]
    torch.cuda.synchronize()
    for i in range(50):
        for stream, plan, out in zip(streams, plans, outs, strict=True):
            with torch.cuda.stream(stream):
                octavo.run(plan, SPEC, step.problem.q, step.problem.cache, out[i], sinks=step.problem.sinks)
    torch.cuda.synchronize()
    for out, wanted in zip(outs, expected, strict=True):
        for i in range(50):
            assert_same_bits("out", out[i], wanted)


@pytest.mark.parametrize("cut", ["default", "splits", "invariant"])
@pytest.mark.parametrize("new", [1, 4])
def test_a_graph_serves_other_lengths(new: int, cut: str) -> None:
    """J05, J06, J08, J15: captured with the bounds of the longest sequence, replayed for other lengths, for fewer
    sequences (the others have no key) and in another order; a plan and an attention are in the graph."""
    options = dict(CUTS[cut])
    invariant = options.pop("batch_invariant", False)
    cases = [
        decode(tuple(max(n, new) for n in lengths), new)
        for lengths in (LENGTHS, (5, 900, 512, 256, 1024, 3, 3, 70), (1024,) * 8, (4,) * 8)
    ]
    width = CAP // 16
    captured = Step.of(replace(cases[0], seq_lens=(CAP,) * 8), batch_invariant=invariant)
    problem = captured.problem
    table = torch.zeros(8, width, dtype=torch.int32, device="cuda")
    batch = replace(problem.batch, block_table=table, max_seq_len=CAP, slot_mapping=None)
    captured = replace(captured, problem=replace(problem, batch=batch))
    captured.run(**options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run(**options)

    def replay(case: Case) -> None:
        """Load a problem into the captured buffers and compare."""
        other = build(case, device="cuda")
        rows = len(other.q)
        problem.q[:rows] = other.q
        assert problem.sinks is not None
        problem.sinks.copy_(other.sinks)
        problem.cache.k_cache[: other.cache.num_blocks] = other.cache.k_cache
        problem.cache.v_cache[: other.cache.num_blocks] = other.cache.v_cache
        n = len(case.seq_lens)
        batch.seq_lens.zero_()
        batch.seq_lens[:n] = other.batch.seq_lens
        table.fill_(2**30)
        table[:n, : other.batch.block_table.shape[1]] = other.batch.block_table[:, :width]
        captured.out.fill_(99.0)
        graph.replay()
        assert_attention(other, captured.out[:rows], captured.lse[:rows])
        assert bool((captured.out[rows:] == 0).all()), "a sequence without keys gives 0"

    for case in (*cases, *reversed(cases)):
        replay(case)
    fewer = replace(cases[1], query_lens=cases[1].query_lens[:5], seq_lens=cases[1].seq_lens[:5])
    replay(fewer)
    replay(cases[0])


def test_the_second_device() -> None:
    """L03: tensors on device 1 while device 0 is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    assert torch.cuda.current_device() == 0
    case = decode(LENGTHS, 4)
    for num_splits in (None, 3):
        step = Step.of(case, "cuda:1")
        batch = step.problem.batch
        k, v = (
            torch.cat([x[len(x) - n :] for x, n in zip(side, case.query_lens, strict=True)])
            for side in (step.problem.keys, step.problem.values)
        )
        octavo.append(step.problem.cache, k, v, batch.slot_mapping)
        step.run(num_splits=num_splits)
        assert_attention(step.problem, step.out, step.lse)
    assert torch.cuda.current_device() == 0


def test_append_many_rows() -> None:
    """More rows than a launch grid has in its second dimension."""
    rows = 70_001
    cache = PagedKVCache(num_layers=1, num_blocks=rows, block_size=1, num_kv_heads=1, head_dim=8, device="cuda").layer(
        0
    )
    k = torch.randn(rows, 1, 8, device="cuda").bfloat16()
    slots = torch.randperm(rows, device="cuda")
    octavo.append(cache, k, -k, slots)
    assert_same_bits("K", cache.k_cache[slots, 0], k)
    assert_same_bits("V", cache.v_cache[slots, 0], -k)


@pytest.fixture
def wide_row() -> Iterator[Tensor]:
    """Rows of 8192 elements past offset 2^31, each filled with its number modulo 251: H03."""
    rows = torch.arange(262_145, device="cuda")
    yield (rows % 251).to(torch.bfloat16)[:, None, None].expand(-1, 64, 128).contiguous()
    torch.cuda.empty_cache()


def test_append_from_far_rows(wide_row: Tensor) -> None:
    rows = len(wide_row)
    cache = PagedKVCache(num_layers=1, num_blocks=4, block_size=1, num_kv_heads=64, head_dim=128, device="cuda").layer(
        0
    )
    slots = torch.full((rows,), -1, device="cuda")
    slots[[0, rows - 2, rows - 1]] = torch.tensor([0, 2, 3], device="cuda")
    octavo.append(cache, wide_row, wide_row, slots)
    assert_same_bits("K", cache.k_cache[[0, 2, 3], 0], wide_row[[0, rows - 2, rows - 1]])


def far_cache(like: LayerCache, num_blocks: int) -> LayerCache:
    """A cache whose last pages lie past 2^31 elements; its memory is not initialised."""
    shape = like.k_cache.shape
    cache = PagedKVCache(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=shape[1],
        num_kv_heads=shape[2],
        head_dim=shape[3],
        dtype=like.k_cache.dtype,
        device="cuda",
    ).layer(0)
    assert (num_blocks - 1) * cache.k_cache.stride(0) > 2**31
    return cache


@pytest.mark.parametrize("new", [1, 40])
@pytest.mark.parametrize("num_splits", [None, 3])
def test_far_pages(num_splits: int | None, new: int) -> None:
    """H01, H02, H05, H07: pages of 16 x 8 x 128 x 2 elements with numbers up to 70000: written, then read."""
    case = Case("far", AttentionSpec(32, 8, 128), (new, 1), (300, 40))
    step = Step.of(case)
    near = step.problem
    step.run(num_splits=num_splits)
    shift = 70_000 - near.cache.num_blocks
    cache = far_cache(near.cache, 70_000)
    cache.k_cache[shift:], cache.v_cache[shift:] = near.cache.k_cache, near.cache.v_cache
    k, v = (
        torch.cat([x[len(x) - n :] for x, n in zip(side, case.query_lens, strict=True)])
        for side in (near.keys, near.values)
    )
    slots = near.batch.slot_mapping + shift * 16
    block, offset = slots // 16, slots % 16
    cache.k_cache[block, offset] = 0
    octavo.append(cache, k, v, slots)
    assert_same_bits("K", cache.k_cache[block, offset], k)
    table = near.batch.block_table + shift
    far = replace(near, cache=cache, batch=replace(near.batch, block_table=table, slot_mapping=slots))
    planner = Planner(num_q_heads=32, value_dim=128, block_size=16, num_blocks=70_000, device="cuda")
    there = replace(step, problem=far, planner=planner, out=torch.empty_like(step.out), lse=torch.empty_like(step.lse))
    there.run(num_splits=num_splits)
    assert_same_bits("out", there.out, step.out)
    assert_same_bits("lse", there.lse, step.lse)
    del cache, far, there
    torch.cuda.empty_cache()


@pytest.mark.parametrize("num_splits", [None, 2])
def test_far_rows(num_splits: int | None) -> None:
    """H03, H04: queries and results past 2^31 elements; every row sees its own key alone, so out is its value."""
    n, heads, dim = 131_100, 128, 128
    spec = AttentionSpec(heads, 1, dim, window_left=0)
    values = torch.randn(n, 1, dim, device="cuda", dtype=torch.bfloat16)
    batch = AttentionBatch.from_raw_keys(*[torch.tensor([0, n], dtype=torch.int32)] * 2, device="cuda")
    planner = Planner(num_q_heads=heads, value_dim=dim, block_size=1, num_blocks=n, device="cuda")
    q = torch.zeros(n, heads, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(q, 99.0)
    assert q.numel() > 2**31
    octavo.run(planner.plan(batch, num_splits=num_splits), spec, q, LayerCache(values[:, None], values[:, None]), out)
    for rows in (slice(0, 50), slice(n // 2, n // 2 + 50), slice(n - 50, n)):
        assert_same_bits("out", out[rows], values[rows].expand(-1, heads, -1))
    assert bool((out[:, 0] == values[:, 0]).all())
    del q, out, planner
    torch.cuda.empty_cache()


def test_many_sequences() -> None:
    """H: 65537 sequences of one new token."""
    n = 65_537
    spec = AttentionSpec(2, 1, 16)
    values = torch.randn(n, 1, 16, device="cuda", dtype=torch.bfloat16)
    offsets = torch.arange(n + 1, dtype=torch.int32)
    batch = AttentionBatch.from_raw_keys(offsets, offsets, device="cuda")
    planner = Planner(num_q_heads=2, value_dim=16, block_size=1, num_blocks=n, device="cuda")
    q = torch.randn(n, 2, 16, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(q, 99.0)
    for num_splits in (None, 2):
        octavo.run(
            planner.plan(batch, num_splits=num_splits),
            spec,
            q,
            LayerCache(values[:, None], values[:, None]),
            out.fill_(99),
        )
        assert_same_bits("out", out, values.expand(-1, 2, -1))


@pytest.mark.parametrize(("tokens", "heads", "width"), [(70_001, 2, 8), (70_001, 128, 128)])
def test_merge_many_rows(tokens: int, heads: int, width: int) -> None:
    """65536+ rows, and partial results past 2^31 elements."""
    outs = torch.empty(2, tokens, heads, width, device="cuda").normal_()
    lses = torch.zeros(2, tokens, heads, device="cuda")
    lses[0] = -torch.inf
    out, lse = octavo.merge_states(outs, lses)
    assert bool((out == outs[1]).all())
    assert bool((lse == 0).all())
    del outs, out
    torch.cuda.empty_cache()


def run_twice(function: Callable[[], tuple[Tensor, Tensor]]) -> None:
    first, again = function(), function()
    for name, a, b in zip(("out", "lse"), first, again, strict=True):
        assert_same_bits(name, a, b)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("cut", CUTS)
def test_the_same_bits_twice(cut: str, kv_format: str) -> None:
    """A moving result is a race."""
    options = dict(CUTS[cut])
    invariant = options.pop("batch_invariant", False)
    shared = tuple(group for level in options.get("prefix_levels", ()) for group in level)
    step = Step.of(decode(LENGTHS, 4, shared=shared, kv_format=kv_format), batch_invariant=invariant)

    def once() -> tuple[Tensor, Tensor]:
        step.out.fill_(99.0)
        step.run(**options)
        return step.out.clone(), step.lse.clone()

    for _ in range(5):
        run_twice(once)
    assert_attention(step.problem, *once())


@pytest.mark.parametrize("kv_format", FORMATS)
def test_rows_of_a_long_chunk_have_the_bits_of_single_ones(kv_format: str) -> None:
    """In the batch-invariant mode, whose kernels for the two have the same tile and differ in all else."""
    spec, many, length = AttentionSpec(8, 2, 64, window_left=600), 150, 1100
    step = Step.of(
        Case("chunk", spec, (many,), (length,), dtype=torch.bfloat16, kv_format=kv_format), batch_invariant=True
    )
    step.run()
    problem, table = step.problem, step.problem.batch.block_table
    for new in (1, 3):
        plan = step.planner.plan(AttentionBatch.from_lengths([new], [length], table, device=table.device))
        out, lse = step.out[:new].clone(), step.lse[:new].clone()
        octavo.run(plan, spec, problem.q[many - new :], problem.cache, out, lse)
        assert_same_bits(f"out of {new}", out, step.out[many - new :])
        assert_same_bits(f"lse of {new}", lse, step.lse[many - new :])


@pytest.mark.parametrize("cut", CUTS)
def test_layers_share_what_a_plan_keeps(cut: str) -> None:
    """The second and third layer take the launches of the first, with addresses of their own."""
    options = dict(CUTS[cut])
    invariant = options.pop("batch_invariant", False)
    shared = tuple(group for level in options.get("prefix_levels", ()) for group in level)
    case = decode(LENGTHS, 4, shared=shared)
    step = Step.of(case, batch_invariant=invariant)
    plan = step.planner.plan(step.problem.batch, **options)
    for seed in range(3):
        problem = build(case, seed=seed, device="cuda", poison=float("nan"))
        out, lse = torch.full_like(step.out, 99.0), torch.full_like(step.lse, 99.0)
        octavo.run(plan, SPEC, problem.q, problem.cache, out, lse, sinks=problem.sinks)
        assert_attention(problem, out, lse)
