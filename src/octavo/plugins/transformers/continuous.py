"""Continuous batching, `model.generate_batch`: Transformers keeps pages, and gathers a step's keys before attention.

How it calls attention then is private to Transformers and has changed. In 5.17 an implementation is registered once
more as `paged|NAME` and updates the cache itself; in 5.24 its name must hold "flash", and the model updates the cache.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn
from transformers import modeling_flash_attention_utils
from transformers.generation.continuous_batching import PagedAttentionCache

from octavo.errors import Unsupported
from octavo.plugins.transformers.attention import attention


@functools.cache
def updates_the_cache() -> bool:
    """Whether attention does, as in 5.17; otherwise the model has done so."""
    return "read_index" in inspect.signature(PagedAttentionCache.update).parameters


def batched_attention(
    module: nn.Module,
    query: Tensor,  # [1, num_q_heads, num_queries, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_keys, head_dim]
    value: Tensor,  # [1, num_kv_heads, num_keys, value_dim]
    attention_mask: Tensor | None,
    *,
    cache: PagedAttentionCache | None = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    block_table: Tensor | None = None,
    read_index: list[Tensor] | None = None,
    write_index: list[Tensor] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | dict[str, int] | None = None,
    logits_indices: Tensor | None = None,
    logits_processor_args: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over the gathered keys of all requests; outside of `generate_batch` just `attention`.

    Raises:
        Unsupported: keys were not gathered.
    """
    if block_table is not None:
        raise Unsupported("a block table reached Octavo, which expects gathered keys: set max_blocks_per_request=0")
    if updates_the_cache():
        if cache is None:
            raise Unsupported("paged|octavo is for generate_batch; for generate use octavo")
        updated = cache.update(key, value, module.layer_idx, read_index, write_index)
        key, value = (x.transpose(0, 1).unsqueeze(0) for x in updated)
    if isinstance(cu_seq_lens_k, dict):
        kind = "sliding_attention" if arguments.get("sliding_window") else "full_attention"
        cu_seq_lens_k = cu_seq_lens_k[kind]
    return attention(module, query, key, value, attention_mask, cu_seq_lens_k=cu_seq_lens_k, **arguments)


def accept_flash_name(name: str) -> None:
    """Let Transformers believe that it has loaded the kernels of this implementation, as it would look for them by the
    name. Private to Transformers: another flash implementation that it loads takes this back."""
    modeling_flash_attention_utils._loaded_implementation = name
