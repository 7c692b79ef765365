"""Wrong arguments of `run`, `merge_states` and `paged_attention`: a clear error, and nothing written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import octavo
from octavo import AttentionBatch, AttentionSpec, KVShard, Planner, Unsupported
from octavo.cache import LayerCache, PagedKVCache

SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16)
TERMS = torch.ones(4)


@dataclass(frozen=True, slots=True)
class Call:
    """Good arguments of `run`: two sequences of 2 and 3 new tokens, 5 and 9 keys, pages of 4."""

    arguments: dict[str, Any]
    pages: torch.Tensor

    def change(self, **changes: object) -> Call:
        return replace(self, arguments=self.arguments | changes)

    def refused(self, error: type[Exception], message: str) -> None:
        """Run it; it must raise, and neither out, lse nor a page may change."""
        out, lse, before = self.arguments["out"], self.arguments["lse"], self.pages.clone()
        kept = [x.clone() if isinstance(x, torch.Tensor) and x.device.type == "cpu" else None for x in (out, lse)]
        with pytest.raises(error, match=message):
            octavo.run(**self.arguments)
        for now, then in zip((out, lse), kept, strict=True):
            assert then is None or torch.equal(now, then)
        assert torch.equal(self.pages, before)


def make_batch() -> AttentionBatch:
    return AttentionBatch.from_lengths([2, 3], [5, 9], [[3, 1], [0, 5, 2]])


def make_planner(**options: Any) -> Planner:
    return Planner(**{"num_q_heads": 4, "value_dim": 16, "block_size": 4, "num_blocks": 6} | options)


@pytest.fixture(params=[(None, False), (2, False), (None, True)], ids=["one state", "splits", "after a good call"])
def call(request: pytest.FixtureRequest) -> Call:
    num_splits, after = request.param
    cache = PagedKVCache(num_layers=1, num_blocks=6, block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    cache.layer(0).k_cache.normal_()
    cache.layer(0).v_cache.normal_()
    call = Call(
        {
            "plan": make_planner().plan(make_batch(), num_splits=num_splits),
            "spec": SPEC,
            "q": torch.randn(5, 4, 16),
            "cache": cache.layer(0),
            "out": torch.full((5, 4, 16), 99.0),
            "lse": torch.full((5, 4), 99.0),
        },
        cache.pages,
    )
    if after:  # what passed is not checked again
        octavo.run(**call.change(out=torch.empty(5, 4, 16), lse=torch.empty(5, 4)).arguments)
    return call


def test_the_good_call(call: Call) -> None:
    """What every test below changes in one place runs, and reads but does not write the pages."""
    before = call.pages.clone()
    octavo.run(**call.arguments)
    assert not bool((call.arguments["out"] == 99).any())
    assert not bool((call.arguments["lse"] == 99).any())
    assert torch.equal(call.pages, before)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        # J14: planned for 5 rows, run with 4.
        (
            "q",
            torch.zeros(4, 4, 16),
            ValueError,
            r"q must be \[at least num_tokens = 5, 4, 16\], got \(4, 4, 16\)",
        ),
        ("q", torch.zeros(5, 3, 16), ValueError, r"q must be .* got \(5, 3, 16\)"),
        ("q", torch.zeros(5, 4, 8), ValueError, r"q must be .* got \(5, 4, 8\)"),
        ("q", torch.zeros(5, 64), ValueError, r"q must be .* got \(5, 64\)"),
        ("q", torch.zeros(5, 4, 32)[..., ::2], ValueError, "q must be contiguous in its last dimension"),
        ("q", torch.zeros(5, 4, 16, dtype=torch.float64), Unsupported, "q of torch.float64 is not supported"),
        ("q", torch.zeros(5, 4, 16, dtype=torch.int32), Unsupported, "q of torch.int32 is not supported"),
        ("q", torch.zeros(5, 4, 16, device="meta"), ValueError, "device meta"),
        ("q", [[1.0]], TypeError, "q must be a torch tensor, got list"),
        ("out", torch.zeros(4, 4, 16), ValueError, r"out must be \[at least num_tokens = 5, 4, 16\]"),
        ("out", torch.zeros(5, 4, 24), ValueError, r"out must be .* got \(5, 4, 24\)"),
        ("out", torch.zeros(5, 4, 32)[..., ::2], ValueError, "out must be contiguous in its last dimension"),
        ("out", torch.zeros(5, 4, 16, dtype=torch.int64), TypeError, "out must be a float tensor"),
        ("out", torch.zeros(5, 4, 16, device="meta"), ValueError, "out is on meta"),
        ("out", None, TypeError, "out must be a torch tensor, got NoneType"),
        ("out", torch.zeros(1, 4, 16).expand(5, -1, -1), ValueError, "out"),
        ("lse", torch.zeros(4, 4), ValueError, r"lse must be float32 \[at least num_tokens = 5, 4\]"),
        ("lse", torch.zeros(5, 3), ValueError, r"lse must be float32 .* got torch.float32 \(5, 3\)"),
        ("lse", torch.zeros(5, 4, 1), ValueError, "lse must be float32"),
        (
            "lse",
            torch.zeros(5, 4, dtype=torch.float64),
            ValueError,
            "lse must be float32 .* got torch.float64",
        ),
        ("lse", torch.zeros(5, 4, device="meta"), ValueError, "lse"),
        ("lse", 0.0, TypeError, "lse must be a torch tensor, got float"),
        ("spec", AttentionSpec(4, 1, 16), ValueError, r"k_cache must be \[num_blocks, block_size, 1, 16\]"),
        ("spec", AttentionSpec(4, 2, 24), ValueError, "q must be"),
        ("spec", AttentionSpec(4, 2, 16, 24), ValueError, "out must be"),
        (
            "spec",
            AttentionSpec(4, 2, 1024),
            Unsupported,
            "head_dim 1024 and value_dim 1024 must be at most 512",
        ),
        ("alibi_slopes", TERMS, ValueError, "alibi_slopes must be None"),
        ("sinks", TERMS, ValueError, "sinks must be None"),
    ],
)
def test_wrong_arguments(call: Call, name: str, value: object, error: type, message: str) -> None:
    call.change(**{name: value}).refused(error, message)


def pages(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("k", "v", "error", "message"),
    [
        (pages(6, 4, 1, 16), pages(6, 4, 1, 16), ValueError, r"k_cache must be .* got \(6, 4, 1, 16\)"),
        (pages(6, 4, 2, 8), pages(6, 4, 2, 16), ValueError, r"k_cache must be .* got \(6, 4, 2, 8\)"),
        (pages(6, 4, 2, 16), pages(6, 4, 2, 8), ValueError, r"v_cache must be .* got \(6, 4, 2, 8\)"),
        (
            pages(6, 4, 2, 16, device="meta"),
            pages(6, 4, 2, 16, device="meta"),
            ValueError,
            "cache is on meta",
        ),
        # The plan was made for 6 blocks of 4 rows; another page size would read other pages.
        (pages(6, 2, 2, 16), pages(6, 2, 2, 16), ValueError, "block_size"),
        (pages(6, 8, 2, 16), pages(6, 8, 2, 16), ValueError, "block_size"),
        (pages(4, 4, 2, 16), pages(4, 4, 2, 16), ValueError, "blocks"),
    ],
)
def test_wrong_caches(call: Call, k: torch.Tensor, v: torch.Tensor, error: type, message: str) -> None:
    call.change(cache=LayerCache(k, v)).refused(error, message)


@pytest.mark.parametrize(
    ("k_dtype", "v_dtype", "message"),
    [
        (torch.int16, torch.float32, "K of torch.int16 and V of torch.float32"),
        (torch.float32, torch.float64, "each must be float16, bfloat16 or"),
        (torch.float32, torch.float8_e5m2, "no cache format has"),
    ],
)
def test_pages_of_no_format(k_dtype: torch.dtype, v_dtype: torch.dtype, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        LayerCache(pages(6, 4, 2, 16, dtype=k_dtype), pages(6, 4, 2, 16, dtype=v_dtype))


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "must be given"),
        (torch.ones(3), r"must be float32 \[4\] on cpu, got torch.float32 \(3,\)"),
        (torch.ones(4, 1), r"must be float32 \[4\]"),
        (torch.ones(4, dtype=torch.bfloat16), r"must be float32 \[4\] on cpu, got torch.bfloat16"),
        (torch.ones(4, device="meta"), ".* on meta"),
        ([1.0] * 4, "must be"),
    ],
)
def test_wrong_head_terms(call: Call, name: str, value: object, message: str) -> None:
    """D08: slopes of half precision are refused, not read as something else."""
    options = {"alibi_slopes": {"alibi": "linear"}, "sinks": {"sinks": True}}[name]
    call = call.change(spec=replace(SPEC, **options))
    call.change(**{name: value}).refused((ValueError, TypeError), f"{name} {message}")


def test_a_rank_adds_no_sink(call: Call) -> None:
    """E06: the sink belongs to the reduction over ranks."""
    batch = AttentionBatch.from_lengths([2, 3], [5, 9], [[3, 1], [0, 5]])
    plan = make_planner(shard=KVShard(2, 0)).plan(batch)
    call = call.change(plan=plan, spec=replace(SPEC, sinks=True), sinks=TERMS)
    call.refused(ValueError, "give sinks to merge_states")
    octavo.run(**call.change(sinks=None).arguments)


def test_no_gradient_is_recorded(call: Call) -> None:
    """Serving records no graph, whatever q's history; otherwise each step would keep its scores alive."""
    q = torch.randn(5, 4, 16, requires_grad=True)
    octavo.run(**call.change(q=q).arguments)
    assert not call.arguments["out"].requires_grad
    assert not call.arguments["lse"].requires_grad


@pytest.mark.parametrize("num_splits", [None, 3])
@pytest.mark.parametrize("sinks", [None, TERMS])
def test_rows_of_no_sequence_are_treated_alike(num_splits: int | None, sinks: torch.Tensor | None) -> None:
    """J15: a graph's padding rows, within num_tokens but past the last sequence: the same under any cut."""
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
        seq_lens=torch.tensor([5], dtype=torch.int32),
        block_table=torch.tensor([[3, 1]], dtype=torch.int32),
        num_tokens=4,
        max_query_len=2,
        max_seq_len=5,
    )
    q = torch.full((4, 4, 16), float("nan"))
    q[:2] = 1.0
    k_cache, v_cache = torch.randn(2, 6, 4, 2, 16)
    out, lse = torch.full((4, 4, 16), 99.0), torch.full((4, 4), 99.0)
    spec = replace(SPEC, sinks=sinks is not None)
    plan = make_planner().plan(batch, num_splits=num_splits)
    octavo.run(plan, spec, q, LayerCache(k_cache, v_cache), out, lse, sinks=sinks)
    assert bool((out[:2] != 99).all())
    assert bool((out[2:] == 99).all()), "rows of no sequence were written"
    assert bool((lse[2:] == 99).all()), "rows of no sequence were written"


# --- merge_states -------------------------------------------------------------------------------------

OUTS, LSES = torch.zeros(2, 3, 4, 16), torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"outs": OUTS[0]}, ValueError, r"outs must be \[num_parts >= 1.* got \(3, 4, 16\)"),
        ({"outs": OUTS[:0], "lses": LSES[:0]}, ValueError, r"outs must be .* got \(0, 3, 4, 16\)"),
        ({"lses": LSES[:1]}, ValueError, r"lses .* got \(2, 3, 4, 16\) and \(1, 3, 4\)"),
        ({"lses": LSES.mT}, ValueError, r"lses .* \(2, 4, 3\)"),
        ({"lses": LSES.double()}, TypeError, "lses float32, got torch.float32 and torch.float64"),
        ({"outs": OUTS.long()}, TypeError, "outs must be float .* got torch.int64"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be float32 \[4\], got torch.float32 \(3,\)"),
        ({"sinks": torch.zeros(4).half()}, ValueError, r"sinks must be float32 \[4\], got torch.float16"),
        ({"lses": LSES.to("meta")}, ValueError, "lses"),
        ({"sinks": torch.zeros(4, device="meta")}, ValueError, "sinks"),
        ({"outs": [OUTS[0], OUTS[1]]}, TypeError, "outs must be a torch tensor"),
        ({"lses": None}, TypeError, "lses must be a torch tensor"),
        ({"sinks": [0.0] * 4}, TypeError, "sinks must be a torch tensor"),
    ],
)
def test_wrong_states(change: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        octavo.merge_states(**{"outs": OUTS, "lses": LSES} | change)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_merge_keeps_the_dtype_and_its_arguments(dtype: torch.dtype) -> None:
    outs, lses = torch.randn(3, 5, 2, 8).to(dtype), torch.randn(3, 5, 2)
    before = outs.clone(), lses.clone()
    out, lse = octavo.merge_states(outs, lses)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert torch.equal(outs, before[0])
    assert torch.equal(lses, before[1])
    same, _ = octavo.merge_states(outs[:1].expand(3, -1, -1, -1), lses[:1].expand(3, -1, -1))
    assert same.shape == (5, 2, 8)


# --- the one-call form --------------------------------------------------------------------------------


def one_call(**changes: object) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = torch.randn(2, 6, 4, 2, 16, generator=generator)
    arguments = {
        "q": torch.randn(5, 4, 16, generator=generator),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": torch.tensor([[3, 1, 9], [0, 5, 2]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 9], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2, 5], dtype=torch.int32),
    }
    return octavo.paged_attention(**arguments | changes)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, "q must be a torch tensor, got list"),
        ({"k_cache": None}, TypeError, "k_cache must be a torch tensor, got NoneType"),
        ({"v_cache": 3}, TypeError, "v_cache must be a torch tensor, got int"),
        ({"block_table": [[3, 1], [0, 5]]}, TypeError, "block_table must be a torch tensor, got list"),
        ({"seq_lens": [5, 9]}, TypeError, "seq_lens must be a torch tensor, got list"),
        ({"query_start_loc": [0, 2, 5]}, TypeError, "query_start_loc must be a torch tensor, got list"),
        ({"alibi_slopes": [1.0] * 4}, TypeError, "alibi_slopes must be a torch tensor, got list"),
        ({"sinks": [1.0] * 4}, TypeError, "sinks must be a torch tensor, got list"),
        (
            {"q": torch.zeros(5, 64)},
            ValueError,
            r"q must be \[num_tokens, num_q_heads, head_dim\], got shape",
        ),
        ({"q": torch.zeros(5, 4, 8)}, ValueError, "q has head_dim 8, k_cache 16"),
        ({"q": torch.zeros(5, 3, 16)}, ValueError, "num_q_heads must be a positive multiple .* got 3 and 2"),
        ({"q": torch.zeros(5, 4, 16, dtype=torch.int64)}, ValueError, "q of torch.int64"),
        ({"q": torch.zeros(4, 4, 16)}, ValueError, r"\bq\b"),
        ({"block_table": torch.zeros(3, dtype=torch.int32)}, ValueError, "block_table must have 2 dimension"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, "block_table must be torch.int32"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, "seq_lens must lie in"),
        (
            {"block_table": torch.full((2, 3), 6, dtype=torch.int32)},
            ValueError,
            r"block_table\[0, 0\] = 6 lies",
        ),
        (
            {"block_table": torch.full((2, 3), -1, dtype=torch.int32)},
            ValueError,
            r"block_table\[0, 0\] = -1 lies",
        ),
        ({"seq_lens": torch.tensor([5, 9])}, TypeError, "seq_lens must be torch.int32"),
        ({"seq_lens": torch.tensor([5, 13], dtype=torch.int32)}, ValueError, "seq_lens"),
        ({"seq_lens": torch.tensor([5, -1], dtype=torch.int32)}, ValueError, "seq_lens"),
        (
            {"query_start_loc": torch.tensor([0, 5], dtype=torch.int32)},
            ValueError,
            "query_start_loc must have",
        ),
        (
            {"query_start_loc": torch.tensor([0, 6, 5], dtype=torch.int32)},
            ValueError,
            "query_start_loc must start",
        ),
        ({"query_start_loc": torch.zeros(0, dtype=torch.int32)}, ValueError, "query_start_loc must have"),
        ({"k_cache": torch.zeros(6, 4, 2, 8)}, ValueError, "head_dim"),
        ({"k_cache": torch.zeros(6, 4, 2)}, ValueError, "k_cache must be"),
        ({"v_cache": torch.zeros(5, 4, 2, 16)}, ValueError, "k_cache and v_cache must agree"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes must be float32 \[4\]"),
        ({"sinks": torch.ones(5)}, ValueError, r"sinks must be float32 \[4\]"),
        ({"sqrt_alibi": True}, ValueError, "sqrt_alibi=True needs alibi_slopes"),
        ({"window_left": -1}, ValueError, "window_left must be None"),
        ({"window_right": -1}, ValueError, "window_right must be None"),
        ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap must be None"),
        ({"num_splits": 0}, ValueError, "num_splits must be None or at least 1, got 0"),
        ({"common_prefix_len": -1}, ValueError, "common_prefix_len must be at least 0"),
        ({"common_prefix_len": 4}, ValueError, "do not share their first 4 keys"),
        ({"num_splits": 2, "batch_invariant": True}, ValueError, "num_splits=2 contradicts batch_invariant"),
        ({"k_descale": torch.ones(1)}, Unsupported, "k_descale belongs to 8-bit tensors"),
        ({"q_descale": torch.ones(1)}, Unsupported, "q_descale belongs to 8-bit tensors"),
        ({"v_descale": torch.ones(1)}, Unsupported, "v_descale belongs to 8-bit tensors"),
    ],
)
def test_wrong_one_calls(change: dict, error: type, message: str, backend: str) -> None:
    with pytest.raises(error, match=message):
        one_call(**change, backend=backend)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("triton", "backend 'triton' needs GPU kernels"),
        ("gluon", "backend 'gluon' needs GPU kernels"),
        ("cuda", "unknown backend 'cuda'; known backends: cpu, triton, gluon, and for paged_attention reference"),
    ],
)
def test_backends_that_cannot(backend: str, message: str) -> None:
    """One function says why; nothing falls back in silence."""
    with pytest.raises(Unsupported, match=message):
        one_call(backend=backend)


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
def test_padding_rows_of_one_call(backend: str | None) -> None:
    """Rows of q past query_start_loc[-1] give (0, -inf); the others do not change."""
    out, lse = one_call(backend=backend)
    padded = torch.full((8, 4, 16), float("nan"))
    padded[:5] = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(0))
    with_padding = one_call(q=padded, backend=backend)
    short = one_call(q=padded[:5], backend=backend)
    assert out.shape == (5, 4, 16)
    assert lse.dtype == torch.float32
    assert with_padding[0].shape == (8, 4, 16)
    assert torch.equal(with_padding[0][:5], short[0])
    assert torch.equal(with_padding[1][:5], short[1])
    assert bool((with_padding[0][5:] == 0).all())
    assert bool((with_padding[1][5:] == -torch.inf).all())
