"""Real models in float32: every token as from Transformers' own `generate`, however the engine schedules."""

from __future__ import annotations

import pytest

from engine import tiny
from octavo.engine.llm import LLM
from octavo.engine.models import load
from octavo.engine.request import SamplingParams

pytestmark = pytest.mark.model

TEXT = (
    "The lighthouse keeper counted the ships that passed each night, and wrote their names in a book. "
    "In winter there were few, and he filled the pages with drawings of the sea instead. "
    "One morning a letter came: the light would be replaced by a machine, and his book by a number. "
)
MAX_TOKENS = 6

SCHEDULES = {
    "all at once": {"max_num_batched_tokens": 8192},
    "chunks of 48": {"max_num_batched_tokens": 48, "enable_prefix_caching": False},
    "two at a time, pages of 7": {"max_num_seqs": 2, "block_size": 7},
    "preempted": {"max_num_batched_tokens": 256, "block_size": 4, "tight": True},
}


class Stock:
    """A model before Octavo touches it, prompts of different lengths, and its own greedy tokens."""

    def __init__(self, name: str, lengths: tuple[int, ...], tight_blocks: int) -> None:
        self.tight_blocks = tight_blocks  # pages of 4 that make the scheduler preempt
        self.loaded = load(name, dtype="float32")
        ids = self.loaded.tokenizer(TEXT * (max(lengths) // 50 + 1))["input_ids"]
        starts = range(0, 7 * len(lengths), 7)  # different beginnings: no hits but the ones a test makes
        self.prompts = [ids[start : start + n] for start, n in zip(starts, lengths, strict=True)]
        self.tokens = tiny.stock_tokens(self.loaded.model, self.prompts, MAX_TOKENS)

    def engine(self, tight: bool = False, **options) -> LLM:
        """An engine on the same weights, with pages for all prompts, or so few that requests are preempted."""
        size = options.setdefault("block_size", 16)
        needs = [-(-(len(prompt) + MAX_TOKENS) // size) for prompt in self.prompts]
        options["num_blocks"] = self.tight_blocks if tight else sum(needs) + 1
        return LLM(self.loaded.model, tokenizer=self.loaded.tokenizer, **options)

    def check(self, llm: LLM) -> list[int]:
        """Generate, compare with the stock tokens, and return how many prompt tokens came from the cache."""
        results = llm.generate(self.prompts, SamplingParams(max_tokens=MAX_TOKENS))
        assert [list(result.token_ids) for result in results] == self.tokens
        for result in results:
            ids = [t for t in result.token_ids if t not in llm._eos_ids]
            assert result.text == llm.tokenizer.decode(ids, skip_special_tokens=True)
        return [result.num_cached_tokens for result in results]


@pytest.fixture(scope="module")
def smollm2() -> Stock:
    return Stock("smollm2", (5, 33, 120, 64, 1, 17, 200, 48), tight_blocks=62)


@pytest.fixture(scope="module")
def gemma3() -> Stock:
    """Windows of 512: one prompt is longer, one crosses the edge while it generates."""
    return Stock("gemma3-270m", (9, 560, 508, 40), tight_blocks=144)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("smollm2", "all at once"),
        ("smollm2", "two at a time, pages of 7"),
        ("smollm2", "preempted"),
        ("gemma3", "all at once"),
        ("gemma3", "chunks of 48"),
    ],
)
def test_tokens_equal_transformers(name: str, schedule: str, request: pytest.FixtureRequest) -> None:
    stock: Stock = request.getfixturevalue(name)
    llm = stock.engine(**SCHEDULES[schedule])
    stock.check(llm)
    assert (llm.stats.num_preemptions > 0) == (schedule == "preempted")
    assert llm.pool.num_free == llm.pool.num_blocks


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_prefix_cache_hits(name: str, request: pytest.FixtureRequest) -> None:
    stock: Stock = request.getfixturevalue(name)
    llm = stock.engine()
    assert sum(stock.check(llm)) == 0
    assert stock.check(llm) == [(len(prompt) - 1) // 16 * 16 for prompt in stock.prompts]
