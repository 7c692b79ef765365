"""Cases and cuts that the tests of the fault kinds share."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.harness import Cut, groups
from octavo.bench.cases import Case
from octavo.cache import Order
from octavo.planner import PrefixGroup
from octavo.spec import AttentionSpec

SHARED = groups((range(4), 26), ((0, 2), 35))


def small(
    name: str,
    query_lens: tuple[int, ...] = (1, 9, 0, 4, 3),
    seq_lens: tuple[int, ...] = (45, 70, 38, 52, 1),
    *,
    heads: tuple[int, int] = (6, 2),
    block_size: int = 8,
    order: Order = "HND",
    dtype: torch.dtype = torch.float32,
    shared: tuple[PrefixGroup, ...] = SHARED,
    kv_format: str = "auto",
    **options: object,
) -> Case:
    """Five sequences with a common prefix, one of them shorter than its new tokens; options of the spec."""
    spec = AttentionSpec(*heads, 16, **options)
    return Case(name, spec, query_lens, seq_lens, block_size, order, dtype, shared=shared, kv_format=kv_format)


CASES = (
    small("causal"),
    small("window", window_left=6),
    small("encoder", causal=False),
    small("encoder-window", causal=False, window_left=5, window_right=2),
    small("everything", window_left=20, logits_soft_cap=2.0, alibi="linear", sinks=True),
    small("half", dtype=torch.float16, window_left=6, order="NHD", block_size=16),
    small("bfloat16-sqrt", dtype=torch.bfloat16, alibi="sqrt", sinks=True, block_size=3),
)
"""One of each kind of mask, score and dtype."""

EIGHT_BIT_CASES = (
    small("fp8", kv_format="fp8_e4m3", window_left=20, logits_soft_cap=2.0, alibi="linear", sinks=True),
    small("fp8-e5m2-half", kv_format="fp8_e5m2", dtype=torch.float16, order="NHD", block_size=16),
    small("int8-kv", kv_format="int8_kv", window_left=20, logits_soft_cap=2.0, alibi="linear", sinks=True),
    small("int8-kv-bfloat16-encoder", kv_format="int8_kv", dtype=torch.bfloat16, causal=False, order="NHD"),
    small("int8-k-half", kv_format="int8_k", dtype=torch.float16, window_left=6, sinks=True),
    small("int8-k-encoder-window", kv_format="int8_k", causal=False, window_left=5, window_right=2, block_size=3),
    small("int8-per-token", kv_format="int8_per_token", window_left=20, alibi="sqrt", sinks=True),
    small("int8-per-token-bfloat16", kv_format="int8_per_token", dtype=torch.bfloat16, order="NHD", block_size=16),
)
"""Every 8-bit format, twice."""


def hard_rows(width: int) -> Tensor:
    """New K or V [11, 3, width >= 16] float32 that writers may get wrong: zeros, halves between two stored numbers,
    what is small, large or no number."""
    random = torch.Generator().manual_seed(width)
    x = torch.randn(11, 3, width, generator=random) * 100
    x[1] = 0
    x[2, :, :9] = torch.tensor([127, 0.5, 1.5, -2.5, 63.5, 126.5, -0.49, 1e-3, 0.0])
    x[3] *= 1e-30
    x[4, 1, 5], x[5, 2, 7], x[6, 0, 3] = float("nan"), float("inf"), -float("inf")
    x[7] = torch.linspace(-500, 500, x[7].numel()).view_as(x[7])
    x[8] = 2.0 ** torch.linspace(-19, 15, x[8].numel()).view_as(x[8])
    x[9] = (1 + torch.arange(x[9].numel()).view_as(x[9])) * 0.5**10
    x[10] *= 1e-38
    return x


CUTS = {
    "whole": Cut(),
    "splits": Cut(num_splits=4),
    "cascade": Cut(cascade=(groups((range(4), 26)), groups(((0, 2), 35)))),
    "ranks": Cut(world=3, interleave=2),
    "invariant": Cut(invariant=True),
    "all": Cut(num_splits=3, cascade=(groups((range(4), 26)),), world=2, interleave=8),
}
"""Every way to cut the work."""
