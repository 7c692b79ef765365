"""Named problems, shared by benchmarks and tests: a `Case` says what, `build` makes the tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.batch import AttentionBatch
from octavo.cache import LayerCache, Order, PagedKVCache
from octavo.planner import PrefixGroup
from octavo.spec import AttentionSpec, KVShard

GUARD = 2**30
"""Block id in the table entries past a sequence's blocks: whoever looks it up fails."""

SPARE_BLOCKS = 3
"""Blocks of the cache that no sequence owns."""


DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Short names of dtypes, as reports write them."""


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem, without tensors.

    Args:
        name: how tests and reports call it.
        spec: the layer.
        query_lens: new tokens of each sequence.
        seq_lens: keys of each sequence, new ones included.
        block_size: rows of a page.
        order: memory order of the pages.
        dtype: of q and of the output.
        cache_dtype: of K and V; None: dtype.
        shared: groups of sequences whose first `length` keys are equal, outermost groups first. Their full
            pages are the same pages of the cache.
    """

    name: str
    spec: AttentionSpec
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_size: int = 16
    order: Order = "HND"
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    shared: tuple[PrefixGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """A case's tensors, as one rank holds them.

    Args:
        case: what they are.
        shard: whose pages these are; `keys` and `values` are whole on every rank.
        batch: lengths, a table with GUARD past each sequence's blocks, and the slots of the new tokens.
        q: [num_tokens + padding rows, num_q_heads, head_dim].
        cache: one layer's pages.
        keys, values: per sequence [seq_len, num_kv_heads, head_dim | value_dim], not paged, same dtype.
        alibi_slopes, sinks: [num_q_heads] float32, present iff the spec has them.
    """

    case: Case
    shard: KVShard
    batch: AttentionBatch
    q: Tensor
    cache: LayerCache
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    alibi_slopes: Tensor | None
    sinks: Tensor | None

    @property
    def spec(self) -> AttentionSpec:
        return self.case.spec


def build(
    case: Case,
    *,
    seed: int = 0,
    page_seed: int = 0,
    poison: float = 0.0,
    padding_rows: int = 0,
    shard: KVShard = KVShard(),
    device: torch.device | str = "cpu",
) -> Problem:
    """Make the tensors of a case.

    Numbers depend on `seed`, lengths and widths only: cases that differ in pages, order or shard are the same
    problem, stored otherwise.

    Args:
        seed: of q, K, V, slopes and sinks.
        page_seed: of the order of the pages.
        poison: fills the rows and pages of the cache that belong to no key, and the padding rows of q.
        padding_rows: rows of q past num_tokens.
        shard: which keys go into the pages.
        device: where the tensors live.
    """
    spec, dtype = case.spec, case.cache_dtype or case.dtype
    random = torch.Generator().manual_seed(seed)
    num_tokens = sum(case.query_lens)
    q = torch.randn(num_tokens, spec.num_q_heads, spec.head_dim, generator=random)
    padding = torch.full((padding_rows, spec.num_q_heads, spec.head_dim), poison)
    slopes = 2.0 ** -(1 + 8 * torch.rand(spec.num_q_heads, generator=random))
    sinks = 2 * torch.randn(spec.num_q_heads, generator=random)
    keys, values = [], []
    for n in case.seq_lens:
        keys.append(torch.randn(n, spec.num_kv_heads, spec.head_dim, generator=random).to(dtype))
        values.append(torch.randn(n, spec.num_kv_heads, spec.v_dim, generator=random).to(dtype))
    for group in case.shared:
        leader = max(group.seqs, key=case.seq_lens.__getitem__)
        for s in group.seqs:
            n = min(group.length, case.seq_lens[s])
            keys[s][:n], values[s][:n] = keys[leader][:n], values[leader][:n]

    local_lens = [shard.local_count(n) for n in case.seq_lens]
    table, num_blocks = _tables(case, shard, local_lens, page_seed)
    pages = PagedKVCache(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=case.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.v_dim,
        dtype=dtype,
        device=device,
        layout=case.order,
    ).layer(0)
    pages.k_cache.fill_(poison)
    pages.v_cache.fill_(poison)
    slot_mapping = []
    for s, n in enumerate(local_lens):
        j = torch.arange(n)
        position, block = shard.global_position(j), table[s, j // case.block_size]
        pages.k_cache[block, j % case.block_size] = keys[s][position].to(device)
        pages.v_cache[block, j % case.block_size] = values[s][position].to(device)
        slots = torch.full((case.seq_lens[s],), -1, dtype=torch.int64)
        slots[position] = block * case.block_size + j % case.block_size
        slot_mapping.append(slots[max(0, case.seq_lens[s] - case.query_lens[s]) :])
    return Problem(
        case=case,
        shard=shard,
        batch=AttentionBatch.from_lengths(
            case.query_lens,
            case.seq_lens,
            table,
            slot_mapping=torch.cat([torch.empty(0, dtype=torch.int64), *slot_mapping]),
            device=device,
        ),
        q=torch.cat([q, padding]).to(device, case.dtype),
        cache=pages,
        keys=tuple(k.to(device) for k in keys),
        values=tuple(v.to(device) for v in values),
        alibi_slopes=slopes.to(device) if spec.alibi else None,
        sinks=sinks.to(device) if spec.sinks else None,
    )


def _tables(case: Case, shard: KVShard, local_lens: list[int], page_seed: int) -> tuple[Tensor, int]:
    """Shuffled blocks for every sequence [num_seqs, max_blocks + 1] int32, and the number of blocks."""
    counts = [-(-n // case.block_size) for n in local_lens]
    num_blocks = sum(counts) + SPARE_BLOCKS
    shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(page_seed)).to(torch.int32)
    table = torch.full((len(counts), max(counts, default=0) + 1), GUARD, dtype=torch.int32)
    taken = 0
    for s, n in enumerate(counts):
        table[s, :n] = shuffled[taken : taken + n]
        taken += n
    for group in case.shared:
        leader = max(group.seqs, key=case.seq_lens.__getitem__)
        full = shard.local_count(group.length) // case.block_size
        for s in group.seqs:
            # A sequence that ends inside the prefix shares its last page too.
            n = counts[s] if case.seq_lens[s] <= group.length else full
            table[s, :n] = table[leader, :n]
    return table, num_blocks


LLAMA = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
"""The layer of an 8-billion-parameter Llama."""

WINDOWED = AttentionSpec(num_q_heads=64, num_kv_heads=8, head_dim=64, window_left=127, sinks=True)
"""A windowed layer of GPT-OSS."""

SMOLLM2 = AttentionSpec(num_q_heads=9, num_kv_heads=3, head_dim=64)
"""The layer of SmolLM2 with 135 million parameters."""

GEMMA3 = AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=256)
"""A full-attention layer of Gemma 3 with 270 million parameters."""

MHA = replace(LLAMA, num_kv_heads=32)
"""As many KV heads as query heads."""

_VARLEN = (1500, 37, 420, 88, 760, 190)

CASES: tuple[Case, ...] = (
    Case("prefill-1x1k", LLAMA, (1024,), (1024,)),
    Case("prefill-1x3k", LLAMA, (3072,), (3072,)),
    Case("prefill-4x4k", LLAMA, (4096,) * 4, (4096,) * 4),
    Case("prefill-varlen", LLAMA, _VARLEN, _VARLEN),
    Case("prefill-1x2k-window-512", replace(LLAMA, window_left=511), (2048,), (2048,)),
    Case("prefill-1x1k-smollm2", SMOLLM2, (1024,), (1024,)),
    Case("prefill-1x1k-gemma3", GEMMA3, (1024,), (1024,)),
    Case("chunk-256-of-2304", LLAMA, (256,), (2304,)),
    Case("chunk-512-of-4k", LLAMA, (512,), (4096,)),
    Case("decode-1x8k", LLAMA, (1,), (8192,)),
    Case("decode-8x4k", LLAMA, (1,) * 8, (4096,) * 8),
    Case("decode-8x4k-gemma3", GEMMA3, (1,) * 8, (4096,) * 8),
    Case("decode-8x1k-mha", MHA, (1,) * 8, (1024,) * 8),
    Case("decode-32x1k", LLAMA, (1,) * 32, (1024,) * 32),
    Case("decode-32x2k-smollm2", SMOLLM2, (1,) * 32, (2048,) * 32),
    Case("decode-skewed", LLAMA, (1,) * 32, (131072, *(4096,) * 31)),
    Case("verify-8x4-of-8k", LLAMA, (4,) * 8, (8192,) * 8),
    Case("mixed", LLAMA, (*(1,) * 15, 497), (*(1024,) * 15, 2048)),
    Case("cascade-8-share-2k", LLAMA, (1,) * 8, (2304,) * 8, shared=(PrefixGroup(tuple(range(8)), 2048),)),
    Case("window-decode-16x4k", WINDOWED, (1,) * 16, (4096,) * 16),
)
"""The problems that benchmarks report."""

CPU_CASES: tuple[str, ...] = (
    "decode-8x4k",
    "decode-1x8k",
    "decode-32x2k-smollm2",
    "decode-8x4k-gemma3",
    "decode-8x1k-mha",
    "mixed",
    "prefill-1x1k",
    "prefill-1x3k",
    "prefill-varlen",
    "prefill-1x2k-window-512",
    "chunk-256-of-2304",
    "prefill-1x1k-smollm2",
    "prefill-1x1k-gemma3",
)
"""Names of those that a CPU is measured with: minutes, and gigabytes of memory, but few of both."""
