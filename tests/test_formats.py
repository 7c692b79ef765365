"""The cache formats: names, facts, bytes, and static scales."""

from __future__ import annotations

import pytest
import torch

import octavo
from octavo.cache import PLANE_ALIGNMENT, LayerCache, PagedKVCache, PageLayout
from octavo.errors import Unsupported
from octavo.formats import EIGHT_BIT_FORMATS, KVFormat

FACTS = {
    # k_scaled_by_row, v_scaled_by_row, v_scaled_by_channel, is_fp8, is_eight_bit, bytes per token and head at D=128
    "auto": (False, False, False, False, False, 512),
    "fp8_e4m3": (False, False, False, True, True, 256),
    "fp8_e5m2": (False, False, False, True, True, 256),
    "int8_kv": (True, False, True, False, True, 260),
    "int8_k": (True, False, False, False, True, 388),
    "int8_per_token": (True, True, False, False, True, 264),
}
"""The table of SPEC section 2."""


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("name", FACTS)
def test_facts_and_bytes(name: str, order: str) -> None:
    cache = PagedKVCache(
        num_layers=3, num_blocks=2, block_size=16, num_kv_heads=8, head_dim=128, format=name, layout=order
    )
    format = cache.layout.format
    assert cache.layer(1).format == format == KVFormat.parse(name, torch.bfloat16)
    facts = (format.k_scaled_by_row, format.v_scaled_by_row, format.v_scaled_by_channel, format.is_fp8)
    assert (*facts, format.is_eight_bit, cache.bytes_per_token / 3 / 8) == FACTS[name]


def test_names() -> None:
    assert KVFormat.parse("fp8", torch.float16) == KVFormat.parse("fp8_e4m3", torch.float16)
    assert KVFormat.parse("int8_k", torch.float16).v_dtype == torch.float16
    with pytest.raises(
        ValueError, match=r"unknown cache format .int4.; known formats: auto, float16, .* int8_per_token"
    ):
        KVFormat.parse("int4", torch.float32)
    with pytest.raises(Unsupported, match="float64 cannot be stored"):
        KVFormat.parse("int8_k", torch.float64)


@pytest.mark.parametrize("shape", [(16, 2, 64, 64), (1, 1, 8, 8), (3, 3, 24, 8), (5, 1, 8, 16), (8, 2, 192, 128)])
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("name", EIGHT_BIT_FORMATS)
def test_planes_are_disjoint_aligned_and_inside_their_record(
    name: str, order: str, shape: tuple[int, int, int, int]
) -> None:
    """I05: data and scales of every page, byte by byte: none shared, none outside the page's own record."""
    block_size, num_kv_heads, head_dim, value_dim = shape
    cache = PagedKVCache(
        num_layers=2,
        num_blocks=3,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        format=name,
        layout=order,
        dtype=torch.float16,
    )
    assert cache.layout.page_bytes % PLANE_ALIGNMENT == 0
    layer = cache.layer(1)
    views = [x for x in (layer.k_cache, layer.v_cache, layer.k_descale, layer.v_descale) if x is not None]
    assert len(views) == 2 + layer.format.k_scaled_by_row + layer.format.v_scaled_by_row
    for scale in views[2:]:
        assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (3, num_kv_heads, block_size))
    for block in range(3):
        for view in views:
            start = view[block].data_ptr() - cache.pages[1, block].data_ptr()
            assert start % PLANE_ALIGNMENT == 0
            ones = torch.full((view.element_size(),), 255, dtype=torch.uint8).view(view.dtype)
            view[block] = ones[0]
            touched = cache.pages != 0
            assert int(touched.sum()) == view[block].numel() * view.element_size()
            touched[1, block] = False
            assert not bool(touched.any())
            cache.pages.zero_()


@pytest.mark.parametrize("name", EIGHT_BIT_FORMATS)
def test_copied_pages_bring_their_scales(name: str) -> None:
    """K05: a page is one record; nothing of it stays behind."""
    sizes = {"num_layers": 2, "num_blocks": 4, "block_size": 5, "num_kv_heads": 3, "head_dim": 8}
    cache = PagedKVCache(**sizes, format=name)
    static = {"v_descale": torch.ones(3, 8)} if name == "int8_kv" else {}
    octavo.append(cache.layer(1, **static), *torch.randn(2, 5, 3, 8), torch.arange(10, 15))
    cache.copy_pages(torch.tensor([2]), torch.tensor([0]))
    layer = cache.layer(1)
    for view in (layer.k_cache, layer.v_cache, layer.k_descale, layer.v_descale):
        if view is not None:
            assert torch.equal(view[0].view(torch.uint8), view[2].view(torch.uint8))
            assert bool(view[0].float().any())


def test_one_tensor_for_engines() -> None:
    """fp8 pages are one tensor; pages with scales say that they are none."""
    fp8 = PageLayout(16, 2, 16, 16, KVFormat.parse("fp8", torch.float16))
    assert fp8.shape_and_stride_order(3)[0] == (3, 2, 16, 2, 16)
    for name in ("int8_kv", "int8_k", "int8_per_token"):
        with pytest.raises(ValueError, match=f"pages of {name} hold scales too; allocate bytes and use views"):
            PageLayout(16, 2, 16, 16, KVFormat.parse(name, torch.float16)).shape_and_stride_order(3)


def pages(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(5, 4, 2, 16, dtype=dtype)


@pytest.mark.parametrize(
    ("k", "v", "k_descale", "v_descale", "error", "message"),
    [
        (torch.int8, torch.int8, None, None, ValueError, "k_cache is int8 and needs k_descale"),
        (
            torch.int8,
            torch.int8,
            torch.ones(5, 4, 2),
            None,
            ValueError,
            r"must be float32 \(5, 2, 4\), got .* \(5, 4, 2\)",
        ),
        (torch.int8, torch.int8, torch.ones(5, 2, 4).half(), None, ValueError, "float32 .* got torch.float16"),
        (
            torch.int8,
            torch.int8,
            torch.ones(5, 2, 4),
            torch.ones(2),
            ValueError,
            r"v_descale .* or \(2, 16\), got .* \(2,\)",
        ),
        (torch.int8, torch.float16, torch.ones(5, 2, 4), torch.ones(2, 16), Unsupported, "v_descale belongs to 8-bit"),
        (
            torch.float16,
            torch.float16,
            torch.ones(()),
            None,
            Unsupported,
            "k_descale belongs to 8-bit tensors, k_cache",
        ),
        (
            torch.float8_e5m2,
            torch.float8_e5m2,
            torch.ones(3),
            None,
            ValueError,
            r"\(\), \(2,\) or \(num_seqs, 2\), got",
        ),
        (torch.float8_e5m2, torch.float8_e5m2, None, torch.ones(3, 4), ValueError, "v_descale of a torch.float8_e5m2"),
        (torch.float8_e5m2, torch.float8_e5m2, torch.ones((), device="meta"), None, ValueError, "k_descale is on meta"),
    ],
)
def test_scales_that_do_not_fit(
    k: torch.dtype, v: torch.dtype, k_descale: object, v_descale: object, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        LayerCache(pages(k), pages(v), k_descale, v_descale)


@pytest.mark.parametrize(
    ("k", "v"),
    [
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (torch.float16, torch.float8_e5m2),
        (torch.int8, torch.float8_e5m2),
        (torch.int16, torch.int16),
    ],
)
def test_pairs_that_are_no_format(k: torch.dtype, v: torch.dtype) -> None:
    """I12: refused with the reason, before anything runs."""
    scale = torch.ones(5, 2, 4) if k == torch.int8 else None
    with pytest.raises(TypeError, match=f"no cache format has K of {k} and V of {v}"):
        _ = LayerCache(pages(k), pages(v), scale).format


def test_scales_of_rows_are_not_given_twice() -> None:
    cache = PagedKVCache(num_layers=1, num_blocks=5, block_size=4, num_kv_heads=2, head_dim=16, format="int8_per_token")
    with pytest.raises(
        ValueError, match="v_descale must be None: pages of int8_per_token hold the scales of their rows"
    ):
        cache.layer(0, v_descale=torch.ones(2, 16))
