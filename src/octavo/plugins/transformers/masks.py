"""Transformers' masks, read instead of drawn.

Transformers describes a mask by a function of a query and a key that is put together from a few functions of its own.
They are known by name, and a mask that holds any other is refused. What was found travels to the layers on an empty
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from octavo.dense import DenseStep
from octavo.errors import Unsupported

_STEP = "octavo_step"
_MODULE = "transformers.masking_utils"

whole = lru_cache(maxsize=8)(DenseStep.whole)
"""Steps without padding are alike if their sizes are: a later forward finds its plans made."""


@dataclass(frozen=True, slots=True)
class MaskedStep:
    """What a mask says: which rows belong together, and what a row sees of its sequence.

    Args:
        step: the rows.
        causal, window: the mask of a sequence; window is (window_left, window_right).
        plain: every row counts, and each batch row is one sequence.
    """

    step: DenseStep
    causal: bool
    window: tuple[int | None, int | None]
    plain: bool


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_how_to_draw: Any,
) -> Tensor:
    """What Transformers calls for a mask, once a step for all layers that mask alike.

    Args:
        q_offset, kv_offset: positions of the first query and the first key.
        mask_function: what a query sees, padding left out.
        attention_mask: [batch_size, tokens] bool, False for padding; positions past it are padding too.

    Returns:
        [batch_size, 1, 0, kv_length] bool, as Transformers hands on what has four dimensions; `masked_step` finds the
        rest.

    Raises:
        Unsupported: the mask is none that Octavo knows.
    """
    pattern = _read(mask_function, kv_offset + kv_length)
    first = int(q_offset) - kv_offset
    end = first + q_length if pattern.causal else kv_length
    seen = None if attention_mask is None else _of_keys(attention_mask, kv_offset, kv_length)
    plain = pattern.segments is None
    if pattern.segments is not None:
        step = DenseStep.packed(pattern.segments.expand(batch_size, q_length))
    elif seen is None or bool(seen[:, :end].all()):
        step = whole(batch_size, q_length, kv_length, device=torch.device(device), end=end)
    else:
        windowed = pattern.window != (None, None)
        step, plain = DenseStep.padded(seen, q_length, first, causal=pattern.causal, windowed=windowed), False
    empty = torch.empty(batch_size, 1, 0, kv_length, dtype=torch.bool, device=device)
    setattr(empty, _STEP, MaskedStep(step, pattern.causal, pattern.window, plain))
    return empty


def masked_step(attention_mask: Tensor) -> MaskedStep:
    """What `mask` found.

    Raises:
        Unsupported: the mask was drawn by someone else.
    """
    found: MaskedStep | None = getattr(attention_mask, _STEP, None)
    if found is None:
        raise Unsupported(
            f"it has a mask of its own, {tuple(attention_mask.shape)}: give a padding mask [batch, tokens]"
        )
    return found


@dataclass(slots=True)
class _Pattern:
    """A mask without padding; segments [batch, tokens] are numbers of sequences that share a batch row."""

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    segments: Tensor | None = None


def _read(mask_function: Callable[..., Any], num_positions: int) -> _Pattern:
    pattern = _Pattern()
    for name, facts in _parts(mask_function):
        match name:
            case "causal_mask_function":
                pattern.causal = True
            case "bidirectional_mask_function":
                pass
            case "sliding_window_overlay":
                pattern.window = (facts["sliding_window"] - 1, 0)
            case "sliding_window_bidirectional_overlay":
                pattern.window = (facts["sliding_window"], facts["sliding_window"])
            case "packed_sequence_mask_function":
                pattern.segments = facts["packed_sequence_mask"]
            case "chunked_overlay" if num_positions <= facts["chunk_size"]:
                pass  # one chunk
            case _:
                raise Unsupported(
                    f"Octavo knows causal, sliding, bidirectional and packed masks; the model's holds {name}: "
                    "use another attn_implementation"
                )
    return pattern


def _parts(function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions whose intersection a mask function is, by name, each with what it remembers."""
    if not isinstance(function, FunctionType) or function.__module__ != _MODULE:
        yield getattr(function, "__qualname__", repr(function)), {}
        return
    name, facts = function.__qualname__.partition(".")[0], _facts(function)
    if name == "and_masks":
        for each in facts["mask_functions"]:
            yield from _parts(each)
    elif name == "or_masks" and len(parts := [f for f in facts["mask_functions"] if not _adds_nothing(f)]) == 1:
        yield from _parts(parts[0])
    elif name == "remap_positions_for_packed_sequence":  # inside a sequence positions follow each other
        yield from _parts(facts["mask_function"])
    else:
        yield name, facts


def _facts(function: FunctionType) -> dict[str, Any]:
    """What a function remembers, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {variable: cell.cell_contents for variable, cell in cells}


def _adds_nothing(function: Callable[..., Any]) -> bool:
    """Whether a part of a union is for images that see both ways, in a prompt without any."""
    ids = _facts(function).get("block_sequence_ids") if isinstance(function, FunctionType) else None
    return ids is not None and not bool((ids >= 0).any())


def _of_keys(attention_mask: Tensor, kv_offset: int, kv_length: int) -> Tensor:
    """[batch_size, kv_length] bool: the part of a padding mask that belongs to the keys."""
    seen = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    return torch.nn.functional.pad(seen, (0, kv_length - seen.shape[1]))
