"""What the Triton kernels share: the mask's bounds, score transforms."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def local_count(x, WORLD: tl.constexpr, rank, INTERLEAVE: tl.constexpr):
    """How many of the first x >= 0 positions live on this rank; see `KVShard.local_count`."""
    if WORLD == 1:
        return x
    else:
        rest = x % (WORLD * INTERLEAVE) - rank * INTERLEAVE
        return x // (WORLD * INTERLEAVE) * INTERLEAVE + tl.minimum(tl.maximum(rest, 0), INTERLEAVE)


@triton.jit
def global_position(j, WORLD: tl.constexpr, rank, INTERLEAVE: tl.constexpr):
    """The position of local key j; see `KVShard.global_position`."""
    if WORLD == 1:
        return j
    else:
        return j // INTERLEAVE * (WORLD * INTERLEAVE) + rank * INTERLEAVE + j % INTERLEAVE


@triton.jit
def mask_bounds(pos, seq_len, window_left, window_right, CAUSAL: tl.constexpr):
    """The interval of global positions that a query at `pos` sees; see `AttentionSpec.bounds`."""
    hi = seq_len
    if CAUSAL:
        hi = tl.minimum(hi, pos + 1)
    if window_right is not None:
        hi = tl.minimum(hi, pos + (window_right + 1))
    hi = tl.maximum(hi, 0)
    if window_left is None:
        lo = tl.zeros_like(hi)
    else:
        lo = tl.minimum(tl.maximum(pos - window_left, 0), hi)
    return lo, hi


@triton.jit
def tanh(x):
    """tanh of a float32 tile that neither overflows nor loses the small values to cancellation."""
    square = x * x
    # The series is good to 1e-8 below 0.25; above it, 1 - exp(-2|x|) keeps its digits.
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    value = (1 - e) / (1 + e)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -value, value))


@triton.jit
def transform_scores(
    scores,  # [BLOCK_M, BLOCK_KV] float32, q . k
    pre_scale,
    soft_cap,
    slopes,  # [BLOCK_M] float32 or None
    pos,  # [BLOCK_M] int32
    key_pos,  # [BLOCK_KV] int32, global
    SQRT_ALIBI: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Scores in units of the kernel's exponent factor (see `attend.exponent_units`); absent steps are None."""
    if pre_scale is not None:
        scores = scores * pre_scale
    if soft_cap is not None:
        scores = tanh(scores)
        if slopes is not None:
            scores = scores * soft_cap
    if slopes is not None:
        distance = (key_pos[None, :] - pos[:, None]).to(tl.float32)
        if SQRT_ALIBI:
            distance = -tl.sqrt(tl.abs(distance))
        elif not CAUSAL:
            distance = -tl.abs(distance)
        scores = tl.fma(slopes[:, None], distance, scores)
    return scores


@triton.jit
def finite_peak(lse):
    """A peak to subtract: 0 where there is none, because (-inf) - (-inf) is NaN."""
    return tl.where(lse == float("-inf"), 0.0, lse)
