"""Turns logits into tokens.

Transformers' own logits processors, in the order in which `generate` applies them, shape the distribution;
torch.multinomial draws from it. A request with seed s, alone on a CPU, therefore gets the tokens of
`torch.manual_seed(s); model.generate(do_sample=True, ...)`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as hf  # costs nothing on top of transformers itself

from octavo.engine.request import Request, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the sampler says about one request: a token, or why there is none.

    Exactly one of `token_id` and `error` is None. `logprob` is there if the request asked for it and
    there is a token.
    """

    token_id: int | None
    logprob: TokenLogprob | None = None
    error: str | None = None


class _Recipe(NamedTuple):
    """How logits become a distribution. Rows of one recipe are processed together."""

    repetition_penalty: float | None
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None

    @classmethod
    def of(cls, params: SamplingParams) -> _Recipe:
        """The recipe of a request, with the settings that change nothing left out."""
        penalty = None if params.repetition_penalty == 1.0 else params.repetition_penalty
        if params.temperature == 0:
            return cls(penalty, 0.0, None, None, None)
        top_p = None if params.top_p == 1.0 else params.top_p
        return cls(penalty, params.temperature, params.top_k, top_p, params.min_p)

    def apply(self, scores: Tensor, history: Tensor) -> Tensor:
        """Runs Transformers' processors on scores [g, vocab] fp32, given the tokens so far [g, length]."""
        processors: list[hf.LogitsProcessor] = []
        if self.repetition_penalty is not None:
            processors.append(hf.RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.temperature not in (0, 1):
            processors.append(hf.TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            processors.append(hf.TopKLogitsWarper(self.top_k))
        if self.top_p is not None:
            processors.append(hf.TopPLogitsWarper(self.top_p))
        if self.min_p is not None:
            processors.append(hf.MinPLogitsWarper(self.min_p))
        for processor in processors:
            scores = processor(history, scores)
        return scores


_GREEDY = _Recipe(None, 0.0, None, None, None)


class Sampler:
    """Samples the next token of every request, and owns their random generators.

    A request's generator advances once for each token sampled and for nothing else, so its tokens depend
    on its seed and its logits alone: not on the batch around it, and not on a preemption, after which the
    tokens that are already there are recomputed but not sampled again.
    """

    def __init__(self) -> None:
        self._generators: dict[str, torch.Generator] = {}

    def forget(self, request_id: str) -> None:
        """Drops the generator of a request that has ended. Greedy requests have none; that is fine."""
        self._generators.pop(request_id, None)

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """Chooses one token for each request.

        Args:
            logits: [n, vocab], any float dtype; row i belongs to requests[i].
            requests: n requests, all different.

        Returns:
            n results in the same order. A row without a finite maximum (NaN or +inf anywhere, or -inf
            everywhere) gives a result with `error` set; the other rows are not affected. Log-probabilities
            are those of the raw logits (log_softmax in fp32), before penalty, temperature and cuts.

        Raises:
            ValueError: logits is not a matrix with one row a request.
        """
        if logits.dim() != 2 or logits.shape[0] != len(requests):
            raise ValueError(
                f"logits have shape {list(logits.shape)} for {len(requests)} requests; they must be "
                f"[{len(requests)}, vocab]: one row a request"
            )
        # One pass finds the greedy token and the bad rows: max() propagates NaN. Ties go to the first token.
        peaks, tokens = logits.max(dim=-1)
        finite = peaks.isfinite()
        groups: dict[_Recipe, list[int]] = defaultdict(list)
        for row, request in enumerate(requests):
            groups[_Recipe.of(request.params)].append(row)
        groups.pop(_GREEDY, None)
        for recipe, rows in groups.items():
            index = torch.tensor(rows, device=logits.device)
            history = _history(recipe, [requests[row] for row in rows], logits.device)
            scores = recipe.apply(logits[index].float(), history)
            peaks, tokens[index] = scores.max(dim=-1)
            finite[index] = usable = peaks.isfinite()  # again: a tiny temperature overflows
            if recipe.temperature == 0:
                continue
            # multinomial() raises on NaN, on CUDA by an assertion that ends the process: keep it out.
            probs = torch.where(usable[:, None], scores, 0.0).softmax(dim=-1)
            tokens[index] = torch.cat([self._draw(p, requests[row]) for p, row in zip(probs, rows, strict=True)])
        logprobs = _logprobs(logits, tokens, requests)
        return [
            SampledToken(token, logprobs.get(row)) if token >= 0 else _failed(requests[row])
            for row, token in enumerate(torch.where(finite, tokens, -1).tolist())
        ]

    def _draw(self, probs: Tensor, request: Request) -> Tensor:
        """Draws a token, [1] int64, from probs [vocab] fp32 with the request's own generator."""
        generator = self._generators.get(request.request_id)
        if generator is None:
            generator = self._generators[request.request_id] = torch.Generator(probs.device)
            if request.params.seed is None:
                generator.seed()  # a new generator has a fixed seed; this asks the system for another
            else:
                generator.manual_seed(request.params.seed)
        return torch.multinomial(probs, 1, generator=generator)


def _history(recipe: _Recipe, requests: Sequence[Request], device: torch.device) -> Tensor:
    """Prompt and output tokens, [g, longest] int64, for the penalty; [g, 0] if the recipe has none."""
    if recipe.repetition_penalty is None:
        return torch.empty(len(requests), 0, dtype=torch.int64, device=device)
    tokens = [[*request.prompt_token_ids, *request.output_token_ids] for request in requests]
    longest = max(len(row) for row in tokens)
    # A token is penalised once however often it occurs, so repeating the row's first token pads harmlessly.
    return torch.tensor([row + row[:1] * (longest - len(row)) for row in tokens], device=device)


def _logprobs(logits: Tensor, tokens: Tensor, requests: Sequence[Request]) -> dict[int, TokenLogprob]:
    """Log-probabilities of the rows whose request asks for them. logits [n, vocab], tokens [n] int64."""
    wanted = {row: n for row, request in enumerate(requests) if (n := request.params.logprobs) is not None}
    if not wanted:
        return {}
    index = torch.tensor(list(wanted), device=logits.device)
    logp = logits[index].float().log_softmax(dim=-1)
    chosen = logp.gather(1, tokens[index, None])
    best = logp.topk(min(max(wanted.values()), logits.shape[1]), dim=-1)
    columns = (tokens[index], chosen[:, 0], best.indices, best.values)
    facts = zip(*(column.tolist() for column in columns), strict=True)
    return {
        row: TokenLogprob(token, value, tuple(zip(ids[:n], values[:n], strict=True)))
        for (row, n), (token, value, ids, values) in zip(wanted.items(), facts, strict=True)
    }


def _failed(request: Request) -> SampledToken:
    reason = (
        f"request {request.request_id}: the distribution of the next token is not finite. Either the model "
        "produced NaN or infinity (damaged weights, or a dtype whose range is too small: try float32), or "
        f"temperature={request.params.temperature} is so small that it overflows (0 means greedy)"
    )
    return SampledToken(None, error=reason)
