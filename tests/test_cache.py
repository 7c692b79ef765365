"""A page is one record of bytes; writing touches the named slots and nothing else."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import octavo
from octavo.cache import PLANE_ALIGNMENT, LayerCache, PagedKVCache, PageLayout
from octavo.errors import Unsupported
from octavo.formats import KVFormat

ORDERS = ("HND", "NHD")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHAPES = [(16, 2, 64, 64), (1, 1, 8, 8), (3, 3, 24, 8), (5, 1, 8, 16), (8, 2, 192, 128)]
"""block_size, num_kv_heads, head_dim, value_dim; the odd ones need padding between the planes."""


def make(
    shape: tuple[int, int, int, int] = (4, 2, 16, 16),
    order: str = "HND",
    dtype: torch.dtype = torch.float32,
    num_blocks: int = 5,
    num_layers: int = 1,
) -> PagedKVCache:
    block_size, num_kv_heads, head_dim, value_dim = shape
    return PagedKVCache(
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        layout=order,
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_planes_are_disjoint_aligned_and_inside_their_record(
    shape: tuple[int, int, int, int], order: str, dtype: torch.dtype
) -> None:
    """I05: K and V of every page, byte by byte: none shared, none outside the page's own record."""
    cache = make(shape, order, dtype, num_blocks=3, num_layers=2)
    block_size, num_kv_heads, head_dim, value_dim = shape
    assert cache.pages.dtype == torch.uint8
    assert not bool(cache.pages.any())
    assert cache.layout.page_bytes % PLANE_ALIGNMENT == 0
    for i, block in itertools.product(range(2), range(3)):
        layer = cache.layer(i)
        assert layer.k_cache.shape == (3, block_size, num_kv_heads, head_dim)
        assert layer.v_cache.shape == (3, block_size, num_kv_heads, value_dim)
        assert layer.k_cache.dtype == layer.v_cache.dtype == dtype
        ones = torch.full((), 255, dtype=torch.uint8).expand(dtype.itemsize).contiguous().view(dtype)
        touched = []
        for view, width in ((layer.k_cache, head_dim), (layer.v_cache, value_dim)):
            assert view[block].data_ptr() % PLANE_ALIGNMENT == cache.pages.data_ptr() % PLANE_ALIGNMENT
            view[block] = ones
            touched.append(cache.pages != 0)
            assert int(touched[-1].sum()) == block_size * num_kv_heads * width * dtype.itemsize
            assert not bool(touched[-1][1 - i].any())
            touched[-1][i, block] = False
            assert not bool(touched[-1].any())
            cache.pages.zero_()


@pytest.mark.parametrize("shape", SHAPES)
def test_orders_hold_the_same(shape: tuple[int, int, int, int]) -> None:
    """G03: HND and NHD differ in memory only."""
    block_size, num_kv_heads, head_dim, value_dim = shape
    k, v = torch.randn(11, num_kv_heads, head_dim), torch.randn(11, num_kv_heads, value_dim)
    slots = torch.randperm(3 * block_size + 11)[:11]
    caches = [make(shape, order, num_blocks=-(-(3 * block_size + 11) // block_size)) for order in ORDERS]
    for cache in caches:
        octavo.append(cache.layer(0), k, v, slots)
    hnd, nhd = (cache.layer(0) for cache in caches)
    assert torch.equal(hnd.k_cache, nhd.k_cache)
    assert torch.equal(hnd.v_cache, nhd.v_cache)
    for slot, row in zip(slots.tolist(), k, strict=True):
        assert torch.equal(hnd.k_cache[slot // block_size, slot % block_size], row)
    if block_size > 1 and num_kv_heads > 1:
        assert hnd.k_cache.stride(1) == head_dim
        assert nhd.k_cache.stride(2) == head_dim


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_layers", [None, 2])
def test_one_tensor_for_engines(order: str, num_layers: int | None) -> None:
    """A cache allocated as (shape, stride order) is the same memory as `views` of its bytes."""
    layout = PageLayout(8, 2, 16, 16, KVFormat.of_dtype(torch.float16), order)
    shape, dims = layout.shape_and_stride_order(3, num_layers)
    memory = torch.zeros([shape[d] for d in dims], dtype=torch.float16)
    logical = memory.permute([dims.index(d) for d in range(len(shape))])
    assert logical.shape == shape
    logical.copy_(torch.randn(shape))
    layers = [logical] if num_layers is None else list(logical)
    flat = memory.view(torch.uint8).view(len(layers), 3, layout.page_bytes)
    for pages, layer in zip(flat, layers, strict=True):
        views = layout.views(pages)
        assert torch.equal(views.k_cache, layer[:, 0])
        assert torch.equal(views.v_cache, layer[:, 1])


@pytest.mark.parametrize("order", ORDERS)
def test_copied_pages_hold_everything(order: str) -> None:
    """K05: whole records of all layers move; all sources are read first; the others stay."""
    cache = make((3, 3, 24, 8), order, torch.bfloat16, num_blocks=6, num_layers=2)
    cache.pages.random_(0, 256)
    before = cache.pages.clone()
    cache.copy_pages(torch.tensor([3, 1, 0]), torch.tensor([1, 0, 5]))
    assert torch.equal(cache.pages[:, [1, 0, 5]], before[:, [3, 1, 0]])
    assert torch.equal(cache.pages[:, [2, 3, 4]], before[:, [2, 3, 4]])


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_memory_may_lie_in_huge_pages() -> None:
    cache = PagedKVCache(num_layers=1, num_blocks=1024, block_size=16, num_kv_heads=2, head_dim=64)
    maps = Path("/proc/self/smaps").read_text()
    if "VmFlags" not in maps:
        pytest.skip("the system does not say how memory is mapped")
    ranges = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", maps, flags=re.MULTILINE)[1:]
    bounds = [[int(end, 16) for end in text.split(maxsplit=1)[0].split("-")] for text in ranges]
    (mine,) = (text for text, (a, b) in zip(ranges, bounds, strict=True) if a <= cache.pages.data_ptr() < b)
    assert re.search(r"^VmFlags:.* hg\b", mine, re.MULTILINE), mine


def test_sizes() -> None:
    cache = make((16, 8, 128, 128), dtype=torch.bfloat16, num_layers=3, num_blocks=2)
    assert (cache.num_layers, cache.num_blocks) == (3, 2)
    assert cache.bytes_per_token == 3 * 8 * 512  # SPEC section 2: 512 bytes a token and KV head
    layer = cache.layer(2)
    assert (layer.num_blocks, layer.block_size, layer.num_kv_heads) == (2, 16, 8)
    for index in (-1, 3):
        with pytest.raises(IndexError, match=rf"layer must lie in \[0, 3\), got {index}"):
            cache.layer(index)


# --- writing ----------------------------------------------------------------------------------------


@given(
    order=st.sampled_from(ORDERS),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_slots=st.integers(0, 20),
    padding=st.integers(0, 3),
    negative=st.sets(st.integers(0, 19)),
    seed=st.integers(0, 99),
)
def test_only_the_named_slots_change(
    order: str, block_size: int, num_slots: int, padding: int, negative: set[int], seed: int
) -> None:
    """G05, A05: the whole cache, byte by byte; negative slots and rows past slot_mapping are not stored."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-20 // block_size) + 1
    cache = make((block_size, 2, 8, 16), order, num_blocks=num_blocks, num_layers=2)
    cache.pages.random_(0, 256, generator=generator)
    wanted = make((block_size, 2, 8, 16), order, num_blocks=num_blocks, num_layers=2)
    wanted.pages.copy_(cache.pages)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_slots]
    for i in negative:
        slots[i : i + 1] = -1 - i
    k = torch.randn(num_slots + padding, 2, 8, generator=generator)
    v = torch.randn(num_slots + padding, 2, 16, generator=generator)
    k[num_slots:], v[num_slots:] = float("nan"), float("nan")
    octavo.append(cache.layer(1), k, v, slots)
    layer = wanted.layer(1)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            layer.k_cache[slot // block_size, slot % block_size] = k[i]
            layer.v_cache[slot // block_size, slot % block_size] = v[i]
    assert torch.equal(cache.pages, wanted.pages)


def test_padded_keys() -> None:
    """G05: 2048 rows of K and V, 1234 slots."""
    cache = make((16, 1, 8, 8), num_blocks=128)
    k = torch.randn(2, 2048, 1, 8)
    octavo.append(cache.layer(0), k[0], k[1], torch.arange(1234))
    assert torch.equal(cache.layer(0).k_cache.flatten(0, 1)[:1234], k[0, :1234])
    assert torch.equal(cache.layer(0).v_cache.flatten(0, 1)[:1234], k[1, :1234])
    assert not bool(cache.layer(0).k_cache.flatten(0, 1)[1234:].any())


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("given", [*DTYPES, torch.float64])
def test_rows_are_rounded_to_the_format(given: torch.dtype, stored: torch.dtype) -> None:
    cache = make((4, 2, 16, 16), dtype=stored)
    k, v = torch.randn(2, 3, 2, 16, dtype=given)
    octavo.append(cache.layer(0), k, v, torch.tensor([9, 1, 6]))
    assert torch.equal(cache.layer(0).k_cache.flatten(0, 1)[[9, 1, 6]], k.to(stored))
    assert torch.equal(cache.layer(0).v_cache.flatten(0, 1)[[9, 1, 6]], v.to(stored))


@pytest.mark.parametrize("how", ["fused", "rows", "heads"])
@pytest.mark.parametrize("pages", ["record", "K beside V", "heads outermost"])
def test_strided_rows_into_strided_pages(how: str, pages: str) -> None:
    """G02, G19: new rows and pages as views of larger buffers, whose other bytes stay."""
    k, v = torch.randn(2, 5, 2, 8)
    if how == "fused":
        new_k, new_v = torch.cat([torch.zeros(5, 32), k.flatten(1), v.flatten(1)], 1)[:, 32:].split(16, 1)
        new_k, new_v = new_k.unflatten(1, (2, 8)), new_v.unflatten(1, (2, 8))
    elif how == "rows":
        new_k, new_v = (x.repeat_interleave(2, 0)[::2] for x in (k, v))
    else:
        new_k, new_v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    if pages == "record":
        buffer = make((4, 2, 8, 8)).layer(0)
        k_cache, v_cache = buffer.k_cache, buffer.v_cache
    elif pages == "K beside V":
        k_cache, v_cache = torch.zeros(5, 4, 2, 24)[..., 4:20].split(8, -1)
    else:
        k_cache, v_cache = (torch.zeros(2, 5, 4, 8).permute(1, 2, 0, 3) for _ in "kv")
    slots = torch.tensor([19, 2, -1, 8, 11])
    octavo.append(LayerCache(k_cache, v_cache), new_k, new_v, slots)
    stored = slots >= 0
    for view, rows in ((k_cache, k), (v_cache, v)):
        where = slots[stored] // 4, slots[stored] % 4
        assert torch.equal(view[where], rows[stored])
        view[where] = 0
        assert not bool(view.any())
    if pages == "K beside V":
        assert not bool(k_cache._base.any())


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layout": "NDH"}, ValueError, "unknown cache layout 'NDH'; known layouts: HND, NHD"),
        ({"num_layers": 0}, ValueError, "num_layers and num_blocks must be at least 1, got 0 and 2"),
        ({"num_blocks": 0}, ValueError, "num_layers and num_blocks must be at least 1, got 1 and 0"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"num_kv_heads": -1}, ValueError, "num_kv_heads must be at least 1, got -1"),
        ({"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
        ({"value_dim": 0}, ValueError, "value_dim must be at least 1, got 0"),
        ({"format": "fp7"}, ValueError, "unknown cache format 'fp7'; known formats: auto, float16"),
        ({"dtype": torch.int8}, Unsupported, "torch.int8 cannot be stored"),
        ({"format": "int8_k", "dtype": torch.int8}, Unsupported, "torch.int8 cannot be stored"),
    ],
)
def test_caches_of_no_sense(options: dict, error: type, message: str) -> None:
    """I12: an unsupported format is refused at once, with the reason."""
    sizes = {"num_layers": 1, "num_blocks": 2, "block_size": 4, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(error, match=message):
        PagedKVCache(**sizes | options)


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        (torch.zeros(2, 4, 8), torch.zeros(2, 4, 1, 8), r"k_cache must be .* got shape \(2, 4, 8\)"),
        (torch.zeros(2, 4, 1, 8), torch.zeros(8), r"v_cache must be .* got shape \(8,\)"),
        (torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 2, 8), r"agree .* got \(2, 4, 1\) and \(2, 4, 2\)"),
        (torch.zeros(2, 4, 1, 8), torch.zeros(3, 4, 1, 8), r"agree in num_blocks"),
        (
            torch.zeros(2, 4, 1, 16)[..., ::2],
            torch.zeros(2, 4, 1, 8),
            "k_cache must be contiguous in its last",
        ),
        (
            torch.zeros(2, 4, 1, 8),
            torch.zeros(2, 4, 8, 8).mT[:, :, :1],
            "v_cache must be contiguous in its last",
        ),
        (
            torch.zeros(2, 4, 1, 8),
            torch.zeros(2, 4, 1, 8, device="meta"),
            "k_cache is on cpu, v_cache on meta",
        ),
    ],
)
def test_layers_of_no_sense(k: torch.Tensor, v: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerCache(k, v)


@pytest.mark.parametrize("pages", [torch.zeros(3, 64), torch.zeros(3, 63, dtype=torch.uint8)])
def test_pages_of_wrong_make(pages: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"pages must be uint8 \[num_blocks, 64\]"):
        PageLayout(1, 1, 8, 8, KVFormat.of_dtype(torch.float32)).views(pages)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (PageLayout(1, 1, 8, 16, KVFormat.of_dtype(torch.float32)), "K and V rows differ"),
        (PageLayout(1, 1, 4, 4, KVFormat.of_dtype(torch.float16)), "a plane of 8 bytes needs padding"),
    ],
)
def test_records_that_are_no_tensor(layout: PageLayout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.shape_and_stride_order(2)


ZEROS = torch.zeros(3, 2, 16)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"k": torch.zeros(2, 2, 16)},
            ValueError,
            r"k must be \[at least num_slots = 3, 2, 16\], got \(2, 2, 16\)",
        ),
        ({"v": torch.zeros(2, 2, 16)}, ValueError, r"v must be .* got \(2, 2, 16\)"),
        ({"k": torch.zeros(3, 1, 16)}, ValueError, r"k must be .* got \(3, 1, 16\)"),
        ({"v": torch.zeros(3, 2, 8)}, ValueError, r"v must be .* got \(3, 2, 8\)"),
        ({"v": torch.zeros(3, 32)}, ValueError, r"v must be .* got \(3, 32\)"),
        (
            {"k": torch.zeros(3, 2, 16, dtype=torch.int8)},
            TypeError,
            "k must be a float tensor, got torch.int8",
        ),
        ({"v": torch.zeros(3, 2, 16, dtype=torch.int64)}, TypeError, "v must be a float tensor"),
        ({"v": torch.zeros(3, 2, 16, device="meta")}, ValueError, "v is on meta"),
        ({"slot_mapping": torch.arange(3, device="meta")}, ValueError, "slot_mapping is on meta"),
        ({"slot_mapping": torch.arange(3, dtype=torch.int32)}, TypeError, "slot_mapping must be torch.int64"),
        ({"slot_mapping": torch.zeros(3, 1, dtype=torch.int64)}, ValueError, "slot_mapping must have 1 dimension"),
        ({"slot_mapping": torch.tensor(2)}, (TypeError, ValueError), "slot_mapping"),
        ({"slot_mapping": [0, 1, 2]}, TypeError, "slot_mapping must be a torch tensor"),
        ({"k": ZEROS.tolist()}, TypeError, "k must be a torch tensor"),
        ({"v": None}, TypeError, "v must be a torch tensor"),
        (
            {"slot_mapping": torch.tensor([0, 1, 20])},
            ValueError,
            "slot_mapping holds 20, the cache has 20 slots",
        ),
    ],
)
def test_a_failing_append_writes_nothing(change: dict, error: type, message: str) -> None:
    """SPEC section 12: the cache keeps every bit, also where only V or the last slot is wrong."""
    cache = make()
    cache.pages.random_(0, 256)
    before = cache.pages.clone()
    arguments = {"k": ZEROS, "v": ZEROS, "slot_mapping": torch.tensor([0, 7, 19])} | change
    with pytest.raises(error, match=message):
        octavo.append(cache.layer(0), **arguments)
    assert torch.equal(cache.pages, before)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rows_of_8_bit_are_stored_whole(name: str, dtype: torch.dtype) -> None:
    """Any float dtype: K and V of which one is fp8."""
    cache = make()
    arguments = {"k": torch.ones(3, 2, 16), "v": torch.ones(3, 2, 16)}
    arguments[name] = arguments[name].to(dtype)
    octavo.append(cache.layer(0), **arguments, slot_mapping=torch.tensor([0, 7, 19]))
    for view in (cache.layer(0).k_cache, cache.layer(0).v_cache):
        assert float(view.sum()) == 3 * 2 * 16
