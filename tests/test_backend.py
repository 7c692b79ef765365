"""The triple: what it says it supports it computes, the rest it refuses with a reason to act on."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest
import torch

from octavo import reference
from octavo.backend import Backend, BuilderConfig, Impl, MetadataBuilder, window_radii
from octavo.batch import AttentionBatch
from octavo.cache import LayerCache, PagedKVCache
from octavo.errors import Unsupported
from octavo.spec import AttentionSpec, KVShard
from tolerance import assert_within

CPU = torch.device("cpu")
SPEC = AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=16)
ENCODER = dataclasses.replace(SPEC, causal=False)


def builder(**changes) -> MetadataBuilder:
    config = BuilderConfig(num_q_heads=6, value_dim=16, block_size=4, num_blocks=32, max_model_len=64)
    return MetadataBuilder(dataclasses.replace(config, **changes))


def supports(**changes) -> str | None:
    return Backend.supports(**{"spec": SPEC, "dtype": torch.float32, "device": CPU, **changes})


@pytest.mark.parametrize("dtype", Backend.dtypes)
@pytest.mark.parametrize("kv_format", Backend.kv_formats)
def test_what_is_declared_is_supported(dtype, kv_format) -> None:
    assert supports(dtype=dtype, kv_format=kv_format) is None
    layout = Backend.page_layout(SPEC, dtype, kv_format, block_size=16)
    numbers = 16 * (layout.format.k_dtype.itemsize + layout.format.v_dtype.itemsize)
    scales = 4 * (layout.format.k_scaled_by_row + layout.format.v_scaled_by_row)
    assert layout.token_bytes == 2 * (numbers + scales)
    assert layout.page_bytes == 16 * layout.token_bytes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_format": "int3"}, "known formats: auto"),
        ({"dtype": torch.float64}, "float64.*use float16, bfloat16 or float32"),
        ({"device": torch.device("cuda")}, "GPU kernels.*move the tensors to the CPU"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"kind": "decoding"}, "known kinds: decoder, encoder"),
        ({"kind": "encoder"}, "causal=False, the spec says causal=True"),
        ({"spec": ENCODER}, "causal=True, the spec says causal=False"),
        ({"spec": AttentionSpec(1, 1, 520)}, "at most 512"),
    ],
    ids=str,
)
def test_what_is_not_supported_has_a_reason(changes, reason) -> None:
    import re

    assert re.search(reason, supports(**changes) or "supported")


def test_window_radii() -> None:
    assert window_radii(None) == (None, None)
    assert window_radii(1) == (0, 0)
    assert window_radii(4) == (3, 0)
    assert window_radii(4, "encoder_only") == (3, 3)
    with pytest.raises(ValueError, match="sliding_window must be None or at least 1, got 0"):
        window_radii(0)


def test_a_layer_writes_and_attends() -> None:
    """Two steps of one request, as an engine drives them; the second sees what the first wrote."""
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 6, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    cache = PagedKVCache(num_layers=1, num_blocks=32, block_size=4, num_kv_heads=2, head_dim=16,
                         dtype=torch.float32).layer(0)  # fmt: skip
    sinks = torch.randn(6)
    impl = Impl(dataclasses.replace(SPEC, sinks=True), sinks=sinks)
    make, table = builder(), [7, 3, 20]
    out = torch.full((9, 6, 16), 99.0)
    for start, stop in ((0, 5), (5, 9)):
        slots = torch.tensor([table[p // 4] * 4 + p % 4 for p in range(start, stop)])
        plan = make.build(0, AttentionBatch.from_lengths([stop - start], [stop], [table], slot_mapping=slots))
        impl.update_cache(k[start:stop], v[start:stop], cache, plan)
        impl.forward(q[start:stop], None, None, cache, plan, out[start:stop])
    batch = AttentionBatch.from_lengths([9], [9], [[0]])
    true, _ = reference.attention(impl.spec, batch, q, k[None], v[None], sinks=sinks)
    assert_within("two steps", out, true, true.float())


def test_a_rank_warms_up_a_layer_with_sinks() -> None:
    cache = PagedKVCache(num_layers=1, num_blocks=32, block_size=4, num_kv_heads=2, head_dim=16,
                         dtype=torch.float32).layer(0)  # fmt: skip
    impl = Impl(dataclasses.replace(SPEC, sinks=True), sinks=torch.ones(6))
    with patch("octavo.warm_up.run") as run:
        builder(shard=KVShard(2, 1)).warm_up(impl, cache, torch.float32, 4)
    assert run.call_args_list
    for call in run.call_args_list:
        assert call.kwargs["sinks"] is None
        lse = call.args[5]
        assert lse.shape == call.args[2].shape[:2]  # of q


@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
def test_an_encoder_attends_to_raw_keys(kind) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 6, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    left, right = window_radii(3, kind)
    impl = Impl(dataclasses.replace(ENCODER, window_left=left, window_right=right), kind=kind)
    out = torch.full((9, 6, 16), 99.0)
    plan = builder(block_size=1, num_blocks=None).build(0, AttentionBatch.from_raw_keys(starts, starts))
    impl.forward(q, k, v, None, plan, out)
    for a, b in ((0, 4), (4, 9)):
        batch = AttentionBatch.from_lengths([b - a], [b - a], [[0]])
        true, _ = reference.attention(impl.spec, batch, q[a:b], k[None, a:b], v[None, a:b])
        assert_within("encoder", out[a:b], true, true.float())
    with pytest.raises(ValueError, match="attends to k and v, got None"):
        impl.forward(q, None, None, None, plan, out)


def test_cross_attention_reads_what_the_encoder_wrote() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 6, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    cache = PagedKVCache(num_layers=1, num_blocks=32, block_size=4, num_kv_heads=2, head_dim=16,
                         dtype=torch.float32).layer(0)  # fmt: skip
    impl, make, table = Impl(ENCODER, kind="encoder_decoder"), builder(), [9, 2]
    slots = torch.tensor([table[p // 4] * 4 + p % 4 for p in range(7)])
    written = make.build(0, AttentionBatch.from_lengths([0], [7], [table], slot_mapping=slots))
    impl.update_cache(k, v, cache, written)
    out = torch.empty(3, 6, 16)
    impl.forward(q, None, None, cache, make.build(0, AttentionBatch.from_lengths([3], [7], [table])), out)
    batch = AttentionBatch.from_lengths([3], [7], [[0]])
    true, _ = reference.attention(ENCODER, batch, q, k[None], v[None])
    assert_within("cross", out, true, true.float())
    with pytest.raises(ValueError, match="attends to its cache, got None"):
        impl.forward(q, None, None, None, written, out)


def test_a_profiling_run_fills_zeros_and_writes_nothing() -> None:
    cache = PagedKVCache(num_layers=1, num_blocks=2, block_size=4, num_kv_heads=2, head_dim=16)
    impl, out = Impl(SPEC), torch.full((3, 6, 16), 99.0)
    impl.update_cache(torch.ones(3, 2, 16), torch.ones(3, 2, 16), cache.layer(0), None)
    impl.forward(torch.ones(3, 6, 16), None, None, cache.layer(0), None, out)
    assert not bool(out.any())
    assert not bool(cache.pages.any())


def test_a_layer_that_shares_pages_writes_none() -> None:
    pages = torch.zeros(2, 4, 2, 16)
    plan = builder().build(0, AttentionBatch.from_lengths([1], [1], [[1]], slot_mapping=torch.tensor([4])))
    Impl(SPEC, shares_kv=True).update_cache(torch.ones(1, 2, 16), torch.ones(1, 2, 16), LayerCache(pages, pages), plan)
    assert not bool(pages.any())


def test_terms_must_fit_the_spec() -> None:
    with pytest.raises(ValueError, match="sinks must be None"):
        Impl(SPEC, sinks=torch.ones(6))
    with pytest.raises(ValueError, match="alibi_slopes must be given"):
        Impl(dataclasses.replace(SPEC, alibi="linear"))
    with pytest.raises(Unsupported, match="contradict"):
        Impl(SPEC, kind="encoder")


def test_builder_facts() -> None:
    assert builder(num_speculative_tokens=3).reorder_batch_threshold == 4
    assert builder().use_cascade(256, 8)
    assert not builder().use_cascade(255, 8)
    assert not builder().use_cascade(256, 7)
    captured = builder(batch_invariant=True, max_model_len=2048).build_for_graph_capture(
        AttentionBatch.from_lengths([1], [1], [[1]])
    )
    assert captured.launches[0].num_splits == 4  # as many as the longest sequence needs, whatever this one does


@pytest.mark.parametrize(
    ("config", "planned_for"), [({}, 1), ({"num_speculative_tokens": 3}, 4), ({"graphs_of_all_steps": True}, 2)]
)
def test_steps_of_one_graph_are_planned_alike(config, planned_for) -> None:
    """A plan follows from a bound of query lengths: decodes have that of drafts, or every step that of its rows."""
    make = builder(**config)
    make._buffers = object()  # as on a GPU
    make._planner = planner = Recorder()
    batch = AttentionBatch.from_lengths([1, 1], [9, 9], [[1, 2, 3], [4, 5, 6]])
    make.build(0, batch)
    make.build_for_graph_capture(batch)
    assert [step.max_query_len for step in planner.steps] == [planned_for] * 2
    assert builder(**config).build(0, batch).launches[0].max_query_len == 1


class Recorder:
    """Stands in for a planner and keeps what it is asked to plan."""

    def __init__(self) -> None:
        self.steps = []

    def plan(self, batch, *, common_prefix_len, buffers) -> None:
        self.steps.append(batch)
