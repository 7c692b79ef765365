"""Named problems, shared by benchmarks and tests: a `Case` says what, `build` makes the tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.batch import AttentionBatch
from octavo.cache import LayerCache, Order, PagedKVCache
from octavo.formats import EIGHT_BIT_FORMATS, KVFormat
from octavo.planner import PrefixGroup
from octavo.quantise import INT8_MAX, real_rows, store_rows
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
        cache_dtype: of K and V where they are plain numbers; None: dtype.
        kv_format: how the cache stores them; "auto": in cache_dtype.
        shared: groups of sequences whose first `length` keys are equal, outermost groups first. Their full
            pages are the same pages of the cache.
        fp8_scales: whether fp8 has scales, one for each KV head; otherwise they are 1.
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
    kv_format: str = "auto"
    fp8_scales: bool = True

    @property
    def format(self) -> KVFormat:
        """What the cache stores."""
        return KVFormat.parse(self.kv_format, self.cache_dtype or self.dtype)


@dataclass(frozen=True, slots=True)
class Problem:
    """A case's tensors, as one rank holds them.

    Args:
        case: what they are.
        shard: whose pages these are; `keys` and `values` are whole on every rank.
        batch: lengths, a table with GUARD past each sequence's blocks, and the slots of the new tokens.
        q: [num_tokens + padding rows, num_q_heads, head_dim].
        cache: one layer's pages.
        keys, values: per sequence [seq_len, num_kv_heads, head_dim | value_dim], not paged, in the cache's dtype; of
            8-bit caches the numbers that the cache stands for, float32.
        alibi_slopes, sinks: [num_q_heads] float32, present iff the spec has them.
        q_descale: [num_seqs, num_kv_heads] float32, of an fp8 q.
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
    q_descale: Tensor | None = None

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
    draw_on: torch.device | str = "cpu",
) -> Problem:
    """Make the tensors of a case.

    Numbers depend on `seed`, `draw_on`, lengths and widths only: cases that differ in pages, order or shard are the
    same problem, stored otherwise.

    Args:
        seed: of q, K, V, slopes and sinks.
        page_seed: of the order of the pages.
        poison: fills the rows and pages of the cache that belong to no key, and the padding rows of q; where numbers
            cannot hold it, their scales do.
        padding_rows: rows of q past num_tokens.
        shard: which keys go into the pages.
        device: where the tensors live.
        draw_on: where the random numbers are made. A GPU draws other numbers than a CPU, and billions in no time.
    """
    spec, dtype = case.spec, case.cache_dtype or case.dtype
    random = torch.Generator(draw_on).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=draw_on)

    num_tokens = sum(case.query_lens)
    q = normal(num_tokens, spec.num_q_heads, spec.head_dim)
    padding = torch.full((padding_rows, spec.num_q_heads, spec.head_dim), poison, device=draw_on)
    slopes = 2.0 ** -(1 + 8 * torch.rand(spec.num_q_heads, generator=random, device=draw_on))
    sinks = 2 * normal(spec.num_q_heads)
    keys, values = [], []
    for n in case.seq_lens:
        keys.append(normal(n, spec.num_kv_heads, spec.head_dim).to(dtype))
        values.append(normal(n, spec.num_kv_heads, spec.v_dim).to(dtype))
    for group in case.shared:
        leader = max(group.seqs, key=case.seq_lens.__getitem__)
        for s in group.seqs:
            n = min(group.length, case.seq_lens[s])
            keys[s][:n], values[s][:n] = keys[leader][:n], values[leader][:n]

    static = _static_scales(case, values, seed)
    stored = [store_rows(case.format, k, v, **static) for k, v in zip(keys, values, strict=True)]
    if case.format.is_eight_bit:
        real = [real_rows(case.format, rows, **static) for rows in stored]
        keys, values = [k for k, _ in real], [v for _, v in real]
    static = {name: scale.to(device) for name, scale in static.items()}
    local_lens = [shard.local_count(n) for n in case.seq_lens]
    table, num_blocks = _tables(case, shard, local_lens, page_seed)
    pages = PagedKVCache(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=case.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.v_dim,
        format=case.kv_format,
        dtype=dtype,
        device=device,
        layout=case.order,
    ).layer(0, **static)
    poison_rows(pages, torch.ones(num_blocks, case.block_size, dtype=torch.bool), poison)
    slot_mapping = []
    for s, n in enumerate(local_lens):
        j = torch.arange(n)
        position, block, row = shard.global_position(j), table[s, j // case.block_size], j % case.block_size
        # The indices go along once, not once for each of the four uses.
        here, there, place = position.to(draw_on), block.to(device), row.to(device)
        pages.k_cache[there, place] = stored[s].k[here].to(device)
        pages.v_cache[there, place] = stored[s].v[here].to(device)
        for scales, of_rows in ((pages.k_descale, stored[s].k_scale), (pages.v_descale, stored[s].v_scale)):
            if scales is not None and of_rows is not None:
                scales[there, :, place] = of_rows[here].to(device)
        slots = torch.full((case.seq_lens[s],), -1, dtype=torch.int64)
        slots[position] = block * case.block_size + row
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


def poison_rows(cache: LayerCache, where: Tensor, poison: float) -> None:
    """Fill rows of a cache, their scales too.

    Args:
        where: [num_blocks, block_size] bool.
        poison: the number; int8 takes its extreme of that sign instead (-128 for NaN), its scale the number itself.
    """
    block, row = where.nonzero(as_tuple=True)
    for pages, scales in ((cache.k_cache, cache.k_descale), (cache.v_cache, cache.v_descale)):
        at = block.to(pages.device), row.to(pages.device)
        number = poison
        if pages.dtype == torch.int8:
            number = 0 if poison == 0 else 127 if poison > 0 else -128
        if len(block):
            pages[at] = torch.full((), number).to(pages.device, pages.dtype)
        if scales is not None and scales.ndim == 3:
            scales[at[0], :, at[1]] = poison


def _static_scales(case: Case, values: list[Tensor], seed: int) -> dict[str, Tensor]:
    """Arguments k_descale and v_descale of a case's layer: different ones for every head, or channel of V.

    Some are so small that numbers saturate, as those of a calibration on other text.
    """
    spec, format = case.spec, case.format
    random = torch.Generator().manual_seed(seed + 1)
    device = values[0].device if values else "cpu"
    if format.is_fp8 and case.fp8_scales:
        scales = 2.0 ** (6 * torch.rand(2, spec.num_kv_heads, generator=random) - 3)
        return {"k_descale": scales[0].to(device), "v_descale": scales[1].to(device)}
    if format.v_scaled_by_channel:
        scale = 4 * 2.0 ** (2 * torch.rand(spec.num_kv_heads, spec.v_dim, generator=random) - 1) / INT8_MAX
        return {"v_descale": scale.to(device)}
    return {}


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

DEEPSEEK = replace(LLAMA, head_dim=192, value_dim=128)
"""Heads as wide as those of DeepSeek's prefill, values narrower than keys, in Llama's numbers."""

_VARLEN = (1500, 37, 420, 88, 760, 190)
"""Prompts of which the longest holds three quarters of the work."""

_SHORT = (16, 32, 64, 96, 128, 200, 256, 300, 384, 512)
"""Prompts as chats begin."""


def _llama(name: str, query_len: int, *seq_lens: int, block_size: int = 16) -> Case:
    """Llama's layer over sequences with the same number of new tokens."""
    return Case(name, LLAMA, (query_len,) * len(seq_lens), seq_lens, block_size)


def _prefill_4x4k(name: str, spec: AttentionSpec) -> Case:
    return Case(f"prefill-4x4k-{name}", spec, (4096,) * 4, (4096,) * 4)


CASES: tuple[Case, ...] = (
    Case("prefill-1x1k", LLAMA, (1024,), (1024,)),
    Case("prefill-1x3k", LLAMA, (3072,), (3072,)),
    Case("prefill-4x4k", LLAMA, (4096,) * 4, (4096,) * 4),
    Case("prefill-varlen", LLAMA, _VARLEN, _VARLEN),
    Case("prefill-varlen-short", LLAMA, _SHORT, _SHORT),
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
    _llama("decode-8x8k", 1, *(8192,) * 8),
    _llama("decode-32x2k", 1, *(2048,) * 32),
    _llama("decode-32x8k", 1, *(8192,) * 32),
    _llama("decode-32x8k-pages-8", 1, *(8192,) * 32, block_size=8),
    _llama("decode-32x8k-pages-1", 1, *(8192,) * 32, block_size=1),
    _llama("decode-128x1k", 1, *(1024,) * 128),
    _llama("decode-128x4k", 1, *(4096,) * 128),
    _llama("decode-256x1k", 1, *(1024,) * 256),
    _llama("decode-1x32k", 1, 32768),
    _llama("decode-1x128k", 1, 131072),
    *(
        replace(_llama(f"{name}-{kv_format}", query_len, *lens), kv_format=kv_format, fp8_scales=False)
        for name, query_len, lens in (
            ("decode-32x8k", 1, (8192,) * 32),
            ("decode-128x4k", 1, (4096,) * 128),
            ("prefill-4x4k", 4096, (4096,) * 4),
        )
        for kv_format in EIGHT_BIT_FORMATS
    ),
    _llama("verify-1x4-of-8k", 4, 8192),
    _llama("verify-1x4-of-32k", 4, 32768),
    _llama("prefill-16x1k", 1024, *(1024,) * 16),
    _llama("prefill-1x16k", 16384, 16384),
    _prefill_4x4k("d64", replace(LLAMA, head_dim=64)),
    _prefill_4x4k("d96", replace(LLAMA, head_dim=96)),
    _prefill_4x4k("d192", DEEPSEEK),
    _prefill_4x4k("d256", replace(LLAMA, head_dim=256)),
    _prefill_4x4k("window-1k", replace(LLAMA, window_left=1023)),
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
    "prefill-varlen-short",
    "prefill-1x2k-window-512",
    "chunk-256-of-2304",
    "prefill-1x1k-smollm2",
    "prefill-1x1k-gemma3",
)
"""Names of those that a CPU is measured with: minutes, and gigabytes of memory, but few of both."""

GPU_CASES: tuple[str, ...] = (
    "decode-1x8k",
    "decode-8x8k",
    "decode-32x2k",
    "decode-32x8k",
    "decode-128x1k",
    "decode-128x4k",
    "decode-256x1k",
    "decode-1x32k",
    "decode-1x128k",
    "decode-skewed",
    "decode-32x8k-pages-8",
    "decode-32x8k-pages-1",
    *(f"decode-{shape}-{kv_format}" for shape in ("32x8k", "128x4k") for kv_format in EIGHT_BIT_FORMATS),
    "verify-1x4-of-8k",
    "verify-1x4-of-32k",
    "verify-8x4-of-8k",
    *(f"prefill-4x4k-{kv_format}" for kv_format in EIGHT_BIT_FORMATS),
    "prefill-16x1k",
    "prefill-4x4k",
    "prefill-1x16k",
    "prefill-4x4k-d64",
    "prefill-4x4k-d96",
    "prefill-4x4k-d192",
    "prefill-4x4k-d256",
    "prefill-4x4k-window-1k",
)
"""Names of those that a GPU is measured with."""
