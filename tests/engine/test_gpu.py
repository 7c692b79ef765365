"""The engine on a GPU: the same tokens with CUDA graphs as without, whatever the number of sequences."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import pytest
import torch

from engine import tiny
from octavo.engine.device import best_device
from octavo.engine.graphs import graph_sizes
from octavo.engine.llm import LLM
from octavo.engine.request import SamplingParams
from octavo.errors import Unsupported

LENGTHS = (3, 17, 40, 9, 1, 25, 30, 12, 7, 5, 33)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (5, [1, 2, 4, 5]),
        (20, [1, 2, 4, 8, 16, 20]),
        (64, [1, 2, 4, *range(8, 65, 8)]),
        (100, [1, 2, 4, *range(8, 64, 8), 64, 80, 96, 100]),
        (400, [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), 256, 320, 384, 400]),
    ],
)
def test_graph_sizes(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes


def test_without_a_gpu_the_model_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert best_device() == torch.device("cpu")


def test_a_gpu_that_is_not_served_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("octavo.backend.kernels.unsupported", lambda *arguments, **named: "it is too old")
    with pytest.warns(RuntimeWarning, match="the model runs on the CPU: it is too old"):
        assert best_device() == torch.device("cpu")


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="use_graphs=True needs a model on a GPU, this one is on cpu"):
        LLM(tiny.make("Llama"), use_graphs=True)


def params(lengths: tuple[int, ...] = LENGTHS) -> list[SamplingParams]:
    """Answers of different lengths: the batch shrinks through several graphs."""
    return [SamplingParams(max_tokens=4 + 3 * i, ignore_eos=True) for i in range(len(lengths))]


def tokens(llm: LLM, batch: list[list[int]]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in llm.generate(batch, params())]


def gpu_model(family: str, **changes: object) -> torch.nn.Module:
    return tiny.make(family, **changes).to("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Gemma3", "Qwen3", "GPTNeoX", "Cohere2"])
def test_graphs_give_the_tokens_of_eager_steps(family: str) -> None:
    batch = tiny.prompts(LENGTHS)
    options = {"block_size": 4, "num_blocks": 300, "max_num_seqs": 11}
    eager = LLM(gpu_model(family), use_graphs=False, **options)
    assert eager.runner._graphs is None
    expected = tokens(eager, batch)
    graphed = LLM(gpu_model(family), **options)
    used = []
    graphs = graphed.runner._graphs
    assert graphs is not None
    run = graphs.run
    graphs.run = lambda chunks: used.append(len(chunks)) or run(chunks)
    assert tokens(graphed, batch) == expected
    assert {1, 2, 5, 11} <= set(used)
    assert tokens(graphed, batch[::-1]) == tokens(eager, batch[::-1])
    stock = tiny.stock_tokens(tiny.make(family), batch[:3], 4)
    assert [list(row[:4]) for row in expected[:3]] == stock


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    batch = tiny.prompts(LENGTHS)
    results = []
    for use_graphs in (False, True):
        llm = LLM(gpu_model("Qwen3").to(dtype), use_graphs=use_graphs, block_size=16, num_blocks=100)
        results.append([result.token_ids[:4] for result in llm.generate(batch, params())])
    assert results[0] == results[1]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Mixtral", "GptOss", "Qwen3Moe", "DeepseekV3"])
def test_experts(family: str) -> None:
    """Whether or not their forward can be captured, the tokens are Transformers' own."""
    batch = tiny.prompts(LENGTHS[:6])
    expected = tiny.stock_tokens(tiny.make(family), batch, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        llm = LLM(gpu_model(family), block_size=4, num_blocks=200)
    results = llm.generate(batch, SamplingParams(max_tokens=6, ignore_eos=True))
    assert [list(result.token_ids) for result in results] == expected


@pytest.mark.gpu
def test_a_model_that_waits_runs_without_graphs() -> None:
    batch = tiny.prompts(LENGTHS)
    expected = tokens(LLM(gpu_model("Llama"), use_graphs=False, block_size=4, num_blocks=300), batch)
    model = gpu_model("Llama")
    model.model.register_forward_hook(lambda module, arguments, output: print(output.last_hidden_state.sum().item()))
    with pytest.warns(RuntimeWarning, match="decode runs without CUDA graphs, slower"):
        llm = LLM(model, block_size=4, num_blocks=300)
    assert tokens(llm, batch) == expected
    with pytest.raises(Unsupported, match="LlamaForCausalLM cannot be captured as CUDA graphs"):
        LLM(model, block_size=4, num_blocks=300, use_graphs=True)
    assert tokens(LLM(gpu_model("Llama"), use_graphs=True, block_size=4, num_blocks=300), batch) == expected


@pytest.mark.gpu
def test_preemption_and_cascade_under_graphs() -> None:
    """Pages run out, and twelve requests share 260 tokens: their decode steps take turns with graphs."""
    common = tiny.prompts([260])[0]
    batch = [common + tail for tail in tiny.prompts(range(1, 13), seed=1)]
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = tiny.stock_tokens(tiny.make("Gemma2"), batch, 8)
    for options in ({"num_blocks": 1000}, {"num_blocks": 140}, {"num_blocks": 1000, "enable_prefix_caching": False}):
        llm = LLM(gpu_model("Gemma2"), block_size=4, max_num_seqs=12, **options)
        assert [list(result.token_ids) for result in llm.generate(batch, sampling)] == expected


@pytest.mark.gpu
def test_graphs_outlive_the_thread_that_captured_them() -> None:
    """A server may load its model in a thread that ends: what graphs write to must stay theirs."""
    batch = tiny.prompts(LENGTHS)
    expected = tokens(LLM(gpu_model("Gemma2"), use_graphs=False, block_size=4, num_blocks=300), batch)
    made: list[LLM] = []
    thread = threading.Thread(
        target=lambda: made.append(LLM(gpu_model("Gemma2"), use_graphs=True, block_size=4, num_blocks=300))
    )
    thread.start()
    thread.join()
    assert made[0].runner._graphs is not None
    kept = made[0].runner._graphs._kept
    junk = [torch.full_like(buffer, -1 if buffer.dtype == torch.int32 else torch.nan) for buffer in kept for _ in "ab"]
    assert tokens(made[0], batch) == expected
    for buffer in junk:  # memory that looked free
        assert bool((buffer.isnan() if buffer.is_floating_point() else buffer == -1).all())


@pytest.mark.gpu
def test_a_named_model_goes_to_the_gpu(tmp_path: Path) -> None:
    """None means the GPU; the cache's budget is the GPU's memory."""
    from test_cli import tiny_tokenizer

    tiny.make("Llama").save_pretrained(tmp_path)
    tiny_tokenizer(None).save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), max_num_seqs=3)
    assert llm.model.device.type == "cuda"
    assert llm.runner._graphs is not None
    assert llm.runner.num_blocks == 3 * 512 // 16
    result = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5, seed=1, temperature=1.0, ignore_eos=True))[0]
    assert len(result.token_ids) == 5
