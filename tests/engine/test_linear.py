"""Linear layers for few rows: the numbers and the layout of nn.Linear, and which layers are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo.engine import linear
from octavo.engine.linear import FEW_ROWS, speed_up_few_rows


class Scaled(nn.Linear):
    """Computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 7, 24), (3, 5, 24), (24,), (1, FEW_ROWS, 24), (1, 200, 24), (0, 24)])
@torch.no_grad()
def test_it_is_the_same_product(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = nn.Linear(24, 40, bias=bias), torch.randn(shape)
    expected = layer(x)
    true = x.double() @ layer.weight.double().t() + (0 if layer.bias is None else layer.bias.double())
    speed_up_few_rows(layer)
    got = layer(x)
    assert got.shape == expected.shape
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), true, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_few_rows_go_the_other_way_and_many_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(linear, "linear", lambda x, *_: calls.append(x.shape[0]) or x)
    layer = nn.Linear(8, 8)
    speed_up_few_rows(layer)
    for rows in (1, FEW_ROWS, FEW_ROWS + 1):
        layer(torch.randn(rows, 8))
    assert calls == [FEW_ROWS + 1]


@torch.no_grad()
def test_other_layers_stay_as_they_are() -> None:
    half, scaled, patched = nn.Linear(8, 8).bfloat16(), Scaled(8, 8), nn.Linear(8, 8)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.ModuleList([half, scaled, patched])
    x = torch.randn(2, 8)
    before = [half(x.bfloat16()), scaled(x), patched(x)]
    speed_up_few_rows(model)
    assert "forward" not in vars(half)
    for old, new in zip(before, [half(x.bfloat16()), scaled(x), patched(x)], strict=True):
        assert torch.equal(old, new)


def test_a_model_can_still_be_trained() -> None:
    layer = nn.Linear(8, 4)
    speed_up_few_rows(layer)
    layer(torch.randn(3, 8)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [3.0] * 4
