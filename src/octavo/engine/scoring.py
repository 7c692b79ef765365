"""A text as windows of tokens, run through the engine without sampling: what calibration and evaluation share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources

import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from octavo.calibration import Recorder
from octavo.engine.runner import ModelRunner
from octavo.scales import KVScales

CHUNK = 128
"""Tokens of a step: what stands before them is read from the pages, as in serving."""

SHIPPED_TEXT = "alice.txt"
"""Three chapters that lie in the package; engine/texts/README.md says what they are."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A text cut into sequences that know nothing of each other.

    Args:
        sequences: each at most `context` tokens, the tokenizer's opening tokens included.
        context: longest length.
    """

    sequences: tuple[tuple[int, ...], ...]
    context: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))


def shipped_text() -> str:
    """The text that is read where none is given."""
    return resources.files("octavo.engine").joinpath("texts", SHIPPED_TEXT).read_text("utf-8")


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    """(opening, tokens): what the tokenizer puts before every text, and the text's own tokens."""
    opening: list[int] = tokenizer("")["input_ids"]
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return opening, tokens


def cut(opening: Sequence[int], tokens: Sequence[int], context: int) -> Windows:
    """Windows of `context` tokens, each with the opening tokens first; a rest of fewer than two tokens is left out.

    Raises:
        ValueError: the text is too short to score a single token, or the context too short for one.
    """
    room = context - len(opening)
    if room < 2:
        raise ValueError(f"a context of {context} tokens has no room for two after {len(opening)} that open a text")
    pieces = [tokens[i : i + room] for i in range(0, len(tokens), room)]
    sequences = tuple((*opening, *piece) for piece in pieces if len(piece) > 1)
    if not sequences:
        raise ValueError(f"the text has {len(tokens)} tokens, too few: at least 2 are needed")
    return Windows(sequences, context)


def make_runner(
    model: PreTrainedModel, kv_format: str, context: int, kv_scales: KVScales | None = None, block_size: int = 16
) -> ModelRunner:
    """A runner with room for one sequence of `context` tokens; the model serves it until another one is activated."""
    return ModelRunner(
        model,
        kv_format=kv_format,
        kv_scales=kv_scales,
        block_size=block_size,
        num_blocks=-(-context // block_size),
        kv_cache_bytes=None,
        max_num_seqs=1,
        max_model_len=context,
        use_graphs=False,
    )


def chunks(windows: Windows, chunk: int = CHUNK) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(sequence, start, stop) of every step."""
    for sequence in windows.sequences:
        for start in range(0, len(sequence), chunk):
            yield sequence, start, min(start + chunk, len(sequence))


def record(
    model: PreTrainedModel, windows: Windows, progress: Callable[[int], None] = lambda _: None
) -> tuple[Recorder, ModelRunner]:
    """Run the windows with pages of the model's dtype, and count the K and V of every layer.

    Under torch.distributed each rank runs its share of the windows, and every rank gets the counts of all.

    Args:
        progress: called with the number of tokens that a step has computed.
    """
    runner = make_runner(model, "auto", windows.context)
    recorder = Recorder(runner.kv_model.layers, model.device)
    for i, layer in enumerate(runner.layers.values()):
        layer.observer = partial(recorder.observe, i)
    if dist.is_available() and dist.is_initialized():
        windows = replace(windows, sequences=windows.sequences[dist.get_rank() :: dist.get_world_size()])
    try:
        for sequence, start, stop in chunks(windows):
            runner.logits(sequence[start:stop], start)
            progress(stop - start)
    finally:
        for layer in runner.layers.values():
            layer.observer = None
    recorder.all_reduce()
    return recorder, runner
