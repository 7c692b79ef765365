"""Turns the tokens of one request into text, piece by piece, and finds stop strings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from octavo.engine.request import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Detokenizer:
    """Incremental detokenisation of one request.

    What `push` and `finish` return, joined, is the tokenizer's decode of all tokens, cut before the stop
    string that is complete first (of two that end at the same character, the longer). Text that was
    returned is never taken back: a character whose bytes are incomplete, and a tail that may become a stop
    string, wait until it is known what they are.

    One exception: SentencePiece's byte fallback decodes a whole run of byte tokens to U+FFFD when one byte of
    it is invalid, even characters that were complete, and shown, before it. Those stay as they were shown.

    Args:
        tokenizer: a tokenizer on top of the `tokenizers` library.
        params: `stop` is read, no other field.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        TypeError: the tokenizer is not a fast one.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, params: SamplingParams, skip_special_tokens: bool = True
    ) -> None:
        if not tokenizer.is_fast:
            raise TypeError(
                f"{type(tokenizer).__name__} is a slow tokenizer; streaming text needs one on top of the "
                "tokenizers library: load it with AutoTokenizer, or save it as tokenizer.json first"
            )
        self.text = ""
        """All text returned so far."""
        self.stopped = False
        """True once a stop string is complete; `text` ends before it."""
        self._backend = tokenizer.backend_tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._new_stream = partial(DecodeStream, skip_special_tokens=skip_special_tokens)
        self._stream = self._new_stream()
        self._undecoded: list[int] = []  # tokens since the stream last gave text
        self._stops = params.stop
        self._held = ""  # text not returned yet: it may begin a stop string

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text, often "", that is now certain. Once stopped: ""."""
        if self.stopped:
            return ""
        self._undecoded.append(token_id)
        try:
            chunk = self._stream.step(self._backend, token_id)
        except Exception:  # the library raises no narrower class
            # The byte-fallback case of the class docstring: the stream can't go on, now or at any later
            # token. A new one begins after the text that it gave.
            self._stream = self._new_stream()
            chunk = self._stream.step(self._backend, self._undecoded)
        if chunk is None:
            return ""
        self._undecoded.clear()
        return self._release(chunk, last=False)

    def finish(self) -> str:
        """Returns what was held back. Incomplete characters become U+FFFD, as in the tokenizer's decode."""
        if self.stopped:
            return ""
        rest = self._backend.decode(self._undecoded, skip_special_tokens=self._skip_special_tokens)
        self._undecoded.clear()
        return self._release(rest, last=True)

    def _release(self, chunk: str, last: bool) -> str:
        """Adds decoded text and returns the part of it that no stop string can claim any more."""
        self._held += chunk
        # By the end first: what is found must not depend on how the text is cut into tokens.
        found = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            keep = min(found)[1]
        elif last:
            keep = len(self._held)
        else:
            keep = len(self._held) - max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[:keep], self._held[keep:]
        self.text += shown
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning, but not all, of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
