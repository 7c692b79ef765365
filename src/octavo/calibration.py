"""Statistics of K and V that a model's forward makes, from which static scales follow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.formats import KVFormat
from octavo.quantise import INT8_MAX
from octavo.scales import KVModel, KVScales, LayerShape, Provenance

_BINS_PER_OCTAVE = 16
"""A percentile is known to 2^(1/16), 4 %."""

_LOWEST, _HIGHEST = -14, 10
"""Powers of two between which magnitudes are told apart."""

_NUM_BINS = (_HIGHEST - _LOWEST) * _BINS_PER_OCTAVE

FP8_HEADROOM = 2.0
"""fp8 scales put the largest number seen at half of the largest that can be stored: a step of the exponent costs no
precision but for the smallest numbers, saturating does."""


class Recorder:
    """What one process has seen of K and V: absmax, K's mean and V's magnitudes per channel.

    Counts add and maxima combine, so that the recorders of several ranks merge to what one would have seen.

    Args:
        layers: the attention layers, in the model's order.
        device: where K and V are.
    """

    def __init__(self, layers: Sequence[LayerShape], device: torch.device | str = "cpu") -> None:
        self.layers = tuple(layers)
        zeros = partial(torch.zeros, device=device)
        self.num_tokens = torch.zeros((), dtype=torch.int64, device=device)
        """Rows of each layer seen so far, [] int64."""
        self.k_absmax = [zeros(layer.num_kv_heads, layer.head_dim) for layer in self.layers]
        """Per layer [num_kv_heads, head_dim] float32."""
        self.v_absmax = [zeros(layer.num_kv_heads, layer.value_dim) for layer in self.layers]
        """Per layer [num_kv_heads, value_dim] float32."""
        self._k_sums = [zeros(layer.num_kv_heads, layer.head_dim, dtype=torch.float64) for layer in self.layers]
        self._v_counts = [
            zeros(layer.num_kv_heads, layer.value_dim, _NUM_BINS, dtype=torch.int64) for layer in self.layers
        ]

    @torch.no_grad()
    def observe(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Count the rows that a layer stores.

        Args:
            layer: its index.
            k, v: [num_tokens, num_kv_heads, head_dim | value_dim], any float dtype.
        """
        if not k.shape[0]:
            return
        self._k_sums[layer] += k.double().sum(0)
        k, v = k.float().abs(), v.float().abs()
        # torch.maximum keeps NaN, so that it is found at the end
        self.k_absmax[layer] = torch.maximum(self.k_absmax[layer], k.amax(0))
        self.v_absmax[layer] = torch.maximum(self.v_absmax[layer], v.amax(0))
        bins = ((v.log2() - _LOWEST) * _BINS_PER_OCTAVE).floor().nan_to_num(0.0).clamp(0, _NUM_BINS - 1).long()
        counts = self._v_counts[layer]
        first = torch.arange(0, counts.numel(), _NUM_BINS, device=v.device).view(counts.shape[:2])
        flat = (bins + first).flatten()
        counts.view(-1).index_add_(0, flat, torch.ones_like(flat))
        if layer == 0:
            self.num_tokens += k.shape[0]

    def merge(self, other: Recorder) -> None:
        """Add what another recorder of the same model has seen."""
        if other.layers != self.layers:
            raise ValueError(f"recorders of different layers cannot merge: {self.layers} and {other.layers}")
        self.num_tokens += other.num_tokens
        for mine, theirs in ((self.k_absmax, other.k_absmax), (self.v_absmax, other.v_absmax)):
            for i, absmax in enumerate(theirs):
                mine[i] = torch.maximum(mine[i], absmax)
        for counts, more in zip(self._v_counts, other._v_counts, strict=True):
            counts.add_(more)
        for sums, more in zip(self._k_sums, other._k_sums, strict=True):
            sums.add_(more)

    def all_reduce(self) -> None:
        """Merge over the ranks of torch.distributed, each of which has seen other tokens; alone: nothing to do."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        for counts in (self.num_tokens, *self._v_counts, *self._k_sums):
            dist.all_reduce(counts, dist.ReduceOp.SUM)
        for absmax in (*self.k_absmax, *self.v_absmax):
            dist.all_reduce(absmax, dist.ReduceOp.MAX)

    def v_percentile(self, layer: int, percentile: float) -> Tensor:
        """The magnitude of V that `percentile` percent of a channel's numbers do not pass: [num_kv_heads, value_dim]
        float32. 100: the largest, exactly; else at most 4 % too high."""
        absmax, counts = self.v_absmax[layer], self._v_counts[layer]
        if percentile == 100:
            return absmax
        needed = (self.num_tokens.double() * (percentile / 100)).ceil()
        upper = (counts.cumsum(-1) < needed).sum(-1).add(1)
        return torch.minimum(absmax, torch.exp2(upper / _BINS_PER_OCTAVE + _LOWEST))

    def k_mean(self, layer: int) -> Tensor:
        """Mean of K: [num_kv_heads, head_dim] float32."""
        return (self._k_sums[layer] / self.num_tokens).float()

    def scales(self, format: KVFormat, model: KVModel, provenance: Provenance, *, smooth_k: bool = False) -> KVScales:
        """The static scales for `format`.

        int8_kv: V's percentile over 127, per channel. fp8: per KV head, absmax of K and percentile of V with
        FP8_HEADROOM below the format's largest number. A channel that was always zero gets scale 0 (int8) and an
        fp8 head scale 1.

        Args:
            format: what they are for.
            model, provenance: kept with them.
            smooth_k: the int8 formats store K less its mean.

        Raises:
            ValueError: the format has no static scales, no token was seen, or K or V held NaN or infinities.
        """
        percentile = provenance.percentile
        if not 50 <= percentile <= 100:
            raise ValueError(f"percentile is {percentile}; it must lie in [50, 100]")
        if smooth_k and not format.k_scaled_by_row:
            raise ValueError(f"smooth_k is for the int8 formats; {format.name} does not scale K by row")
        if not (format.is_fp8 or format.v_scaled_by_channel or smooth_k):
            raise ValueError(f"{format.name} has no static scales; int8_kv, fp8_e4m3 and fp8_e5m2 have")
        if not int(self.num_tokens):
            raise ValueError("no token was seen, so that there are no statistics")
        for i in range(len(self.layers)):
            for name, absmax in (("K", self.k_absmax[i]), ("V", self.v_absmax[i])):
                if not bool(absmax.isfinite().all()):
                    raise ValueError(f"{name} of attention layer {i} held NaN or infinities; use another dtype or text")
        v = [self.v_percentile(i, percentile) for i in range(len(self.layers))]
        if not format.is_fp8:
            by_channel = tuple(x / INT8_MAX for x in v) if format.v_scaled_by_channel else None
            k_offset = tuple(self.k_mean(i) for i in range(len(self.layers))) if smooth_k else None
            return KVScales(format.name, None, by_channel, k_offset, model, provenance)
        most = torch.finfo(format.k_dtype).max / FP8_HEADROOM
        k_heads, v_heads = ([_or_one(x.amax(-1) / most) for x in each] for each in (self.k_absmax, v))
        return KVScales(format.name, tuple(k_heads), tuple(v_heads), None, model, provenance)


def _or_one(scale: Tensor) -> Tensor:
    return scale.masked_fill(scale == 0, 1.0)
