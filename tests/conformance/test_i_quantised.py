"""Kind I: 8-bit caches: what is written, what scales do, and what a format loses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import octavo
from conformance.backends import Backend
from conformance.common import CUTS, EIGHT_BIT_CASES, hard_rows, small
from conformance.harness import Cut, attend, make_plan, over_ranks, skip_if_unserved
from octavo import reference
from octavo.batch import AttentionBatch
from octavo.bench.cases import Case, Problem, build
from octavo.cache import LayerCache, PagedKVCache
from octavo.errors import Unsupported
from octavo.formats import EIGHT_BIT_FORMATS
from octavo.quantise import StoredRows, store_rows, to_fp8
from octavo.spec import AttentionSpec, KVShard
from tolerance import assert_attention, assert_same_bits, assert_within

NAN = float("nan")
FP8 = ("fp8_e4m3", "fp8_e5m2")
INT8 = ("int8_kv", "int8_k", "int8_per_token")


def layer_of(
    backend: Backend, name: str, order: str = "HND", shape: tuple[int, int, int, int] = (4, 2, 16, 24)
) -> tuple[PagedKVCache, LayerCache]:
    """A cache of six pages filled with random bytes, and its layer, with static scales that differ by head."""
    block_size, num_kv_heads, head_dim, value_dim = shape
    cache = PagedKVCache(
        num_layers=1,
        num_blocks=6,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        format=name,
        dtype=torch.float16,
        device=backend.device,
        layout=order,
    )
    cache.pages.random_(0, 256)
    static = {}
    if name in FP8:
        static = {"k_descale": torch.tensor([0.5, 2.0, 1.7][:num_kv_heads]), "v_descale": torch.tensor(0.25)}
    if name == "int8_kv":
        static = {"v_descale": torch.rand(num_kv_heads, value_dim) / 50 + 0.01}
    layer = cache.layer(0, **{key: scale.to(backend.device) for key, scale in static.items()})
    skip_if_unserved(replace(build(small("any")), q=torch.zeros(1, device=backend.device), cache=layer))
    return cache, layer


def rows_at(layer: LayerCache, slots: Tensor) -> StoredRows:
    """What the cache holds in these slots."""
    block, offset = slots // layer.block_size, slots % layer.block_size
    k_scale, v_scale = (
        scale[block, :, offset] if scale is not None and scale.ndim == 3 else None
        for scale in (layer.k_descale, layer.v_descale)
    )
    return StoredRows(layer.k_cache[block, offset], layer.v_cache[block, offset], k_scale, v_scale)


def assert_same_rows(actual: StoredRows, wanted: StoredRows) -> None:
    """The same bits, but for those of a NaN."""
    for name, x, y in zip(StoredRows._fields, actual, wanted, strict=True):
        assert (x is None) == (y is None), name
        if x is not None and y is not None:
            assert x.dtype == y.dtype
            here, there = x.cpu().contiguous(), y.cpu().contiguous()
            integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
            differs = here.view(integer) != there.view(integer)
            assert not bool((differs & ~(here.float().isnan() & there.float().isnan())).any()), name


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(4, 2, 16, 24), (16, 1, 64, 64), (3, 2, 8, 8), (1, 2, 80, 112)])
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("name", EIGHT_BIT_FORMATS)
def test_rows_are_stored_as_defined(
    backend: Backend, name: str, order: str, shape: tuple[int, int, int, int], given: torch.dtype
) -> None:
    """I05, I09, G04: the named slots hold the definition's bits; every other byte of the cache, scales too, stays."""
    cache, layer = layer_of(backend, name, order, shape)
    block_size, num_kv_heads, head_dim, value_dim = shape
    before = cache.pages.clone()
    slots = torch.tensor([5, -1, 0, 2, -7, 4])  # rows 1 and 4 are stored nowhere, two more rows are padding
    k = torch.randn(8, num_kv_heads, head_dim).to(given)
    v = torch.randn(8, num_kv_heads, value_dim).to(given)
    k[2], v[3] = 0.0, 0.0  # I04
    k[0, 0, 3], v[0, 0, 3] = 1000.0, -1000.0
    k[6:], v[6:] = NAN, NAN
    octavo.append(layer, *(x.to(backend.device) for x in (k, v, slots)))
    stored = (slots >= 0).nonzero().squeeze(1)
    static = {
        "k_descale": layer.k_descale if layer.format.is_fp8 else None,
        "v_descale": None if layer.format.v_scaled_by_row or layer.v_descale is None else layer.v_descale,
    }
    static = {key: None if scale is None else scale.cpu() for key, scale in static.items()}
    wanted = store_rows(layer.format, k[stored], v[stored], **static)
    assert_same_rows(rows_at(layer, slots[stored].to(backend.device)), wanted)
    # Put the old bytes back into the slots: the whole cache is as it was.
    old = cache.layout.views(
        before[0], **{key: None if s is None else s.to(backend.device) for key, s in static.items()}
    )
    block, offset = (x.to(backend.device) for x in (slots[stored] // block_size, slots[stored] % block_size))
    for new_view, old_view in ((layer.k_cache, old.k_cache), (layer.v_cache, old.v_cache)):
        new_view[block, offset] = old_view[block, offset]
    for new_scale, old_scale in ((layer.k_descale, old.k_descale), (layer.v_descale, old.v_descale)):
        if new_scale is not None and old_scale is not None and new_scale.ndim == 3:
            new_scale[block, :, offset] = old_scale[block, :, offset]
    assert torch.equal(cache.pages, before)


@pytest.mark.parametrize("given", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", EIGHT_BIT_FORMATS)
def test_hard_rows_are_stored_as_defined(backend: Backend, name: str, given: torch.dtype) -> None:
    """I04, I09: zeros, halves, what is small, large or no number."""
    _, layer = layer_of(backend, name, shape=(2, 3, 16, 24))
    k, v, slots = hard_rows(16).to(given), hard_rows(24).to(given), torch.arange(11, device=backend.device)
    octavo.append(layer, k.to(backend.device), v.to(backend.device), slots)
    static = [None if x is None or x.ndim == 3 else x.cpu() for x in (layer.k_descale, layer.v_descale)]
    assert_same_rows(rows_at(layer, slots), store_rows(layer.format, k, v, *static))


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("name", EIGHT_BIT_FORMATS)
def test_a_written_nan_is_seen_by_who_sees_the_key_only(backend: Backend, name: str, bad: float, which: str) -> None:
    """A NaN in a new row is never hidden by the quantisation; an infinity becomes NaN or the largest number."""
    case = Case("bad", AttentionSpec(2, 1, 16, window_left=4), (20,), (20,), 4, dtype=torch.float32, kv_format=name)
    results = []
    for value in (0.25, bad):
        problem = build(case, device=backend.device)
        skip_if_unserved(problem)
        k, v = torch.linspace(-1, 1, 20 * 16).view(20, 1, 16), torch.linspace(2, -1, 20 * 16).view(20, 1, 16)
        {"k": k, "v": v}[which][9, 0, 3] = value
        octavo.append(problem.cache, *(x.to(backend.device) for x in (k, v)), problem.batch.slot_mapping)
        results.append(attend(problem, make_plan(problem)))
    (clean_out, clean_lse), (out, lse) = results
    sees = torch.zeros(20, dtype=torch.bool, device=out.device)
    sees[9:14] = True
    for what, x, clean in (("out", out, clean_out), ("lse", lse, clean_lse)):
        # Who meets a NaN may be computed again by a kernel that rounds the weights of int8 values in another way.
        like = clean.half() if name in ("int8_kv", "int8_per_token") else clean
        assert_within(f"{what} of the others", x[~sees], clean[~sees].double().cpu(), like[~sees])
    saturates = bad == float("inf") and (name in FP8 or (name, which) == ("int8_kv", "v"))
    assert bool(out[sees].isfinite().flatten(1).all(1).eq(saturates).all())
    # An infinite V of 16 bits is infinite in its channel; what else is not finite shows in all that the row gives.
    if not saturates and not (name == "int8_k" and which == "v") and not (name in FP8 and which == "v"):
        assert bool(out[sees].isnan().all())


@pytest.mark.parametrize("cut", [CUTS["whole"], CUTS["splits"], CUTS["cascade"], CUTS["ranks"], CUTS["invariant"]])
@pytest.mark.parametrize("name", EIGHT_BIT_FORMATS)
def test_v_scale_doubles_the_output_only(backend: Backend, name: str, cut: Cut) -> None:
    """I02: scales of V times 2: the output doubles, the LSE stays, in decode rows and prefill rows."""
    if name == "int8_k":
        pytest.skip("int8_k has no scale of V")
    case = small("double", kv_format=name, window_left=20, sinks=True)
    results = []
    for factor in (1.0, 2.0):
        parts = []
        for rank in range(cut.world):
            problem = build(case, shard=KVShard(cut.world, rank, cut.interleave), device=backend.device)
            problem.cache.v_descale.mul_(factor)
            parts.append(attend(problem, make_plan(problem, cut)))
        results.append(over_ranks(parts, problem.sinks))
    assert_same_bits("out", results[1][0], 2 * results[0][0])
    assert_same_bits("lse", results[1][1], results[0][1])


@pytest.mark.parametrize("cut", [CUTS["whole"], CUTS["splits"], CUTS["cascade"]])
@pytest.mark.parametrize("name", EIGHT_BIT_FORMATS)
def test_k_scale_is_a_factor_of_the_scores(backend: Backend, name: str, cut: Cut) -> None:
    """Scales of K times 2 under half the softmax scale: the same bits."""
    results = []
    for factor in (1.0, 2.0):
        case = small("factor", kv_format=name, softmax_scale=0.25 / factor, logits_soft_cap=3.0)
        problem = build(case, device=backend.device)
        problem.cache.k_descale.mul_(factor)
        results.append(attend(problem, make_plan(problem, cut)))
    assert_same_bits("out", results[1][0], results[0][0])
    assert_same_bits("lse", results[1][1], results[0][1])


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("name", FP8)
def test_fp8_scales_per_head(backend: Backend, name: str, cut: Cut) -> None:
    """I12: k_scale per KV head 0.5, 1, 2, 4 under 16 query heads: head h uses scale h // 4."""
    case = small("heads", kv_format=name, heads=(16, 4))
    scales = {"k_descale": torch.tensor([0.5, 1.0, 2.0, 4.0]), "v_descale": torch.tensor([3.0, 0.1, 1.0, 0.5])}

    def with_scales(problem: Problem) -> Problem:
        device = problem.q.device
        scaled = {key: scale.to(device) for key, scale in scales.items()}
        before = problem.cache
        k = [x / before.k_descale[:, None] * scaled["k_descale"][:, None] for x in problem.keys]
        v = [x / before.v_descale[:, None] * scaled["v_descale"][:, None] for x in problem.values]
        return replace(problem, cache=replace(before, **scaled), keys=tuple(k), values=tuple(v))

    assert_attention(with_scales(build(case)), *run_cut(backend, case, cut, with_scales))


@pytest.mark.parametrize("q_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, None])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("name", FP8)
def test_scales_per_sequence(backend: Backend, name: str, cut: Cut, q_dtype: torch.dtype | None) -> None:
    """I01: q, K and V with a scale per (sequence, KV head), q in fp8 too, in a cascade too.

    Sequences that share pages have equal scales of K and V; those of q may always differ.
    """
    case = small("sequences", kv_format=name, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(3)
    q_descale = 2.0 ** (2 * torch.rand(5, 2, generator=random) - 1)
    kv = 2.0 ** (2 * torch.rand(2, 5, 2, generator=random) - 1)
    kv[:, 1:4] = kv[:, :1]  # the first four share a prefix

    def with_scales(problem: Problem) -> Problem:
        device, cache = problem.q.device, problem.cache
        k_descale, v_descale = kv.to(device)
        keys = [x / cache.k_descale[:, None] * s[:, None] for x, s in zip(problem.keys, k_descale, strict=True)]
        values = [x / cache.v_descale[:, None] * s[:, None] for x, s in zip(problem.values, v_descale, strict=True)]
        changed = replace(
            problem,
            cache=replace(cache, k_descale=k_descale, v_descale=v_descale),
            keys=tuple(keys),
            values=tuple(values),
        )
        if q_dtype is None:
            return changed
        return replace(changed, q=to_fp8(problem.q, q_dtype), q_descale=q_descale.to(device))

    assert_attention(with_scales(build(case)), *run_cut(backend, case, cut, with_scales))


def run_cut(backend: Backend, case: Case, cut: Cut, change) -> tuple[Tensor, Tensor]:
    """As `solve`, of problems that `change` has changed."""
    parts = []
    for rank in range(cut.world):
        shard = KVShard(cut.world, rank, cut.interleave)
        problem = change(build(case, page_seed=rank, poison=NAN, padding_rows=2, shard=shard, device=backend.device))
        parts.append(attend(problem, make_plan(problem, cut)))
    out, lse = over_ranks(parts, problem.sinks)
    return out.to(case.dtype).cpu(), lse.cpu()


@pytest.mark.parametrize("case", EIGHT_BIT_CASES, ids=lambda case: case.name)
def test_scales_may_be_any_view(backend: Backend, case: Case) -> None:
    """G19: scale planes behind other strides, NaN between them, change no bit."""
    problem = build(case, poison=NAN, device=backend.device)
    plan = make_plan(problem)
    wanted = attend(problem, plan)

    def spread(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        for dim in range(x.ndim):
            wide = x.new_full((*x.shape[:dim], 2 * x.shape[dim], *x.shape[dim + 1 :]), NAN)
            x = wide.unflatten(dim, (x.shape[dim], 2)).select(dim + 1, 0).copy_(x)
        return x

    cache = problem.cache
    views = LayerCache(cache.k_cache, cache.v_cache, spread(cache.k_descale), spread(cache.v_descale))
    for name, actual, expected in zip(("out", "lse"), attend(replace(problem, cache=views), plan), wanted, strict=True):
        assert_same_bits(name, actual, expected)


@pytest.mark.parametrize("case", EIGHT_BIT_CASES, ids=lambda case: case.name)
def test_raw_keys(backend: Backend, case: Case) -> None:
    """Encoder and cross attention over stored rows that are no pages: pages of one row."""
    spec = replace(case.spec, causal=False)
    case = replace(case, spec=spec, shared=())
    problem = build(case, device=backend.device)
    static = {}
    if not problem.cache.format.k_scaled_by_row:
        static["k_descale"] = problem.cache.k_descale
    if not problem.cache.format.v_scaled_by_row and problem.cache.v_descale is not None:
        static["v_descale"] = problem.cache.v_descale
    starts = torch.tensor([0, *case.seq_lens]).cumsum(0).to(torch.int32)
    slots = torch.cat([slots_of(problem, i) for i in range(len(case.seq_lens))])
    rows = rows_at(problem.cache, slots.to(backend.device))
    k_scale, v_scale = (None if x is None else x.unsqueeze(2) for x in (rows.k_scale, rows.v_scale))
    raw = LayerCache(
        rows.k.unsqueeze(1),
        rows.v.unsqueeze(1),
        static.get("k_descale", k_scale),
        static.get("v_descale", v_scale),
    )
    batch = AttentionBatch.from_raw_keys(problem.batch.query_start_loc.cpu(), starts, device=backend.device)
    moved = replace(problem, batch=batch, cache=raw, case=replace(case, block_size=1))
    assert_attention(problem, *attend(moved, make_plan(moved)))


def slots_of(problem: Problem, i: int) -> Tensor:
    """[seq_len] where a sequence's keys lie."""
    j, block_size = torch.arange(problem.case.seq_lens[i]), problem.case.block_size
    return problem.batch.block_table[i].cpu()[j // block_size].long() * block_size + j % block_size


@pytest.mark.parametrize("backend_name", ["own", "reference"])
@pytest.mark.parametrize("case", EIGHT_BIT_CASES, ids=lambda case: case.name)
def test_one_call_form(backend: Backend, case: Case, backend_name: str) -> None:
    """`paged_attention` takes the scales that a layer has."""
    problem = build(case, device=backend.device)
    skip_if_unserved(problem)
    if backend_name == "reference" and backend.device != "cpu":
        pytest.skip("the oracle runs on the CPU")
    spec, batch, cache = problem.spec, problem.batch, problem.cache
    out, lse = octavo.paged_attention(
        problem.q,
        cache.k_cache,
        cache.v_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        softmax_scale=spec.softmax_scale,
        causal=spec.causal,
        window_left=spec.window_left,
        window_right=spec.window_right,
        logits_soft_cap=spec.logits_soft_cap,
        alibi_slopes=problem.alibi_slopes,
        sqrt_alibi=spec.alibi == "sqrt",
        sinks=problem.sinks,
        k_descale=cache.k_descale,
        v_descale=cache.v_descale,
        backend=backend.name if backend_name == "own" else "reference",
    )
    assert_attention(problem, out, lse)


# --- what a format loses --------------------------------------------------------------------------------


def loss(
    backend: Backend, name: str, length: int, *, outliers: float = 0.0, peak: float = 1.0, centre: bool = False
) -> tuple[float, float]:
    """Errors of a format against unquantised attention: of the output (root mean square, relative) and the LSE (mean).

    Args:
        outliers: added to 2 of 128 channels of K, as a bias does.
        peak: factor of the scores.
        centre: store K less its mean over the keys, which moves the LSE only.
    """
    spec = AttentionSpec(4, 2, 128, softmax_scale=peak * 128**-0.5, causal=False)
    case = Case("loss", spec, (4,), (length,), dtype=torch.float32, kv_format=name)
    problem = build(case, device=backend.device)
    random = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, length, 2, 128, generator=random)
    k[..., [3, 77]] += outliers
    cache = problem.cache
    if cache.format.is_fp8:
        cache = replace(cache, k_descale=None, v_descale=None)
    if cache.format.v_scaled_by_channel:
        cache = replace(cache, v_descale=(v.abs().amax(0) / 127).to(backend.device))
    problem = replace(problem, cache=cache)
    skip_if_unserved(problem)
    stored = k - k.mean(0) if centre else k
    octavo.append(cache, stored.to(backend.device), v.to(backend.device), slots_of(problem, 0).to(backend.device))
    out, lse = attend(problem, make_plan(problem))
    batch = AttentionBatch.from_lengths([4], [length], [[0]])
    true_out, true_lse = reference.attention(spec, batch, problem.q.cpu(), k[None], v[None])
    error = (out.cpu() - true_out).square().mean().sqrt() / true_out.square().mean().sqrt()
    return float(error), float((lse.cpu() - true_lse).mean().abs())


BOUNDS = {"fp8_e4m3": 0.05, "fp8_e5m2": 0.1, "int8_kv": 0.025, "int8_k": 0.012, "int8_per_token": 0.02}
"""Relative error of the output that a format may have on N(0, 1), here and in docs/numerics.md."""


@pytest.mark.parametrize("length", [256, 4096])
@pytest.mark.parametrize("name", EIGHT_BIT_FORMATS)
def test_error_on_normal_numbers(backend: Backend, name: str, length: int) -> None:
    """I08: bounded, and the LSE is that of unquantised keys but for noise: no constant is left in it."""
    error, shift = loss(backend, name, length)
    assert error <= BOUNDS[name]
    assert shift <= 0.01


@pytest.mark.parametrize("name", EIGHT_BIT_FORMATS)
def test_error_does_not_grow_with_length(backend: Backend, name: str) -> None:
    """I07: 1k against 32k keys."""
    assert loss(backend, name, 32768)[0] <= 1.2 * loss(backend, name, 1024)[0]


@pytest.mark.parametrize("peak", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("length", [256, 4096])
def test_e4m3_is_twice_as_exact_as_e5m2(backend: Backend, length: int, peak: float) -> None:
    """I06: flat and peaked scores."""
    assert loss(backend, "fp8_e4m3", length, peak=peak)[0] <= 0.65 * loss(backend, "fp8_e5m2", length, peak=peak)[0]


@pytest.mark.parametrize("outliers", [3.0, 10.0])
def test_outlier_channels(backend: Backend, outliers: float) -> None:
    """I10: 2 of 128 channels of K are 3 to 10 times the rest: int8 per row loses at most half of what fp8 does."""
    errors = {name: loss(backend, name, 1024, outliers=outliers)[0] for name in ("fp8_e4m3", "int8_k")}
    assert errors["int8_k"] <= 0.5 * errors["fp8_e4m3"], errors


def test_far_outlier_channels(backend: Backend) -> None:
    """I10: a bias of 80 spoils every format; K without its mean over the keys does not, and attends alike."""
    for name in ("fp8_e4m3", "int8_k"):
        assert loss(backend, name, 1024, outliers=80.0)[0] > 5 * loss(backend, name, 1024)[0] / 2
    assert loss(backend, "int8_k", 1024, outliers=80.0, centre=True)[0] <= BOUNDS["int8_k"]


# --- what is refused ------------------------------------------------------------------------------------


def test_int8_kv_without_scales_says_how_to_get_them(backend: Backend) -> None:
    cache, layer = layer_of(backend, "int8_kv")
    layer, before = replace(layer, v_descale=None), cache.pages.clone()
    k, v = torch.ones(3, 2, 16, device=backend.device), torch.ones(3, 2, 24, device=backend.device)
    message = r"int8_kv needs V's scales, v_descale float32 \[2, 24\]: run `octavo calibrate MODEL .*int8_per_token"
    with pytest.raises(ValueError, match=message):
        octavo.append(layer, k, v, torch.arange(3, device=backend.device))
    assert torch.equal(cache.pages, before)
    problem = build(small("any", kv_format="int8_kv"), device=backend.device)
    problem = replace(problem, cache=replace(problem.cache, v_descale=None))
    with pytest.raises(ValueError, match=r"int8_kv needs V's scales, v_descale float32 \[2, 16\]"):
        attend(problem, make_plan(problem))


@pytest.mark.parametrize("name", FP8)
def test_scales_per_sequence_cannot_be_written(backend: Backend, name: str) -> None:
    cache, layer = layer_of(backend, name)
    before = cache.pages.clone()
    layer = replace(layer, v_descale=torch.ones(3, 2, device=backend.device))
    k, v = torch.ones(3, 2, 16, device=backend.device), torch.ones(3, 2, 24, device=backend.device)
    with pytest.raises(ValueError, match=r"v_descale must be one number or \[num_kv_heads\] to write.* got \(3, 2\)"):
        octavo.append(layer, k, v, torch.arange(3, device=backend.device))
    assert torch.equal(cache.pages, before)


@pytest.mark.parametrize(
    ("name", "q_dtype", "q_descale", "error", "message"),
    [
        ("fp8_e4m3", torch.float32, torch.ones(()), Unsupported, "q_descale belongs to 8-bit tensors, q is torch.fl"),
        ("auto", torch.float32, torch.ones(()), Unsupported, "q_descale belongs to 8-bit tensors, q is torch.float32"),
        ("auto", torch.float8_e4m3fn, None, Unsupported, "q of torch.float8_e4m3fn needs an fp8 cache"),
        ("int8_k", torch.float8_e4m3fn, None, Unsupported, "needs an fp8 cache, this one holds int8_k; use float16"),
        (
            "fp8_e4m3",
            torch.float8_e4m3fn,
            torch.ones(5),
            ValueError,
            r"q_descale must be float32 \(\) or \(5, 2\), got",
        ),
        ("fp8_e4m3", torch.float8_e4m3fn, torch.ones(()).half(), ValueError, "q_descale must be float32"),
        ("int8_k", torch.int8, None, Unsupported, "q of torch.int8 is not supported"),
    ],
)
def test_wrong_scales_of_q(
    backend: Backend, name: str, q_dtype: torch.dtype, q_descale: Tensor | None, error: type, message: str
) -> None:
    problem = build(small("wrong", kv_format=name), device=backend.device)
    skip_if_unserved(problem)
    plan = make_plan(problem)
    given = None if q_descale is None else q_descale.to(backend.device)
    out = torch.full((17, 6, 16), 99.0, device=backend.device)
    with pytest.raises(error, match=message):
        octavo.run(plan, problem.spec, problem.q.to(q_dtype), problem.cache, out, q_descale=given)
    assert bool((out == 99).all())


def test_scales_of_other_sequences_are_refused(backend: Backend) -> None:
    problem = build(small("other", kv_format="fp8_e4m3"), device=backend.device)
    scales = torch.ones(4, 2, device=backend.device)
    problem = replace(problem, cache=replace(problem.cache, k_descale=scales))
    with pytest.raises(ValueError, match="k_descale is for 4 sequences, the plan has 5"):
        attend(problem, make_plan(problem))
