"""`append` in Triton writes what `append` in PyTorch writes, bit for bit, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance.common import hard_rows
from octavo.cache import LayerCache, Order, PagedKVCache
from octavo.formats import EIGHT_BIT_FORMATS
from octavo.kernels import cpu, triton
from tolerance import assert_same_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def make_cache(dtype: torch.dtype = torch.float16, heads: int = 3, dims: tuple[int, int] = (16, 24), **options):
    shape = {"num_layers": 1, "num_blocks": 5, "block_size": 4, "num_kv_heads": heads, "head_dim": dims[0]}
    cache = PagedKVCache(**shape, value_dim=dims[1], dtype=dtype, **options).layer(0)
    cache.k_cache.fill_(7.0)
    cache.v_cache.fill_(7.0)
    return cache


def same(cache: LayerCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Append in both families to equal caches and compare them whole."""
    caches = [LayerCache(cache.k_cache.clone(), cache.v_cache.clone()) for _ in range(2)]
    for family, one in zip((cpu, triton), caches, strict=True):
        family.append(one, k, v, slots)
    assert not torch.equal(caches[0].k_cache, cache.k_cache)
    assert_same_bits("K", caches[1].k_cache, caches[0].k_cache)
    assert_same_bits("V", caches[1].v_cache, caches[0].v_cache)


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("new", [*DTYPES, torch.float64])
@pytest.mark.parametrize("stored", DTYPES)
def test_dtypes_and_layouts(stored: torch.dtype, new: torch.dtype, order: Order) -> None:
    """G10: negative slots are skipped, rows past the slots are padding."""
    k, v = torch.randn(6, 3, 16, dtype=new), torch.randn(6, 3, 24, dtype=new)
    if stored == torch.bfloat16:  # the interpreter cuts where a GPU rounds
        k, v = k.bfloat16().to(new), v.bfloat16().to(new)
    k[4:], v[4:] = float("nan"), float("nan")
    same(make_cache(stored, layout=order), k, v, torch.tensor([13, -1, 0, 19]))


@pytest.mark.parametrize("heads", [1, 5, 71])
@pytest.mark.parametrize("dims", [(8, 8), (192, 128), (80, 512)])
def test_widths(heads: int, dims: tuple[int, int]) -> None:
    k, v = (torch.randn(2, heads, dim, dtype=torch.float16) for dim in dims)
    same(make_cache(heads=heads, dims=dims), k, v, torch.tensor([3, 4]))


def test_views() -> None:
    """G02, G19: columns of a fused buffer, heads outermost, elements apart; a strided list of slots."""
    slots = torch.tensor([5, 0, 11, 0, 2, 0])[::2]
    fused = torch.randn(3, 3 * (16 + 24), dtype=torch.float16)
    same(make_cache(), fused[:, :48].unflatten(1, (3, 16)), fused[:, 48:].unflatten(1, (3, 24)), slots)
    k, v = torch.randn(3, 3, 16, dtype=torch.float16), torch.randn(3, 3, 24, dtype=torch.float16)
    same(make_cache(), k.transpose(0, 1), v.transpose(0, 1), slots)
    same(make_cache(), k.transpose(1, 2).contiguous().transpose(1, 2), v, slots)


def test_no_slots() -> None:
    cache = make_cache()
    triton.append(cache, torch.ones(2, 3, 16), torch.ones(2, 3, 24), torch.empty(0, dtype=torch.int64))
    assert bool((cache.k_cache == 7).all())


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("new", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", EIGHT_BIT_FORMATS)
def test_eight_bit(name: str, new: torch.dtype, order: Order) -> None:
    """Every byte of the pages, scales too."""
    shape = {"num_layers": 1, "num_blocks": 5, "block_size": 4, "num_kv_heads": 3, "head_dim": 16, "value_dim": 24}
    pages = PagedKVCache(**shape, format=name, dtype=torch.float16, layout=order).pages.random_(0, 256)
    k, v = hard_rows(16), hard_rows(24)
    slots = torch.tensor([13, 2, 0, 19, 5, 6, 7, 8, 9, 10, 12])
    static = {}
    if name.startswith("fp8"):
        static = {"k_descale": torch.tensor([0.5, 1.7, 3.0]), "v_descale": torch.tensor(0.3)}
    if name == "int8_kv":
        static = {"v_descale": torch.rand(3, 24)}
        static["v_descale"][0, :2] = 0
    written = []
    for family in (cpu, triton):
        mine = PagedKVCache(**shape, format=name, dtype=torch.float16, layout=order)
        mine.pages.copy_(pages)
        family.append(mine.layer(0, **static), k.to(new), v.to(new), slots)
        written.append(mine.pages)
    assert not torch.equal(written[0], pages)
    wrong = (written[0] != written[1]).nonzero()
    assert torch.equal(*written), (wrong[:5], written[0][written[0] != written[1]][:5])
