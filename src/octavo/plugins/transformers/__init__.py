"""Octavo as an attention implementation of Transformers; docs/transformers.md says how to use it.

Call `register()` once, then give models `attn_implementation="octavo"`; or let `use(model)` do both and see that the
model takes it. Transformers is imported when one of them is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.errors import Unsupported
from octavo.plugins.transformers import status

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "octavo"
"""attn_implementation of `forward` and `generate`."""

FLASH_NAME = "octavo_flash"
"""The same under a name with which newer versions batch continuously; see `batched_name`."""


def register() -> None:
    """Make Octavo's names known to Transformers. Calling it again changes nothing.

    Raises:
        Unsupported: Transformers is missing or too old.
    """
    reason = status.why_inactive()
    if reason is not None:
        raise Unsupported(reason)
    from transformers import AttentionInterface, AttentionMaskInterface

    from octavo.plugins.transformers import continuous
    from octavo.plugins.transformers.attention import attention
    from octavo.plugins.transformers.masks import mask

    attend, attend_batched, read_mask = (_outside_graphs(x) for x in (attention, continuous.batched_attention, mask))
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, read_mask)
    if continuous.updates_the_cache():
        AttentionInterface.register(f"paged|{NAME}", attend_batched)
    else:
        AttentionInterface.register(FLASH_NAME, attend_batched)
        AttentionMaskInterface.register(FLASH_NAME, read_mask)
        continuous.accept_flash_name(FLASH_NAME)


def _outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as torch.compile calls it and does not trace it."""
    from torch import compiler

    why = "Octavo reads masks and plans on the host: compile with fullgraph=False"
    outside: Callable[..., Any] = compiler.disable(function, reason=why)  # type: ignore[no-untyped-call]
    return outside


def batched_name() -> str:
    """attn_implementation for `generate_batch` with the installed version; it serves `generate` too."""
    from octavo.plugins.transformers.continuous import updates_the_cache

    return NAME if updates_the_cache() else FLASH_NAME


def use(model: PreTrainedModel, *, batched: bool = False) -> None:
    """Register, make a loaded model use Octavo, and see that it does.

    Args:
        batched: for `generate_batch`.

    Raises:
        Unsupported: the model does not let its attention be chosen, with the reason.
    """
    register()
    from transformers import PreTrainedModel

    name, kind = batched_name() if batched else NAME, type(model).__name__
    try:
        model.set_attn_implementation(name)
    except ImportError as error:
        raise Unsupported(f"{kind} batches continuously with kernels of its own choice only: {error}") from error
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation != name:
            raise Unsupported(
                f"{type(part).__name__} stays with its {part.config._attn_implementation!r} attention, as it does not "
                "look that up in Transformers' AttentionInterface: Octavo would not be called"
            )
