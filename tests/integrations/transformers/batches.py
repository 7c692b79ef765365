"""Prompts as padded batches, and continuous batching with its settings for both ends of the versions."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel


def padded(prompts: list[list[int]], side: str = "left") -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        at = slice(longest - len(prompt), longest) if side == "left" else slice(len(prompt))
        ids[row, at], mask[row, at] = torch.tensor(prompt), 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: PreTrainedModel, prompts: list[list[int]], max_tokens: int, **options: object) -> list[list[int]]:
    """Greedy tokens of a batch padded on the left, one list for each prompt, to the first end-of-sequence token."""
    batch = padded(prompts)
    out = model.generate(**batch, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, **options)
    return [until_end(model, row) for row in out[:, batch["input_ids"].shape[1] :].tolist()]


def generate_batch(
    model: PreTrainedModel, prompts: list[list[int]], max_tokens: int, chunk: int = 48
) -> list[list[int]]:
    """The same with continuous batching: chunks of so many tokens, pages of 32."""
    page = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
    settings = ContinuousBatchingConfig(num_blocks=200, max_batch_tokens=chunk, **{page: 32})
    ends = model.generation_config.eos_token_id
    config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, eos_token_id=ends)
    results = model.generate_batch(prompts, generation_config=config, continuous_batching_config=settings)
    assert [result.error for result in results.values()] == [None] * len(prompts)
    return [until_end(model, list(result.generated_tokens)) for result in results.values()]


def until_end(model: PreTrainedModel, tokens: list[int]) -> list[int]:
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else ends or []
    first = min((tokens.index(end) for end in ends if end in tokens), default=len(tokens))
    return tokens[:first]
