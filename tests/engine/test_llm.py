"""The engine as its users call it: batches, streams, limits, bad input, failures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import tiny
from octavo.engine.errors import RequestError
from octavo.engine.llm import LLM
from octavo.engine.request import SamplingParams
from octavo.formats import EIGHT_BIT_FORMATS
from octavo.scales import KVScales

GREEDY = SamplingParams(max_tokens=10)


@pytest.fixture(scope="module")
def stock():
    """A model with windows, sinks and experts, before its attention is replaced; and its greedy tokens."""
    model = tiny.make("GptOss")
    batch = tiny.prompts((3, 17, 40, 9, 1, 25, 30, 12))
    return batch, tiny.stock_tokens(model, batch, 10)


def engine(**options) -> LLM:
    return LLM(tiny.make("GptOss"), **{"block_size": 4, "num_blocks": 100, **options})


def tokens(results) -> list[list[int]]:
    return [list(result.token_ids) for result in results]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"max_num_seqs": 1},
        {"block_size": 1, "num_blocks": 400},
        {"block_size": 64, "num_blocks": 20},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
    ],
    ids=str,
)
def test_schedules_do_not_change_tokens(stock, options) -> None:
    batch, expected = stock
    assert tokens(engine(**options).generate(batch, GREEDY)) == expected


@pytest.mark.parametrize("name", EIGHT_BIT_FORMATS)
def test_eight_bit_pages_do_not_depend_on_the_schedule(stock, name) -> None:
    """I11: what a step computes it reads back from the cache, so that chunks, preemption and reuse change nothing."""
    batch, _ = stock
    config = tiny.make("GptOss").config
    scale = torch.linspace(0.01, 0.02, config.num_key_value_heads * config.head_dim)
    scales = KVScales("int8_kv", None, (scale.view(-1, config.head_dim),) * config.num_hidden_layers)
    options = {"kv_format": name, "kv_scales": scales if name == "int8_kv" else None}
    llm = engine(**options)
    expected = tokens(llm.generate(batch, GREEDY))
    assert tokens(llm.generate(batch, GREEDY)) == expected
    assert llm.stats.num_cached_tokens > 0
    assert tokens(engine(**options, max_num_batched_tokens=5).generate(batch, GREEDY)) == expected
    tight = engine(**options, num_blocks=15)
    assert tokens(tight.generate(batch, GREEDY)) == expected
    assert tight.stats.num_preemptions > 0
    assert llm.runner.bytes_per_token < engine(kv_format="float32").runner.bytes_per_token


def test_static_scales_are_those_of_the_layer() -> None:
    """Each layer's V is quantised by its own scales: one layer's scale of 0 silences that layer only."""
    config = tiny.make("GptOss").config
    scales = [torch.full((config.num_key_value_heads, config.head_dim), 0.02) for _ in range(config.num_hidden_layers)]
    scales[1] = torch.zeros_like(scales[1])
    llm = engine(kv_format="int8_kv", kv_scales=KVScales("int8_kv", None, tuple(scales)))
    caches = [module.octavo_layer.cache for module in llm.model.modules() if hasattr(module, "octavo_layer")]
    llm.generate([[5, 6, 7]], GREEDY)
    assert [bool(cache.v_cache.any()) for cache in caches] == [i != 1 for i in range(len(caches))]
    with pytest.raises(ValueError, match="v scales are for 1 layers, the model has"):
        engine(kv_format="int8_kv", kv_scales=KVScales("int8_kv", None, (scales[0],)))
    with pytest.raises(ValueError, match="the scales are for 'int8_kv', the cache's format is 'int8_k'"):
        engine(kv_format="int8_k", kv_scales=KVScales("int8_kv", None, tuple(scales)))


def test_preemption_recomputes_the_same_tokens(stock) -> None:
    """A pool that holds little more than one request: others are thrown out and come back."""
    batch, expected = stock
    llm = engine(num_blocks=15)
    assert tokens(llm.generate(batch, GREEDY)) == expected
    assert llm.stats.num_preemptions > 0
    assert llm.pool.num_free == llm.pool.num_blocks


def test_prefix_cache_hits_give_the_same_tokens(stock) -> None:
    batch, expected = stock
    llm = engine(num_blocks=200)
    assert tokens(llm.generate(batch, GREEDY)) == expected
    again = llm.generate(batch, GREEDY)
    assert tokens(again) == expected
    assert [result.num_cached_tokens for result in again] == [(len(p) - 1) // 4 * 4 for p in batch]


def test_a_common_prefix_is_read_once_and_changes_nothing() -> None:
    """Ten requests behind 260 common tokens: decoded through a cascade (Backend's threshold is 8 and 256)."""
    model = tiny.make("Gemma2")
    common = tiny.prompts([260])[0]
    batch = [common + tail for tail in tiny.prompts(range(1, 11), seed=1)]
    expected = tiny.stock_tokens(model, batch, 6)
    llm = LLM(model, block_size=4, num_blocks=600, max_num_batched_tokens=4096)
    llm.generate([common], SamplingParams(max_tokens=1))
    plans = []
    build = llm.runner._builder.build
    llm.runner._builder.build = lambda prefix, batch: plans.append(prefix) or build(prefix, batch)
    assert tokens(llm.generate(batch, SamplingParams(max_tokens=6))) == expected
    assert max(plans) == 260


@given(st.data())
def test_random_schedules(stock, data) -> None:
    batch, expected = stock
    chosen = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=6))
    llm = engine(
        block_size=data.draw(st.sampled_from([1, 3, 4, 16])),
        num_blocks=data.draw(st.integers(60, 80)),
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_num_batched_tokens=data.draw(st.integers(1, 64)),
        enable_prefix_caching=data.draw(st.booleans()),
    )
    results = llm.generate([batch[i] for i in chosen], GREEDY)
    assert tokens(results) == [expected[i] for i in chosen]
    assert llm.pool.num_free == llm.pool.num_blocks


def test_bad_prompts_do_not_stop_the_others(stock) -> None:
    batch, expected = stock
    llm = engine(max_model_len=64)
    results = llm.generate([batch[0], [], [5] * 64, "text", [5, 200], [-1], batch[1], None], GREEDY)
    assert [r.finish_reason for r in results] == ["length"] + ["error"] * 5 + ["length", "error"]
    assert tokens([results[0], results[6]]) == expected[:2]
    for result, reason in zip(
        results[1:6] + results[7:],
        ["prompt is empty", "at most 63 fit", "needs a tokenizer", "vocabulary of 200", "vocabulary", "token ids"],
        strict=True,
    ):
        assert reason in result.error
        assert result.token_ids == ()


def test_a_prompt_alone_raises() -> None:
    llm = engine(num_blocks=4)
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate("")
    with pytest.raises(RequestError, match="the cache holds 16"):
        llm.generate([5] * 17)
    assert llm.pool.num_free == 4


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        SamplingParams(max_tokens=0)
    llm = engine()
    with pytest.raises(ValueError, match="2 prompts need one SamplingParams or 2, got 3"):
        llm.generate([[5], [6]], [GREEDY] * 3)
    with pytest.raises(ValueError, match="max_model_len must be at most 512"):
        engine(max_model_len=513)
    with pytest.raises(ValueError, match="raise kv_cache_bytes"):
        engine(num_blocks=None, kv_cache_bytes=10)
    with pytest.raises(ValueError, match="int8_kv needs kv_scales: run `octavo calibrate MODEL --kv-format int8_kv"):
        engine(kv_format="int8_kv")
    with pytest.raises(ValueError, match="known formats: auto, float16"):
        engine(kv_format="int3")
    assert llm.generate([]) == []


def test_lengths_and_stops(stock) -> None:
    batch, expected = stock
    llm = engine(max_model_len=20)
    full = llm.generate([batch[1]], SamplingParams(max_tokens=99))[0]  # 17 of 20 tokens are the prompt
    assert full.finish_reason == "length"
    assert list(full.token_ids) == expected[1][:3]
    stop = expected[0][3]
    first = expected[0].index(stop)
    stopped = llm.generate([batch[0]], SamplingParams(max_tokens=10, stop_token_ids=[stop]))[0]
    assert stopped.finish_reason == "stop"
    assert list(stopped.token_ids) == expected[0][: first + 1]


def test_log_probabilities(stock) -> None:
    """Each chosen token's log-probability is that of the stock model on the same tokens."""
    batch, _ = stock
    model = tiny.make("GptOss")
    results = engine().generate(batch[:3], SamplingParams(max_tokens=5, logprobs=2))
    for prompt, result in zip(batch, results, strict=False):
        ids = torch.tensor([prompt + list(result.token_ids)])
        with torch.inference_mode():
            logp = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for i, entry in enumerate(result.logprobs):
            assert entry.token_id == result.token_ids[i] == entry.top[0][0]
            assert entry.logprob == pytest.approx(float(logp[i, entry.token_id]), abs=1e-4)
            assert [t for t, _ in entry.top] == logp[i].topk(2).indices.tolist()


def test_seeds_do_not_depend_on_the_batch(stock) -> None:
    batch, _ = stock
    params = [SamplingParams(max_tokens=8, temperature=1.0, top_p=0.95, seed=i) for i in range(len(batch))]
    together = engine(num_blocks=20).generate(batch, params)  # tight: requests are preempted too
    alone = [engine().generate([prompt], one)[0] for prompt, one in zip(batch, params, strict=True)]
    assert tokens(together) == tokens(alone)


def test_streams_interleave(stock) -> None:
    """Two streams of one engine, read in turns: each gets its own tokens, in order, and its result once."""
    batch, expected = stock
    llm = engine(max_num_batched_tokens=16)
    streams = [llm.stream(batch[:4], GREEDY), llm.stream(batch[4:], GREEDY)]
    got: list[dict[int, list[int]]] = [{}, {}]
    results: list[dict[int, object]] = [{}, {}]
    alive = [0, 1]
    while alive:
        for which in list(alive):
            delta = next(streams[which], None)
            if delta is None:
                alive.remove(which)
                continue
            got[which].setdefault(delta.index, []).extend(delta.token_ids)
            if delta.result is not None:
                assert delta.index not in results[which]
                results[which][delta.index] = delta.result
    flat = [got[w][i] for w in (0, 1) for i in range(4)]
    assert flat == expected
    assert flat == [list(results[w][i].token_ids) for w in (0, 1) for i in range(4)]


def test_closing_a_stream_gives_its_pages_back(stock) -> None:
    batch, expected = stock
    llm = engine()
    stream = llm.stream(batch, GREEDY)
    for _ in range(5):
        next(stream)
    stream.close()
    assert llm.pool.num_free == llm.pool.num_blocks
    assert not llm.scheduler.has_unfinished
    assert tokens(llm.generate(batch, GREEDY)) == expected


def test_a_failing_step_leaves_nothing_behind(stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model raises in the middle of a batch: the call fails, no page is lost or findable, the engine lives."""
    batch, expected = stock
    llm = engine()
    stream = llm.stream(batch, GREEDY)
    next(stream)
    monkeypatch.setattr(llm.model, "forward", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("out of luck")))
    with pytest.raises(RuntimeError, match="out of luck"):
        list(stream)
    monkeypatch.undo()
    assert llm.pool.num_free == llm.pool.num_blocks
    assert tokens(llm.generate(batch, GREEDY)) == expected


def test_a_row_of_nan_fails_alone(stock, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, expected = stock
    llm = engine(max_num_batched_tokens=512)
    run = llm.runner.run

    def with_nan(chunks):
        logits = run(chunks).clone()
        logits[2] = torch.nan
        return logits

    monkeypatch.setattr(llm.runner, "run", with_nan)
    stream = llm.stream(batch[:4], GREEDY)
    delta = next(d for d in stream if d.result is not None)
    monkeypatch.undo()
    assert delta.index == 2
    assert delta.result.finish_reason == "error"
    assert "not finite" in delta.result.error
    rest = {d.index: d.result for d in stream if d.result is not None}
    assert tokens([rest[0], rest[1], rest[3]]) == [expected[0], expected[1], expected[3]]


def test_the_model_outside_an_engine_says_so() -> None:
    llm = engine()
    with pytest.raises(RuntimeError, match=r"call LLM\.generate \(of the newest LLM"):
        llm.model(torch.tensor([[1, 2]]))


def test_arguments_that_would_be_ignored_are_refused() -> None:
    model = tiny.make("GptOss")
    with pytest.raises(ValueError, match="dtype and device belong to a model that is still to be loaded"):
        LLM(model, dtype="bfloat16", device="cpu")
    with pytest.raises(ValueError, match="tokenizer belongs to a loaded model"):
        LLM("smollm2", tokenizer=object())
    with pytest.raises(ValueError, match="both size the cache"):
        LLM(model, num_blocks=4, kv_cache_bytes=1 << 20)
    for name in ("block_size", "num_blocks", "kv_cache_bytes", "max_num_seqs", "max_num_batched_tokens"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            LLM("no model is looked for", **{name: 0})
    with pytest.raises(ValueError, match="max_model_len must be at least 2"):
        LLM("no model is looked for", max_model_len=1)
    with pytest.raises(TypeError, match="params must be SamplingParams, got dict"):
        engine().generate([[5]], {"max_tokens": 2})


def test_token_ids_of_any_integer_kind(stock) -> None:
    """Arrays are one prompt; numbers that are no integers are refused, not rounded."""
    batch, expected = stock
    llm = engine()
    for one in (torch.tensor(batch[0]), torch.tensor(batch[0]).numpy(), tuple(batch[0])):
        assert tokens(llm.generate(one, GREEDY)) == [expected[0]]
    assert tokens(llm.generate([torch.tensor(batch[0]), batch[1]], GREEDY)) == expected[:2]
    results = llm.generate([[1.7], ["5"], batch[0]], GREEDY)
    assert [r.finish_reason for r in results] == ["error", "error", "length"]
