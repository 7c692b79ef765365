"""What is computed: the attention of one layer, the one definition of its mask, and a rank's share of keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor

Positions = TypeVar("Positions", int, Tensor)


@dataclass(frozen=True, slots=True)
class KVShard:
    """The keys that one rank of decode context parallelism holds.

    Tokens are dealt to ranks in runs of `interleave`: token t lives on rank `(t // interleave) % dcp_world`.
    Local indices keep the order of global positions, so an interval of positions is an interval of local
    indices on every rank.

    Args:
        dcp_world: number of ranks, at least 1.
        dcp_rank: this rank, 0 <= dcp_rank < dcp_world.
        interleave: length of a run in tokens, at least 1.

    Raises:
        ValueError: a value is out of range.
    """

    dcp_world: int = 1
    dcp_rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        if self.dcp_world < 1 or self.interleave < 1:
            raise ValueError(f"dcp_world and interleave must be at least 1, got {self.dcp_world} and {self.interleave}")
        if not 0 <= self.dcp_rank < self.dcp_world:
            raise ValueError(f"dcp_rank must lie in [0, {self.dcp_world}), got {self.dcp_rank}")

    @property
    def is_part(self) -> bool:
        """Whether other ranks hold keys too."""
        return self.dcp_world > 1

    @property
    def _cycle(self) -> int:
        return self.dcp_world * self.interleave

    def local_count(self, x: Positions) -> Positions:
        """How many of the first `x` positions live on this rank; `x` an int or an integer tensor, >= 0."""
        if not self.is_part:
            return x
        rest = x % self._cycle - self.dcp_rank * self.interleave
        if isinstance(rest, Tensor):
            return x // self._cycle * self.interleave + rest.clamp(0, self.interleave)
        return x // self._cycle * self.interleave + min(max(rest, 0), self.interleave)

    def global_position(self, j: Positions) -> Positions:
        """The position of local key `j`; the inverse of `local_count` on this rank's own tokens."""
        run = j // self.interleave
        return run * self._cycle + self.dcp_rank * self.interleave + j % self.interleave

    def max_local_count(self, max_len: int) -> int:
        """An upper bound of `local_count` for every length up to `max_len`, on every rank."""
        return -(-max_len // self._cycle) * self.interleave


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer: shapes, score transforms and the mask. Facts only, no tensors.

    With `p` the global position of a query and `j` that of a key, in fp32:

        s = softmax_scale * (q . k_j)
        s = cap * tanh(s / cap)                 if logits_soft_cap
        s = s + slope * (j - p)                 alibi "linear" (not causal: -slope * |p - j|)
        s = s - slope * sqrt(|p - j|)           alibi "sqrt"

    and key j is visible iff `lo <= j < hi` with `(lo, hi) = bounds(p, seq_len)`.

    Args:
        num_q_heads: query heads, a multiple of num_kv_heads; query head h reads KV head h // group_size.
        num_kv_heads: KV heads.
        head_dim: width of q and k, a multiple of 8.
        value_dim: width of v and of the output, a multiple of 8; None: head_dim.
        softmax_scale: factor of q . k; None: head_dim ** -0.5.
        causal: key j needs j <= p.
        window_left: keys before the query that it may see, itself not counted; None: all.
        window_right: keys after the query that it may see (needs causal=False to matter); None: all.
        logits_soft_cap: bound of the scores; None: off.
        alibi: which position bias the layer adds; the slopes are given to `run`.
        sinks: the softmax has one more logit per query head, without a value; given to `run`.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    softmax_scale: float | None = None
    causal: bool = True
    window_left: int | None = None
    window_right: int | None = None
    logits_soft_cap: float | None = None
    alibi: Literal["linear", "sqrt"] | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_q_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads must be a positive multiple of num_kv_heads, "
                f"got {self.num_q_heads} and {self.num_kv_heads}"
            )
        for name, width in (("head_dim", self.head_dim), ("value_dim", self.v_dim)):
            if width < 8 or width % 8:
                raise ValueError(f"{name} must be a positive multiple of 8, got {width}")
        for name, radius in (("window_left", self.window_left), ("window_right", self.window_right)):
            if radius is not None and radius < 0:
                raise ValueError(f"{name} must be None (open) or at least 0, got {radius}")
        cap = self.logits_soft_cap
        if cap is not None and not 0 < cap < math.inf:
            raise ValueError(f"logits_soft_cap must be None (off) or above 0 and finite, got {cap}")
        if not math.isfinite(self.scale):
            raise ValueError(f"softmax_scale must be None (head_dim ** -0.5) or finite, got {self.softmax_scale}")
        if self.alibi not in (None, "linear", "sqrt"):
            raise ValueError(f"alibi must be None, 'linear' or 'sqrt', got {self.alibi!r}")

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def v_dim(self) -> int:
        """Width of v and of the output."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def scale(self) -> float:
        """The factor of q . k."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    def bounds(self, positions: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        """The mask: row i sees exactly the keys at global positions [lo_i, hi_i).

        This is the only place that defines visibility. A launch, a split or a shard narrows the
        interval; nothing else decides which keys a query sees.

        Args:
            positions: global positions of the query rows, any integer shape; may be negative.
            seq_lens: number of keys of each row's sequence, same shape.

        Returns:
            lo, hi: integer tensors with 0 <= lo <= hi <= seq_lens; lo == hi for rows that see nothing.
        """
        hi = seq_lens
        if self.causal:
            hi = hi.minimum(positions + 1)
        if self.window_right is not None:
            hi = hi.minimum(positions + (self.window_right + 1))
        hi = hi.clamp(min=0)
        if self.window_left is None:
            return hi.new_zeros(()).expand_as(hi), hi
        return (positions - self.window_left).clamp(min=0).minimum(hi), hi
