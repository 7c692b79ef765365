"""A request and its progress: what was asked, what has been computed, what came out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "error", "aborted"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. None switches an option off.

    Raises ValueError, with the value and the rule, on construction.
    """

    max_tokens: int = 128  # output tokens at most
    temperature: float = 0.0  # 0 is greedy
    top_k: int | None = None  # keep the k likeliest tokens
    top_p: float | None = None  # keep the fewest likeliest tokens whose probabilities reach p
    min_p: float | None = None  # keep tokens at least this fraction as likely as the likeliest
    repetition_penalty: float | None = None  # > 1 makes tokens that already stand in the text less likely
    seed: int | None = None  # of this request's own random stream
    stop: Sequence[str] = ()  # one string or several; kept as a tuple
    stop_token_ids: Sequence[int] = ()  # kept as a tuple
    ignore_eos: bool = False
    logprobs: int | None = None  # 0: of the chosen token only; n: of the n likeliest as well

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        # The class is frozen for its users; this is the place where the two sequences take their one form.
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_int("max_tokens", self.max_tokens, low=1)
        temperature = self.temperature
        _check("temperature", temperature, _is_real(temperature) and temperature >= 0, "a finite number >= 0")
        if self.top_k is not None:
            _check_int("top_k", self.top_k, low=1)
        if self.top_p is not None:
            _check("top_p", self.top_p, _is_real(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]")
        if self.min_p is not None:
            _check("min_p", self.min_p, _is_real(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]")
        if self.repetition_penalty is not None:
            penalty = self.repetition_penalty
            _check("repetition_penalty", penalty, _is_real(penalty) and penalty > 0, "a finite number > 0")
        if self.seed is not None:
            # The range that every torch generator accepts.
            _check_int("seed", self.seed, low=0, high=2**63 - 1)
        for text in stop:
            _check("stop", text, isinstance(text, str) and text != "", "made of non-empty strings")
        for token_id in self.stop_token_ids:
            _check_int("each of stop_token_ids", token_id, low=0)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, low=0)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one chosen token, and the likeliest (token_id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Request:
    """One request. The scheduler moves its progress; the caller appends sampled tokens to output_token_ids.

    Two requests are equal only if they are the same object.
    """

    request_id: str
    prompt_token_ids: Sequence[int]  # kept as a tuple
    params: SamplingParams = field(default_factory=SamplingParams)

    output_token_ids: list[int] = field(default_factory=list, init=False)
    logprobs: list[TokenLogprob] = field(default_factory=list, init=False)  # filled if params.logprobs is set
    num_computed_tokens: int = field(default=0, init=False)  # leading tokens whose K and V are in the cache
    block_ids: list[int] = field(default_factory=list, init=False)  # block i holds positions from i * block_size
    num_cached_tokens: int = field(default=0, init=False)  # prefix-cache hit at the first admission
    num_preemptions: int = field(default=0, init=False)
    arrival: int | None = field(default=None, init=False)  # rank in order of arrival, given by the scheduler
    token_limit: int = field(init=False)  # prompt + output tokens at most; the scheduler may lower it
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)  # the message, where finish_reason is "error"

    def __post_init__(self) -> None:
        self.prompt_token_ids = tuple(self.prompt_token_ids)
        self.token_limit = len(self.prompt_token_ids) + self.params.max_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_at_limit(self) -> bool:
        """No token may follow: the caller finishes the request with "length"."""
        return self.num_tokens >= self.token_limit

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def token_ids(self) -> list[int]:
        """All tokens as a new list. A step that needs only its own tokens asks `tokens` for the slice."""
        return [*self.prompt_token_ids, *self.output_token_ids]

    def tokens(self, start: int, stop: int) -> list[int]:
        """The tokens at positions [start, stop), as a new list; costs stop - start, not the whole length."""
        split = len(self.prompt_token_ids)
        outputs = self.output_token_ids[max(0, start - split) : max(0, stop - split)]
        return [*self.prompt_token_ids[start:stop], *outputs]


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; it must be {rule}")


def _check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    rule = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    _check(name, value, is_int and low <= value and (high is None or value <= high), rule)  # type: ignore[operator]
