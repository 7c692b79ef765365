"""Attention over dense keys, [batch_size, num_kv_heads, num_keys, head_dim] as most libraries keep them.

Dense keys are pages of one row, without a copy, and padding is left out by a block table that does not name it. A
`DenseStep` says which rows belong together, `attend_dense` attends.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.batch import AttentionBatch
from octavo.cache import LayerCache
from octavo.errors import Unsupported
from octavo.launch import Plan
from octavo.planner import Planner
from octavo.run import run
from octavo.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class DenseStep:
    """Which rows of a dense batch form sequences; the same for all layers that mask alike.

    Args:
        batch: sequences of consecutive query rows, [batch_size * num_queries] in all; rows of padding are sequences
            without keys. Its block table counts keys from the first of the sequence's own batch row.
        batch_rows: [num_seqs] int32, that batch row.
        shape: batch_size, num_queries and num_keys.
    """

    batch: AttentionBatch
    batch_rows: Tensor
    shape: tuple[int, int, int]
    plans: dict[tuple[object, ...], Plan] = field(default_factory=dict, compare=False, repr=False)
    """Plans of the layers so far, by what they depend on."""

    @classmethod
    def whole(
        cls, batch_size: int, num_queries: int, num_keys: int, *, device: torch.device, end: int | None = None
    ) -> DenseStep:
        """Every row counts. The queries are the last of the keys [0, end); None: of all.

        Raises:
            ValueError: `end` lies outside the keys.
        """
        end = num_keys if end is None else end
        if not 0 <= end <= num_keys:
            raise ValueError(f"end must lie in [0, num_keys = {num_keys}], got {end}")
        rows = torch.arange(batch_size + 1, device=device)
        keys = torch.arange(end, device=device).expand(batch_size, end)
        shape = (batch_size, num_queries, num_keys)
        return _step(shape, rows * num_queries, rows.new_full((batch_size,), end), keys, rows[:-1])

    @classmethod
    def padded(
        cls, seen: Tensor, num_queries: int, first_query: int, *, causal: bool, windowed: bool = False
    ) -> DenseStep:
        """Some keys are padding, wherever they stand. Waits for the device.

        Args:
            seen: [batch_size, num_keys] bool, False for padding.
            num_queries: query rows of a batch row.
            first_query: the key beside which the first of them stands; a query is padding if its key is. Without
                meaning for layers that are neither causal nor windowed: all their queries count.
            causal, windowed: whether the layers are causal and have a window.

        Raises:
            ValueError: queries stand beside no key.
            Unsupported: a window that would count padding in the middle of a sequence, or look past the queries.
        """
        batch_size, num_keys = seen.shape
        shape, device = (batch_size, num_queries, num_keys), seen.device
        at, rows = torch.arange(num_keys, device=device), torch.arange(batch_size + 1, device=device)
        count = seen.sum(1)
        first, last = torch.where(seen, at, num_keys).amin(1), torch.where(seen, at, -1).amax(1)
        keys = first[:, None] + at
        if bool((last >= first + count).any()):
            if windowed:
                raise Unsupported("a window over padding in the middle of a sequence: pad on the left only")
            keys = torch.sort(~seen, dim=1, stable=True).indices
        if not causal and not windowed:
            return _step(shape, rows * num_queries, count, keys, rows[:-1])
        end_query = first_query + num_queries
        if first_query < 0 or end_query > num_keys:
            raise ValueError(f"queries [{first_query}, {end_query}) must stand beside keys, there are {num_keys}")
        if not causal and num_queries != num_keys:
            raise Unsupported(f"a window to both sides over {num_keys} keys needs as many queries, got {num_queries}")
        is_query = seen[:, first_query:end_query]
        starts = _starts(is_query)
        row, last_query = starts[:-1] // num_queries, starts[1:] - 1
        before = seen.cumsum(1)[:, first_query:end_query]
        seq_lens = before.flatten()[last_query] * is_query.flatten()[last_query]
        return _step(shape, starts, seq_lens, keys[row], row)

    @classmethod
    def packed(cls, segments: Tensor) -> DenseStep:
        """A batch row holds sequences one after another, each of which sees only itself. Waits for the device.

        Args:
            segments: [batch_size, num_keys], another number than before where a sequence begins.
        """
        batch_size, num_keys = segments.shape
        starts = _starts(segments)
        lens, row = starts.diff(), starts[:-1] // num_keys
        keys = (starts[:-1] % num_keys)[:, None] + torch.arange(int(lens.max()), device=starts.device)
        return _step((batch_size, num_keys, num_keys), starts, lens, keys, row)

    @classmethod
    def varlen(cls, query_start_loc: Tensor, key_start_loc: Tensor, num_queries: int, num_keys: int) -> DenseStep:
        """The only batch row holds sequences one after another, at known offsets. Waits for the device.

        Args:
            query_start_loc, key_start_loc: [num_seqs + 1] integers, cumulative rows.
            num_queries, num_keys: rows in all; those past the last offset are padding.

        Raises:
            ValueError: the offsets do not fit the rows or each other.
        """
        for name, offsets, end in (
            ("query_start_loc", query_start_loc, num_queries),
            ("key_start_loc", key_start_loc, num_keys),
        ):
            numbers = offsets.tolist()
            if len(numbers) != len(query_start_loc) or numbers[0] or numbers[-1] > end or numbers != sorted(numbers):
                raise ValueError(
                    f"{name} must hold {len(query_start_loc)} offsets from 0 on that never fall and end at or below "
                    f"{end}, got {numbers}"
                )
        lens = key_start_loc.diff()
        keys = key_start_loc[:-1, None] + torch.arange(int(lens.max()) if len(lens) else 0, device=lens.device)
        return _step((1, num_queries, num_keys), query_start_loc, lens, keys, torch.zeros_like(lens))

    def plan(self, planner: Planner, row_stride: int) -> Plan:
        """The step's plan for layers whose batch rows are `row_stride` pages apart.

        Args:
            planner: for pages of one row.
        """
        made_for = (planner, row_stride)
        if made_for not in self.plans:
            table = self.batch.block_table + self.batch_rows[:, None] * row_stride
            self.plans[made_for] = planner.plan(dataclasses.replace(self.batch, block_table=table))
        return self.plans[made_for]


def attend_dense(
    step: DenseStep,
    planner: Planner,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one layer over dense keys.

    Args:
        step: which rows belong together.
        planner: for pages of one row (`dense_planner`), the same for all layers.
        spec: what the layer computes.
        q: [batch_size, num_q_heads, num_queries, head_dim], any strides.
        k, v: [batch_size, num_kv_heads, num_keys, head_dim | value_dim], any strides; read in place if a row is
            contiguous and batch rows lie a whole number of rows apart, copied otherwise.
        sinks: [num_q_heads] float, given iff spec.sinks.

    Returns:
        [batch_size, num_queries, num_q_heads, value_dim] in q's dtype, contiguous; 0 for rows that see no key.

    Raises:
        TypeError, ValueError: an argument does not fit.
        Unsupported: no kernel serves this spec, dtype and device.
    """
    batch_size, num_queries, num_keys = step.shape
    dense = (batch_size, num_keys)
    if (q.shape[::2], k.shape[::2], v.shape[::2]) != ((batch_size, num_queries), dense, dense):
        raise ValueError(
            f"the step is for {batch_size} x {num_queries} queries and {num_keys} keys, "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    cache, row_stride = row_pages(k, v)
    rows = q.transpose(1, 2).reshape(batch_size * num_queries, spec.num_q_heads, spec.head_dim)
    out = q.new_zeros(batch_size * num_queries, spec.num_q_heads, spec.v_dim)
    run(step.plan(planner, row_stride), spec, rows, cache, out, sinks=None if sinks is None else sinks.float())
    return out.view(batch_size, num_queries, spec.num_q_heads, spec.v_dim)


def dense_planner(spec: AttentionSpec, device: torch.device) -> Planner:
    """A planner for `attend_dense`. What a `DenseStep` holds needs no checks."""
    return Planner(
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        value_dim=spec.v_dim,
        block_size=1,
        device=device,
        check=False,
    )


def row_pages(k: Tensor, v: Tensor) -> tuple[LayerCache, int]:
    """Dense keys as pages of one row: key t of batch row b is page b * row_stride + t. Other pages hold nothing of use.

    Args:
        k, v: [batch_size, num_kv_heads, num_keys, head_dim | value_dim].

    Returns:
        The cache, and row_stride. Views, unless the strides of k and v allow none.
    """
    strides = _row_stride(k), _row_stride(v)
    # Kernels of a GPU are compiled for the strides of the cache, and one of heads grows with the keys.
    if strides[0] is None or strides[0] != strides[1] or (k.is_cuda and k.stride(1) > k.stride(2)):
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    row_stride = _row_stride(k)
    assert row_stride is not None
    return LayerCache(_pages(k, row_stride), _pages(v, row_stride)), row_stride


def _pages(x: Tensor, row_stride: int) -> Tensor:
    batch_size, num_heads, num_keys, width = x.shape
    num_pages = (batch_size - 1) * row_stride + num_keys if num_keys and batch_size else 0
    by_row = x.stride(0) if num_keys == 1 else x.stride(2)
    return x.as_strided((num_pages, 1, num_heads, width), (by_row, by_row, x.stride(1), 1))


def _row_stride(x: Tensor) -> int | None:
    """Rows from the first key of a batch row to that of the next; None: no whole number, or rows are not contiguous."""
    batch_size, _, num_keys, width = x.shape
    if width > 1 and x.stride(3) != 1:
        return None
    if batch_size <= 1 or num_keys <= 1:
        return num_keys
    rows, rest = divmod(x.stride(0), x.stride(2)) if x.stride(2) else (0, 1)
    return None if rest else rows


def _starts(marks: Tensor) -> Tensor:
    """[n + 1] int64: where runs of equal marks in the rows of [batch_size, n] begin in the flattened marks, and the end
    of the last."""
    changes = torch.ones_like(marks, dtype=torch.bool)
    changes[:, 1:] = marks[:, 1:] != marks[:, :-1]
    return torch.cat((changes.flatten().nonzero()[:, 0], torch.full((1,), marks.numel(), device=marks.device)))


def _step(
    shape: tuple[int, int, int], query_start_loc: Tensor, seq_lens: Tensor, keys: Tensor, batch_rows: Tensor
) -> DenseStep:
    batch_size, num_queries, num_keys = shape
    batch = AttentionBatch(
        query_start_loc=query_start_loc.int(),
        seq_lens=seq_lens.int(),
        block_table=keys.int(),
        num_tokens=batch_size * num_queries,
        max_query_len=num_queries,
        max_seq_len=num_keys,
    )
    return DenseStep(batch, batch_rows.int(), shape)
