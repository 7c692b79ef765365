"""K less a static offset: the output stays, the LSE is put right, and int8 loses less with outlier channels."""

from __future__ import annotations

import pytest
import torch

import octavo
from engine import tiny
from octavo import AttentionBatch, AttentionSpec, PagedKVCache, Unsupported
from octavo.backend import Impl
from octavo.engine.evaluate import evaluate
from octavo.engine.llm import LLM
from octavo.engine.scoring import Windows, record
from octavo.formats import KVFormat
from octavo.reference import attention, real
from octavo.scales import KVScales, Provenance

SPEC = AttentionSpec(4, 2, 32)
ORIGIN = Provenance(1, "0" * 64, 100.0, "0")
QUERY_LENS, SEQ_LENS = [1, 5, 1, 0], [70, 9, 0, 3]
"""The third row belongs to a sequence without keys, the last sequence has no row; one row more belongs to none."""


def problem(
    spec: AttentionSpec = SPEC,
) -> tuple[AttentionBatch, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """batch, q, K and V of all slots, offset: two channels of K lie far from zero."""
    torch.manual_seed(0)
    batch = AttentionBatch.from_lengths(QUERY_LENS, SEQ_LENS, [list(range(5)), [5], [], [6]])
    offset = torch.zeros(spec.num_kv_heads, spec.head_dim)
    offset[:, 3], offset[1, 17] = 30.0, -25.0
    k = torch.randn(7 * 16, spec.num_kv_heads, spec.head_dim) + offset
    q, v = torch.randn(batch.num_tokens, spec.num_q_heads, spec.head_dim), torch.randn(7 * 16, spec.num_kv_heads, 32)
    return batch, q, k, v, offset


def attend(impl: Impl, batch: AttentionBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **plan):
    """Write all slots, then attend: cache, out, lse."""
    cache = PagedKVCache(
        num_layers=1, num_blocks=7, block_size=16, num_kv_heads=2, head_dim=32, format="int8_per_token"
    ).layer(0)
    writing = AttentionBatch.from_lengths([0], [0], [[]], slot_mapping=torch.arange(len(k)))
    planner = octavo.Planner(num_q_heads=4, value_dim=32, block_size=16)
    impl.update_cache(k, v, cache, planner.plan(writing))
    out, lse = torch.full((len(q), 4, 32), 7.0), torch.full((len(q), 4), 7.0)
    impl.forward(q, None, None, cache, planner.plan(batch, **plan), out, lse)
    return cache, out, lse


@pytest.mark.parametrize("plan", [{}, {"num_splits": 3}], ids=str)
@pytest.mark.parametrize("changes", [{}, {"window_left": 20}], ids=str)
def test_output_and_lse_are_those_of_the_whole_k(plan: dict, changes: dict) -> None:
    """Against the float64 oracle on what the pages hold, and on K, V and q that nobody quantised."""
    spec = AttentionSpec(4, 2, 32, **changes)
    batch, q, k, v, offset = problem(spec)
    cache, out, lse = attend(Impl(spec, k_offset=offset), batch, q, k, v, **plan)
    assert cache.k_descale.max() < 0.1  # without the offset: 30 / 127 and more
    real_q, real_k, real_v = real(batch, q, cache)
    expected, stored_lse = attention(spec, batch, real_q, real_k, real_v)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)  # weights of int8 values have 16 bits
    moved = torch.stack([q[:, h].double() @ offset[h // 2].double() for h in range(4)], 1) * spec.scale
    torch.testing.assert_close(lse.double(), stored_lse + moved, rtol=1e-5, atol=1e-4)
    assert lse[6].eq(-torch.inf).all()
    pages = k.view(7, 16, 2, 32), v.view(7, 16, 2, 32)
    true_out, true_lse = attention(spec, batch, q, *pages)
    _, plain_out, plain_lse = attend(Impl(spec), batch, q, k, v, **plan)
    rows = slice(0, 6)
    assert (out[rows] - true_out[rows]).norm() < 0.25 * (plain_out[rows] - true_out[rows]).norm()
    assert (lse[rows] - true_lse[rows]).norm() < 0.25 * (plain_lse[rows] - true_lse[rows]).norm()


def test_rows_of_no_sequence_keep_their_lse() -> None:
    batch, q, k, v, offset = problem()
    q = torch.cat([q, torch.full_like(q[:2], torch.nan)])
    _, _, lse = attend(Impl(SPEC, k_offset=offset), batch, q, k, v)
    assert lse[7:].eq(7.0).all()


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"logits_soft_cap": 30.0}, {}, "soft cap exclude each other"),
        ({"sinks": True}, {"sinks": torch.zeros(4)}, "sinks exclude each other"),
        ({"causal": False}, {"kind": "encoder"}, "attends to raw keys"),
    ],
)
def test_what_an_offset_does_not_go_with(changes: dict, options: dict, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        Impl(AttentionSpec(4, 2, 32, **changes), k_offset=torch.zeros(2, 32), **options)


def test_an_offset_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"k_offset must be float32 \(2, 32\), got torch.float32 \(2, 16\)"):
        Impl(SPEC, k_offset=torch.zeros(2, 16))


@pytest.mark.parametrize("name", ["int8_kv", "int8_k", "int8_per_token"])
def test_calibrated_offsets_lose_less(name: str, tmp_path) -> None:
    """A model whose keys have a bias in one slowly rotating channel, as Qwen2's have; by file, as users do it."""
    model = tiny.make("Qwen2", initializer_range=0.2)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[7::16] = 40.0
        layer.self_attn.k_proj.bias.data[15::16] = 40.0
    windows = Windows(tuple(map(tuple, tiny.prompts([100]))), 100)
    recorder, runner = record(model, windows)
    format = KVFormat.parse(name, torch.float32)
    plain = {} if name != "int8_kv" else {name: recorder.scales(format, runner.kv_model, ORIGIN)}
    smooth = recorder.scales(format, runner.kv_model, ORIGIN, smooth_k=True)
    smooth.save(tmp_path / "s.st")
    read = KVScales.load(tmp_path / "s.st")
    for i in range(3):
        assert read.offset_of_layer(i).equal(smooth.offset_of_layer(i))
    without = evaluate(model, windows, [name], scales=plain, origins={})[1]
    with_offset = evaluate(model, windows, [name], scales={name: read}, origins={})[1]
    assert with_offset.mean_kl < 0.2 * without.mean_kl


def test_models_whose_softmax_would_see_the_offset_are_refused() -> None:
    model = tiny.make("GptOss")
    recorder, runner = record(model, Windows(((5, 6, 7),), 3))
    scales = recorder.scales(KVFormat.parse("int8_k", torch.float32), runner.kv_model, ORIGIN, smooth_k=True)
    with pytest.raises(Unsupported, match="sinks exclude each other"):
        LLM(model, kv_format="int8_k", kv_scales=scales, num_blocks=4)
    with pytest.raises(ValueError, match="fp8_e4m3 does not scale K by row"):
        recorder.scales(KVFormat.parse("fp8", torch.float32), runner.kv_model, ORIGIN, smooth_k=True)
    wrong = KVScales("float32", None, None, scales.k_offset)
    with pytest.raises(ValueError, match="float32 has no static k offsets, these have some"):
        LLM(model, kv_format="float32", kv_scales=wrong, num_blocks=4)
