"""What a cache format changes in a model's predictions: perplexity, KL divergence and top-1 agreement.

Teacher-forced, by the path that serves: every format stores the keys and values of each chunk in pages of its own
and attends to what the pages hold. All formats run a chunk before the next one, so that the reference's
probabilities need not be kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from octavo.engine.attention import PagedLayer
from octavo.engine.runner import ModelRunner
from octavo.engine.scoring import Windows, chunks, make_runner
from octavo.scales import KVScales


@dataclass(frozen=True, slots=True)
class FormatScore:
    """One format's row.

    Args:
        kv_format: its name.
        scales: where static scales come from, in words; None: it has none.
        bytes_per_token: of the cache, all layers.
        pages_per_gib: pages of all layers that 2^30 bytes hold.
        perplexity: exp of the mean negative log-likelihood, in nats, of the tokens that have one before them.
        perplexity_change: against the reference, as a fraction.
        mean_kl, max_kl: of KL(reference || format) over the same positions, in nats.
        top1_agreement: share of positions at which the likeliest token is the reference's.
        num_scored: positions.
        longest_context: tokens of the longest sequence.
    """

    kv_format: str
    scales: str | None
    bytes_per_token: float
    pages_per_gib: int
    perplexity: float
    perplexity_change: float
    mean_kl: float
    max_kl: float
    top1_agreement: float
    num_scored: int
    longest_context: int


@dataclass(slots=True)
class _Sums:
    nll: float = 0.0
    kl: float = 0.0
    max_kl: float = 0.0
    agreed: int = 0
    scored: int = 0

    def add(self, reference: Tensor, scored: Tensor, targets: Tensor) -> None:
        """Positions with log-probabilities [n, vocab_size] float64 of both and the tokens [n] that came."""
        kl = _kl(reference, scored)
        self.nll -= float(scored.gather(1, targets[:, None]).sum())
        self.kl += float(kl.sum())
        self.max_kl = max(self.max_kl, float(kl.max()))
        self.agreed += int((reference.argmax(1) == scored.argmax(1)).sum())
        self.scored += len(targets)


def evaluate(
    model: PreTrainedModel,
    windows: Windows,
    kv_formats: Sequence[str],
    *,
    scales: Mapping[str, KVScales],
    origins: Mapping[str, str],
    block_size: int = 16,
    progress: Callable[[int], None] = lambda _: None,
) -> list[FormatScore]:
    """Score the formats against pages in the model's own dtype, which come first.

    Args:
        model: its attention is replaced.
        windows: the text.
        kv_formats: names.
        scales: by format, where there are any.
        origins: by format, where its scales come from, in words.
        block_size: tokens of a page.
        progress: called with the number of tokens that a step has computed.

    Raises:
        ModelError, Unsupported, ValueError: as `ModelRunner`.
    """
    names = [str(model.dtype).removeprefix("torch."), *kv_formats]
    runners = [make_runner(model, name, windows.context, scales.get(name), block_size) for name in names]
    sums = _run_beside(runners, windows, progress)
    first = sums[0].nll / sums[0].scored
    return [
        FormatScore(
            kv_format=name,
            scales=origins.get(name),
            bytes_per_token=runner.bytes_per_token,
            pages_per_gib=runner.pages_per_gib,
            perplexity=math.exp(total.nll / total.scored),
            perplexity_change=math.expm1(total.nll / total.scored - first),
            mean_kl=total.kl / total.scored,
            max_kl=total.max_kl,
            top1_agreement=total.agreed / total.scored,
            num_scored=total.scored,
            longest_context=max(map(len, windows.sequences)),
        )
        for name, runner, total in zip(names, runners, sums, strict=True)
    ]


def evaluate_layers(
    model: PreTrainedModel, windows: Windows, kv_format: str, *, scales: KVScales | None, block_size: int = 16
) -> list[float]:
    """Mean KL(reference || model with one layer's pages in `kv_format`), in nats, layer by layer.

    Costs two runs of the text for each layer.
    """
    reference, mixed, quantised = (
        make_runner(model, name, windows.context, given, block_size)
        for name, given in (("auto", None), ("auto", None), (kv_format, scales))
    )
    plain = mixed.layers
    result = []
    for module, layer in plain.items():
        other = quantised.layers[module]
        mixed.layers = {**plain, module: PagedLayer(other.impl, other.cache, layer.step)}
        _, total = _run_beside([reference, mixed], windows, lambda _: None)
        result.append(total.kl / total.scored)
    return result


def _run_beside(runners: Sequence[ModelRunner], windows: Windows, progress: Callable[[int], None]) -> list[_Sums]:
    """Run the text under each runner, chunk by chunk, and compare all with the first one."""
    sums = [_Sums() for _ in runners]
    for sequence, start, stop in chunks(windows):
        targets = torch.tensor(sequence[start + 1 : stop + 1], device=runners[0].model.device)
        reference = None
        for runner, total in zip(runners, sums, strict=True):
            runner.activate()
            logits = runner.logits(sequence[start:stop], start)[: len(targets)]
            if len(targets):
                scored = logits.double().log_softmax(-1)
                reference = scored if reference is None else reference
                total.add(reference, scored, targets)
            progress(stop - start)
    return sums


def _kl(reference: Tensor, scored: Tensor) -> Tensor:
    """KL(reference || scored) [n] of log-probabilities [n, vocab_size]; a token that is impossible adds nothing."""
    terms = reference.exp() * (reference - scored)
    return terms.masked_fill(reference == -torch.inf, 0.0).sum(1)
