"""What generation gives back."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.request import FinishReason, TokenLogprob
from octavo.engine.scheduler import Step


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one prompt.

    Args:
        text: generated text, without special tokens and without the stop string.
        token_ids: generated tokens, the one that ended the text included.
        finish_reason: "stop" (end-of-text or stop token, stop string), "length", "error" or "aborted".
        prompt_token_ids: the prompt as the model saw it.
        num_cached_tokens: prompt tokens whose K and V were found in the prefix cache.
        logprobs: one entry per token, if asked for.
        time_to_first_token: seconds from the call to the first token; None: there was none.
        error: why there is no (more) text, if finish_reason is "error".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...] = ()
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    time_to_first_token: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one prompt: text that is certain now, and at the end the result.

    Args:
        index: which prompt of the call.
        text: new text, may be empty.
        token_ids: new tokens.
        result: set with the prompt's last delta.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    result: Result | None = None


@dataclass(slots=True)
class Stats:
    """Counts since the engine was made."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # computed ones; those found in the prefix cache are not
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    peak_blocks: int = 0

    def count(self, step: Step, num_sampled: int, num_blocks: int) -> None:
        """Count a step that ran: its prompt tokens, the tokens sampled from it, the blocks in use."""
        self.num_steps += 1
        for chunk in step.scheduled:
            length = chunk.request.num_prompt_tokens
            self.num_prompt_tokens += min(chunk.stop, length) - min(chunk.start, length)
        self.num_generated_tokens += num_sampled
        self.peak_blocks = max(self.peak_blocks, num_blocks)
