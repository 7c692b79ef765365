"""Packed linear layers: the numbers and the layout of nn.Linear, which layers are packed, and whose models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine import tiny
from octavo import LLM, SamplingParams
from octavo.engine import linear
from octavo.engine.errors import ModelError
from octavo.engine.linear import pack_linear_layers
from test_cli import tiny_tokenizer

needs_kernels = pytest.mark.skipif(not linear._has_kernels(), reason="no oneDNN for this processor")


class Scaled(nn.Linear):
    """Computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 7, 24), (3, 5, 24), (24,), (1, 200, 24), (0, 24), (1, 0, 24)])
@torch.inference_mode()
def test_it_is_the_same_product(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no kernels for bfloat16")
    layer, x = nn.Linear(24, 40, bias=bias).to(dtype), torch.randn(shape).to(dtype)
    true = x.double() @ layer.weight.double().t() + (0 if layer.bias is None else layer.bias.double())
    assert pack_linear_layers(layer)
    assert layer.weight.is_mkldnn
    got = layer(x)
    assert got.shape == (*shape[:-1], 40)
    assert got.dtype == dtype
    assert got.is_contiguous()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), true, rtol=tolerance, atol=tolerance)


@needs_kernels
@torch.inference_mode()
def test_rows_may_lie_anywhere() -> None:
    layer, wide = nn.Linear(24, 40), torch.randn(9, 48)
    plain = nn.Linear(24, 40)
    plain.load_state_dict(layer.state_dict())
    pack_linear_layers(layer)
    for x in (wide[:, ::2], wide[::3, 8:32], wide.t()[:24, :7].t()):
        torch.testing.assert_close(layer(x), plain(x), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_other_layers_stay_as_they_are() -> None:
    half, scaled, patched = nn.Linear(8, 8).half(), Scaled(8, 8), nn.Linear(8, 8)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.ModuleList([half, scaled, patched, nn.Embedding(4, 8), nn.Linear(8, 8, device="meta")])
    x = torch.randn(2, 8)
    before = [half(x.half()), scaled(x), patched(x)]
    assert not pack_linear_layers(model)
    assert all(parameter.layout == torch.strided for parameter in model.parameters())
    for old, new in zip(before, [half(x.half()), scaled(x), patched(x)], strict=True):
        assert torch.equal(old, new)


class Weight(torch.Tensor):
    """Holds its numbers in a way of its own, as libraries for quantisation have them."""


def test_a_weight_of_another_type_is_left_alone() -> None:
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(torch.randn(8, 8).as_subclass(Weight), requires_grad=False)
    assert not pack_linear_layers(layer)
    assert "forward" not in vars(layer)


@needs_kernels
@torch.inference_mode()
def test_an_embedding_keeps_the_weight_that_it_shares() -> None:
    embedding, head = nn.Embedding(40, 24), nn.Linear(24, 40, bias=False)
    head.weight = embedding.weight
    true = embedding.weight @ embedding.weight.t()
    pack_linear_layers(nn.ModuleList([embedding, head]))
    torch.testing.assert_close(head(embedding(torch.arange(40))), true, rtol=1e-5, atol=1e-5)
    head.weight = embedding.weight  # as Transformers does when it ties weights once more
    torch.testing.assert_close(head(embedding(torch.arange(40))), true, rtol=1e-5, atol=1e-5)


def packed(model: nn.Module) -> set[bool]:
    return {layer.weight.is_mkldnn for layer in model.modules() if type(layer) is nn.Linear}


def test_a_model_that_is_given_stays_as_it_is(tmp_path: Path) -> None:
    model = tiny.make("Llama")
    LLM(model, num_blocks=8)
    assert packed(model) == {False}
    model.model.layers[0].mlp.up_proj(torch.randn(3, 64)).sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None
    model.save_pretrained(tmp_path)


@needs_kernels
@pytest.mark.parametrize("family", tiny.SERVED)
def test_packed_models_say_the_same(family: str) -> None:
    model, batch, params = tiny.make(family), tiny.prompts((3, 17, 40)), SamplingParams(max_tokens=10, ignore_eos=True)
    expected = [result.token_ids for result in LLM(model, num_blocks=64).generate(batch, params)]
    llm = LLM(model, num_blocks=64, pack_weights=True)
    assert packed(model) == {True}
    llm = LLM(model, num_blocks=64, pack_weights=True)  # which it is already
    assert [result.token_ids for result in llm.generate(batch, params)] == expected


@needs_kernels
def test_a_model_that_is_loaded_is_packed_unless_told_not_to(tmp_path: Path) -> None:
    tiny.make("Llama").save_pretrained(tmp_path)
    tiny_tokenizer(None).save_pretrained(tmp_path)
    assert packed(LLM(tmp_path, num_blocks=8).model) == {True}
    assert packed(LLM(tmp_path, num_blocks=8, pack_weights=False).model) == {False}


@pytest.mark.parametrize("family", ["Jamba", "Mamba"])
def test_a_model_that_is_refused_stays_as_it_is(family: str) -> None:
    make, reason = tiny.REFUSED[family]
    model = make()
    with pytest.raises(ModelError, match=reason):
        LLM(model, num_blocks=8, pack_weights=True)
    assert packed(model) == {False}


@pytest.mark.parametrize("why", ["dtype", "processor"])
def test_what_cannot_be_packed_is_refused_if_asked_for(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.make("Llama")
    if why == "dtype":
        model.half()
    else:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        LLM(model, num_blocks=8, pack_weights=True)
    assert packed(model) == {False}
    LLM(model, num_blocks=8)
