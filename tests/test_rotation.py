"""K and q turned alike, K less an offset: the same attention, however the work is cut, and int8 loses less."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.common import CUTS, small
from conformance.harness import Cut, make_plan, over_ranks
from octavo import Unsupported
from octavo.backend import Impl
from octavo.bench.cases import Case, Problem, build
from octavo.reference import attention, real
from octavo.rotation import Rotation, hadamard, rotate
from octavo.spec import AttentionSpec, KVShard
from tolerance import assert_same_bits, assert_within, eager


@pytest.mark.parametrize("width", [1, 7, 16, 80, 96, 128, 256])
def test_scores_stay_and_nothing_stands_out(width: int) -> None:
    rotation = hadamard(width, torch.bfloat16)
    assert rotation.q.dtype == torch.float32  # on a CPU
    assert rotation.q.bfloat16().equal(rotation.q)  # exact in 16 bits
    assert rotation.k.bfloat16().equal(rotation.k)
    assert (rotation.q.double() @ rotation.k.double().T).equal(torch.eye(width).double())  # exactly
    outlier = torch.zeros(width)
    outlier[0] = 1.0
    block = width & -width
    assert (outlier @ rotation.k).abs().max() <= (2 / block) ** 0.5
    rows = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(0))
    for matrix in (rotation.q, rotation.k):
        assert_within("sums", rotate(rows, matrix, True), rows.double() @ matrix.double(), rows)
        assert rotate(rows, matrix, True)[1, 2].equal(rotate(rows[1, 2], matrix, True))


def coarse(x: torch.Tensor) -> torch.Tensor:
    """Numbers whose sums are exact, so that products of matrices give the same bits for any number of rows."""
    return (x * 64).round() / 64


def write(problem: Problem, impl: Impl, offset: torch.Tensor) -> None:
    """Store all keys, with `offset` added, into the pages of a problem."""
    size = problem.case.block_size
    for table, k, v in zip(problem.batch.block_table.long(), problem.keys, problem.values, strict=True):
        local = torch.arange(problem.shard.local_count(len(k)))
        mine = problem.shard.global_position(local)
        impl.append(
            (coarse(k[mine]) + offset).to(problem.case.dtype),
            v[mine],
            problem.cache,
            table[local // size] * size + local % size,
        )


def attend(impl: Impl, case: Case, cut: Cut, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse through the layer, whole again."""
    parts = []
    for rank in range(cut.world):
        problem = build(case, page_seed=rank, poison=float("nan"), shard=KVShard(cut.world, rank, cut.interleave))
        write(problem, impl, offset)
        dtype = case.dtype if cut.world == 1 else torch.float32
        out = torch.full((len(problem.q), case.spec.num_q_heads, case.spec.v_dim), 99.0, dtype=dtype)
        lse = torch.full(out.shape[:2], 99.0)
        impl.forward(coarse(problem.q), None, None, problem.cache, make_plan(problem, cut), out, lse)
        parts.append((out, lse))
    out, lse = over_ranks(parts, impl.sinks)
    return out.to(case.dtype), lse


ALL = {"window_left": 20, "logits_soft_cap": 2.0, "alibi": "linear", "sinks": True}
CROSSINGS = [
    (small("ranks", kv_format="int8_k", alibi="linear"), Cut(world=3, interleave=2), True),
    (small("empty-ranks", kv_format="int8_per_token", dtype=torch.bfloat16, causal=False), Cut(world=8), True),
    (small("ranks-with-sinks", kv_format="int8_k", logits_soft_cap=2.0, sinks=True), Cut(world=3), False),
    (small("cascade", kv_format="int8_k", alibi="sqrt", window_left=20), CUTS["cascade"], True),
    (small("all-cuts", kv_format="int8_kv", dtype=torch.bfloat16, alibi="linear", order="NHD"), CUTS["all"], True),
    (small("all-scores", kv_format="int8_per_token", **ALL), CUTS["cascade"], False),
    (small("all-scores-split", kv_format="int8_kv", **ALL), CUTS["splits"], False),
]


@pytest.mark.parametrize("rotated", [True, False], ids=["rotated", "as it is"])
@pytest.mark.parametrize(("case", "cut", "moved"), CROSSINGS, ids=lambda x: getattr(x, "name", ""))
def test_every_cut_is_the_oracles_attention(case: Case, cut: Cut, moved: bool, rotated: bool) -> None:
    """Against the float64 oracle on what the pages of one whole cache hold, the LSE less what the offset took."""
    spec = case.spec
    offset = torch.zeros(spec.num_kv_heads, spec.head_dim)
    if moved:
        offset[:, 3], offset[1, 12] = 6.0, -5.0
    whole = build(case)
    rotation = hadamard(spec.head_dim, case.dtype) if rotated else None
    impl = Impl(
        spec,
        kind="decoder" if spec.causal else "encoder_decoder",
        alibi_slopes=whole.alibi_slopes,
        sinks=whole.sinks,
        k_offset=offset if moved else None,
        rotation=rotation,
    )
    write(whole, impl, offset)
    whole = replace(whole, q=coarse(whole.q))
    q = whole.q if rotation is None else rotate(whole.q, rotation.q)
    terms = {"alibi_slopes": whole.alibi_slopes, "sinks": whole.sinks}
    real_q, real_k, real_v = real(whole.batch, q, whole.cache)
    true_out, true_lse = attention(spec, whole.batch, real_q, real_k, real_v, **terms)
    pages = [whole.batch.block_table[i, : -(-n // case.block_size)].long() for i, n in enumerate(case.seq_lens)]
    keys, values = (
        tuple(x[p].float().flatten(0, 1)[:n] for p, n in zip(pages, case.seq_lens, strict=True))
        for x in (real_k, real_v)
    )
    plain_out, plain_lse = eager(replace(whole, q=q, keys=keys, values=values))
    taken = torch.einsum("nhgd,hd->nhg", whole.q.double().unflatten(1, (-1, spec.group_size)), offset.double())
    true_lse = true_lse + taken.flatten(1) * spec.scale
    out, lse = attend(impl, case, cut, offset)
    unquantised = replace(build(replace(case, kv_format="auto")), keys=whole.keys)
    write(unquantised, Impl(spec, kind=impl.kind, **terms), offset)
    _, near = attention(spec, whole.batch, whole.q, unquantised.cache.k_cache, unquantised.cache.v_cache, **terms)
    assert (lse - near)[near.isfinite()].abs().max() < 0.1
    assert_within("out", out, true_out, plain_out)
    assert_within("lse", lse, true_lse, plain_lse + (taken.flatten(1) * spec.scale).float())


@pytest.mark.parametrize("changes", [{}, {"logits_soft_cap": 3.0, "sinks": True}], ids=str)
def test_int8_loses_less(changes: dict) -> None:
    """A channel of K and another of q are far larger than the rest, with no mean that could be taken off."""
    case = small("outliers", heads=(4, 2), **changes)
    case = replace(case, spec=replace(case.spec, head_dim=64, value_dim=16))
    plain = build(case)
    plain.q[..., 5] *= 20
    for k in plain.keys:
        k[..., 11] *= 20
    nothing = torch.zeros(2, 64)

    def out(kv_format: str, **options: Rotation) -> torch.Tensor:
        problem = replace(build(replace(case, kv_format=kv_format)), q=plain.q, keys=plain.keys, values=plain.values)
        impl, result = Impl(case.spec, sinks=plain.sinks, **options), torch.zeros(len(plain.q), 4, 16)
        write(problem, impl, nothing)
        impl.forward(plain.q, None, None, problem.cache, make_plan(problem), result)
        return result

    true, rotation = out("auto"), hadamard(64, torch.float32)
    assert (out("int8_k", rotation=rotation) - true).norm() < 0.4 * (out("int8_k") - true).norm()
    assert (out("auto", rotation=rotation) - true).norm() < 1e-5 * true.norm()


def test_what_a_rotation_does_not_go_with() -> None:
    spec = AttentionSpec(4, 2, 32)
    rotation = hadamard(32, torch.float32)
    with pytest.raises(Unsupported, match="attends to raw keys"):
        Impl(AttentionSpec(4, 2, 32, causal=False), kind="encoder", rotation=rotation)
    with pytest.raises(ValueError, match=r"must be \(32, 32\), got \(64, 64\)"):
        Impl(spec, rotation=hadamard(64, torch.float32))
    case = small("a", heads=(4, 2), kv_format="int8_k")
    problem = build(case)
    impl, out = Impl(case.spec, rotation=hadamard(16, torch.float32)), torch.zeros(len(problem.q), 4, 16)
    with pytest.raises(Unsupported, match="needs a rotation that is"):
        impl.forward(problem.q, None, None, problem.cache, make_plan(problem, Cut(invariant=True)), out)


def test_invariant_layers_do_not_look_at_neighbours() -> None:
    """A sequence alone, and among others: the same codes in its pages, the same output, bit for bit."""
    case = small("a", heads=(4, 2), kv_format="int8_k")
    impl = Impl(case.spec, rotation=hadamard(16, torch.float32, batch_invariant=True))
    problem = build(case)
    write(problem, impl, torch.zeros(2, 16))
    together = torch.zeros(len(problem.q), 4, 16)
    impl.forward(problem.q, None, None, problem.cache, make_plan(problem, Cut(invariant=True)), together)
    assert not together.eq(0).all()
    starts = problem.batch.query_start_loc.tolist()
    for seq in range(len(starts) - 1):
        rows = slice(starts[seq], starts[seq + 1])
        one = replace(case, shared=(), query_lens=case.query_lens[seq : seq + 1], seq_lens=case.seq_lens[seq : seq + 1])
        alone = replace(build(one), keys=problem.keys[seq : seq + 1], values=problem.values[seq : seq + 1])
        write(alone, impl, torch.zeros(2, 16))
        out = torch.zeros(len(alone.q), 4, 16)
        impl.forward(problem.q[rows], None, None, alone.cache, make_plan(alone, Cut(invariant=True)), out)
        assert_same_bits("out", out, together[rows])
