"""Octavo: paged attention for LLM serving. Attention is a merge of states over parts of the keys; a mask is
an interval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.batch import AttentionBatch
from octavo.cache import LayerCache, PagedKVCache
from octavo.errors import Unsupported
from octavo.formats import KVFormat
from octavo.functional import paged_attention
from octavo.launch import Plan
from octavo.planner import Planner
from octavo.run import append, merge_states, run
from octavo.spec import AttentionSpec, KVShard

if TYPE_CHECKING:
    from octavo.engine.llm import LLM
    from octavo.engine.request import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AttentionBatch",
    "AttentionSpec",
    "KVFormat",
    "KVShard",
    "LayerCache",
    "PagedKVCache",
    "Plan",
    "Planner",
    "SamplingParams",
    "Unsupported",
    "append",
    "merge_states",
    "paged_attention",
    "run",
]


def __getattr__(name: str) -> Any:
    """The engine's names load Transformers, so they come on first use."""
    if name == "LLM":
        from octavo.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from octavo.engine.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
