"""Calibration and evaluation on tiny models, against what Transformers computes itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from engine import tiny
from octavo.calibration import Recorder
from octavo.engine.evaluate import evaluate, evaluate_layers
from octavo.engine.llm import LLM
from octavo.engine.request import SamplingParams
from octavo.engine.scoring import Windows, cut, make_runner, record, shipped_text
from octavo.formats import KVFormat
from octavo.scales import KVScales, Provenance

FAMILIES = ("Llama", "Gemma3", "GptOss")
WINDOWS = Windows(tuple(map(tuple, tiny.prompts([150, 40, 2]))), 150)
ORIGIN = Provenance(192, "0" * 64, 100.0, "0")
INT8_KV = KVFormat.parse("int8_kv", torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_perplexity_is_that_of_transformers(family: str) -> None:
    nll, count = 0.0, 0
    model = tiny.make(family)
    with torch.inference_mode():
        for sequence in WINDOWS.sequences:
            ids = torch.tensor([sequence])
            logits = model(ids, use_cache=False).logits[0, :-1].double()
            nll += float(cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += len(sequence) - 1
    (score,) = evaluate(model, WINDOWS, [], scales={}, origins={})
    assert score.num_scored == count == 189
    assert score.perplexity == pytest.approx(math.exp(nll / count), rel=1e-5)
    assert score.longest_context == 150


@pytest.mark.parametrize("family", FAMILIES)
def test_a_format_against_itself_loses_nothing(family: str) -> None:
    """The second float32 row has pages of its own."""
    same = evaluate(tiny.make(family), WINDOWS, ["float32"], scales={}, origins={})[1]
    assert (same.mean_kl, same.max_kl, same.top1_agreement, same.perplexity_change) == (0.0, 0.0, 1.0, 0.0)


def test_kl_is_that_of_the_logits() -> None:
    """By another way: each format's logits of a whole run, kept and compared afterwards."""
    model = tiny.make("Llama")
    score = evaluate(model, WINDOWS, ["int8_per_token"], scales={}, origins={"int8_per_token": "words"})[1]
    kls, agreed = [], 0
    for sequence in WINDOWS.sequences:
        expected, found = (
            make_runner(model, name, 150).logits(sequence, 0)[:-1].double().log_softmax(-1)
            for name in ("float32", "int8_per_token")
        )
        kls += (expected.exp() * (expected - found)).sum(1).tolist()
        agreed += int((expected.argmax(1) == found.argmax(1)).sum())
    assert min(kls) > 0
    assert score.max_kl == pytest.approx(max(kls), rel=1e-3)
    assert score.mean_kl == pytest.approx(sum(kls) / len(kls), rel=1e-3)
    assert score.top1_agreement == pytest.approx(agreed / len(kls))
    assert score.scales == "words"


def test_every_format_is_scored_and_stored_as_it_says() -> None:
    model = tiny.make("Llama")
    recorder, runner = record(model, WINDOWS)
    scales = {"int8_kv": recorder.scales(INT8_KV, runner.kv_model, ORIGIN)}
    names = ["bfloat16", "fp8_e4m3", "int8_kv", "int8_k", "int8_per_token"]
    scores = {s.kv_format: s for s in evaluate(model, WINDOWS, names, scales=scales, origins={})}
    assert list(scores) == ["float32", *names]
    assert scores["float32"].bytes_per_token == 2 * scores["bfloat16"].bytes_per_token == 3 * 2 * 16 * 2 * 4
    assert scores["fp8_e4m3"].bytes_per_token * 4 == scores["float32"].bytes_per_token
    for score in scores.values():
        assert score.pages_per_gib == 2**30 // (16 * score.bytes_per_token)
    assert 0 < scores["int8_k"].mean_kl < scores["int8_kv"].mean_kl < scores["fp8_e4m3"].mean_kl
    assert scores["bfloat16"].mean_kl < scores["fp8_e4m3"].mean_kl


@pytest.mark.parametrize("family", FAMILIES)
def test_the_recorder_sees_the_v_of_transformers(family: str) -> None:
    """V as the value projections of the model itself give it, without Octavo."""
    model = tiny.make(family)
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str):
        def hook(_module, _inputs, output: torch.Tensor) -> None:
            top = output.detach().reshape(-1, 2, 16).abs().amax(0)
            seen[name] = torch.maximum(seen[name], top) if name in seen else top

        return hook

    handles = [m.register_forward_hook(keep(n)) for n, m in model.named_modules() if n.endswith("v_proj")]
    with torch.inference_mode():
        for sequence in WINDOWS.sequences:
            model(torch.tensor([sequence]), use_cache=False)
    for handle in handles:
        handle.remove()
    recorder, runner = record(model, WINDOWS)
    assert int(recorder.num_tokens) == WINDOWS.num_tokens
    assert len(seen) == len(recorder.v_absmax) == 3
    for ours, theirs in zip(recorder.v_absmax, seen.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert all(layer.observer is None for layer in runner.layers.values())


def test_a_layer_alone_in_a_format() -> None:
    """V's scales of 0 in one layer: that layer alone loses its V, and the others' rows show their own small loss."""
    model = tiny.make("Llama")
    recorder, runner = record(model, WINDOWS)
    good = recorder.scales(INT8_KV, runner.kv_model, ORIGIN)
    bad = KVScales("int8_kv", None, (good.v[0], torch.zeros_like(good.v[1]), good.v[2]))
    kls = evaluate_layers(model, WINDOWS, "int8_kv", scales=bad)
    assert len(kls) == 3
    assert min(kls) > 0
    assert kls[1] > 20 * max(kls[0], kls[2])


def test_an_engine_reads_the_file_and_refuses_others(tmp_path: Path) -> None:
    model = tiny.make("Llama")
    recorder, runner = record(model, WINDOWS)
    scales, path = recorder.scales(INT8_KV, runner.kv_model, ORIGIN), tmp_path / "s.safetensors"
    scales.save(path)
    params, prompt = SamplingParams(max_tokens=8), [tiny.prompts([20])[0]]
    options = {"kv_format": "int8_kv", "num_blocks": 8}
    expected = LLM(model, kv_scales=scales, **options).generate(prompt, params)[0].token_ids
    assert LLM(model, kv_scales=path, **options).generate(prompt, params)[0].token_ids == expected
    assert LLM(model, kv_scales=str(path), **options).generate(prompt, params)[0].token_ids == expected
    with pytest.raises(ValueError, match="the scales are for 'int8_kv', the cache's format is 'fp8_e4m3'"):
        LLM(model, kv_format="fp8", kv_scales=path, num_blocks=8)
    with pytest.raises(ValueError, match="they are for 3 layers, the model has 2; they were made for another model"):
        LLM(tiny.make("Llama", num_hidden_layers=2), kv_scales=path, **options)
    with pytest.raises(ValueError, match="with configuration"):
        LLM(tiny.make("Llama", intermediate_size=128), kv_scales=path, **options)
    with pytest.raises(ValueError, match="no scales at nowhere"):
        LLM(model, kv_scales="nowhere", **options)


def test_fp8_scales_reach_the_cache() -> None:
    model = tiny.make("Llama")
    recorder, runner = record(model, WINDOWS)
    format = KVFormat.parse("fp8_e4m3", torch.float32)
    scales = recorder.scales(format, runner.kv_model, ORIGIN)
    runner = make_runner(model, "fp8_e4m3", 150, scales)
    for i, layer in enumerate(runner.layers.values()):
        assert layer.cache.k_descale.equal(scales.k[i])
        assert layer.cache.v_descale.equal(scales.v[i])
    runner.logits(WINDOWS.sequences[0], 0)
    tops = [float(layer.cache.v_cache.float().abs().max()) for layer in runner.layers.values()]
    assert all(100 < top < 300 for top in tops), tops  # half of 448, give or take what the quantised pages change


def test_windows() -> None:
    windows = cut([7], list(range(10)), 5)
    assert windows.sequences == ((7, 0, 1, 2, 3), (7, 4, 5, 6, 7), (7, 8, 9))
    assert cut([], list(range(9)), 4).sequences == ((0, 1, 2, 3), (4, 5, 6, 7))
    with pytest.raises(ValueError, match="the text has 1 tokens, too few"):
        cut([7], [1], 5)
    with pytest.raises(ValueError, match="a context of 2 tokens has no room"):
        cut([7], [1, 2, 3], 2)
    with pytest.raises(ValueError, match="a sequence of 17 tokens does not fit 1 pages of 16"):
        make_runner(tiny.make("Llama"), "auto", 16).logits([5] * 17, 0)


def test_the_shipped_text_is_there() -> None:
    text = shipped_text()
    assert text.startswith("CHAPTER I\n\nDown the Rabbit-Hole\n")
    assert len(text) > 30_000
    assert text.isascii()


def test_no_layers_no_statistics() -> None:
    with pytest.raises(ValueError, match="no token was seen"):
        Recorder(()).scales(INT8_KV, make_runner(tiny.make("Llama"), "auto", 16).kv_model, ORIGIN)
