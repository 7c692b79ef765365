"""Dense keys attended to in place: every kind of step against a drawn mask in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from octavo.dense import DenseStep, attend_dense, dense_planner, row_pages
from octavo.errors import Unsupported
from octavo.spec import AttentionSpec
from tolerance import assert_within

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A step, what a layer does, and the keys that each query may see, drawn: bool [batch, queries, keys]."""

    step: DenseStep
    visible: Tensor
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)


def draw(queries: int, keys: int, first: int, causal: bool = True, left: int | None = None) -> Tensor:
    """[queries, keys]: a mask by definition, the first query at position `first`."""
    q, j = torch.arange(first, first + queries)[:, None], torch.arange(keys)
    seen = (j <= q) | torch.tensor(not causal)
    return seen if left is None else seen & (j >= q - left) & (j <= q + left)


def padding(rows: list[str]) -> Tensor:
    """One string for each batch row, x for a key and . for padding."""
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


LEFT = padding([".....xxxxxxx", "xxxxxxxxxxxx", "...........x"])
RIGHT = padding(["xxxxxxx.....", "xxxxxxxxxxxx", "x..........."])
HOLES = padding(["..xx..xxx.xx", "xxxx....xxxx", "............"])


def padded(seen: Tensor, queries: int, first: int, causal: bool = True, left: int | None = None) -> Case:
    step = DenseStep.padded(seen, queries, first, causal=causal, windowed=left is not None)
    visible = draw(queries, seen.shape[1], first, causal, left) & seen[:, None]
    if causal or left is not None:  # a query that stands beside padding sees nothing
        visible = visible & seen[:, first : first + queries, None]
    return Case(step, visible, causal, (left, 0 if causal else left))


def packed() -> Case:
    segments = torch.tensor([[0] * 5 + [1] * 6 + [2], [3] * 12])
    visible = (segments[:, :, None] == segments[:, None]) & draw(12, 12, 0, left=3)
    return Case(DenseStep.packed(segments), visible, window=(3, 0))


def varlen() -> Case:
    """Cross attention of three sequences, the last two rows padding."""
    queries, keys = torch.tensor([0, 4, 4, 7]), torch.tensor([0, 3, 5, 11])
    visible = torch.zeros(1, 9, 12, dtype=torch.bool)
    visible[0, :4, :3] = visible[0, 4:7, 5:11] = True
    return Case(DenseStep.varlen(queries, keys, 9, 12), visible, causal=False)


CASES: dict[str, Callable[[], Case]] = {
    "whole": lambda: Case(DenseStep.whole(2, 12, 12, device=CPU), draw(12, 12, 0).expand(2, -1, -1)),
    "decode": lambda: Case(DenseStep.whole(3, 1, 20, device=CPU), draw(1, 20, 19).expand(3, -1, -1)),
    "one key": lambda: Case(DenseStep.whole(3, 1, 1, device=CPU), torch.ones(3, 1, 1, dtype=torch.bool)),
    "static cache": lambda: Case(DenseStep.whole(2, 3, 16, device=CPU, end=9), draw(3, 16, 6).expand(2, -1, -1)),
    "cross": lambda: Case(DenseStep.whole(2, 5, 9, device=CPU), torch.ones(2, 5, 9, dtype=torch.bool), causal=False),
    "left padding": lambda: padded(LEFT, 12, 0),
    "left padding, decode": lambda: padded(LEFT, 1, 11),
    "left padding, window": lambda: padded(LEFT, 4, 8, left=2),
    "left padding, static cache": lambda: padded(torch.nn.functional.pad(LEFT, (0, 5)), 2, 10),
    "right padding": lambda: padded(RIGHT, 12, 0),
    "right padding, window": lambda: padded(RIGHT, 12, 0, left=2),
    "holes": lambda: padded(HOLES, 6, 6),
    "encoder": lambda: padded(HOLES, 12, 0, causal=False),
    "encoder, window": lambda: padded(RIGHT, 12, 0, causal=False, left=2),
    "cross, padded": lambda: padded(RIGHT, 3, 0, causal=False),
    "packed": packed,
    "varlen": varlen,
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads outside": lambda x: x.contiguous(),
    "tokens outside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "inside a larger tensor": lambda x: torch.cat([x, x, x], 2)[:, :, x.shape[2] : 2 * x.shape[2]],
    "no whole rows apart": lambda x: torch.cat([x.flatten(1), x[:, 0, 0, :8]], 1)[:, : x[0].numel()].view_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_equals_a_drawn_mask(name: str, layout: str) -> None:
    case = CASES[name]()
    batch, queries, keys = case.step.shape
    spec = AttentionSpec(
        6, 2, 16, 24, causal=case.causal, window_left=case.window[0], window_right=case.window[1],
        logits_soft_cap=5.0, sinks=True,
    )  # fmt: skip
    random = torch.Generator().manual_seed(0)
    q = torch.randn(batch, queries, 6, 16, generator=random).transpose(1, 2)
    k, v = (torch.randn(batch, 2, keys, width, generator=random) for width in (16, 24))
    sinks = torch.randn(6, generator=random)
    unseen = ~case.visible.any(1)  # nothing of a key that no row sees may reach the result
    stored = [LAYOUTS[layout](x.masked_fill(unseen[:, None, :, None], torch.nan)) for x in (k, v)]
    out = attend_dense(case.step, dense_planner(spec, CPU), spec, q, *stored, sinks)
    true, plain = (masked(case, spec, *(x.to(dtype) for x in (q, k, v, sinks))) for dtype in (torch.float64, q.dtype))
    assert_within(name, out, true, plain)
    nothing = ~case.visible.any(2)
    assert bool((out[nothing] == 0).all()), "rows that see nothing"


def masked(case: Case, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Attention with the drawn mask, in the dtype of the tensors."""
    k, v = (x.repeat_interleave(spec.group_size, 1) for x in (k, v))
    scores = torch.tanh(q @ k.transpose(2, 3) * spec.scale / 5.0) * 5.0
    scores = scores.masked_fill(~case.visible[:, None], -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(len(q), -1, q.shape[2], 1)], 3)
    return (scores.softmax(3)[..., :-1] @ v).transpose(1, 2)


def test_keys_are_read_where_they_lie() -> None:
    k = torch.randn(3, 2, 10, 16)
    for dense in (k, k.transpose(1, 2).contiguous().transpose(1, 2), k[:, :, 2:7], k[:1], k[:, :, :1]):
        cache, _ = row_pages(dense, dense)
        assert cache.k_cache.data_ptr() == dense.data_ptr()


def test_plans_are_shared_by_layers() -> None:
    step, spec = DenseStep.padded(LEFT, 12, 0, causal=True), AttentionSpec(2, 2, 16)
    planner, k = dense_planner(spec, CPU), torch.randn(3, 2, 12, 16)
    for _ in range(3):
        attend_dense(step, planner, spec, k, k, k)
    assert len(step.plans) == 1


def test_refusals_name_the_reason() -> None:
    with pytest.raises(Unsupported, match="padding in the middle"):
        DenseStep.padded(HOLES, 6, 6, causal=True, windowed=True)
    with pytest.raises(Unsupported, match="needs as many queries"):
        DenseStep.padded(RIGHT, 6, 6, causal=False, windowed=True)
    with pytest.raises(ValueError, match=r"queries \[8, 14\) must stand beside keys"):
        DenseStep.padded(LEFT, 6, 8, causal=True)
    with pytest.raises(ValueError, match="end must lie"):
        DenseStep.whole(1, 1, 4, device=CPU, end=5)
    with pytest.raises(ValueError, match="key_start_loc must hold 3 offsets"):
        DenseStep.varlen(torch.tensor([0, 1, 2]), torch.tensor([0, 3, 13]), 2, 12)
    spec, k = AttentionSpec(2, 2, 16), torch.randn(3, 2, 11, 16)
    with pytest.raises(ValueError, match="the step is for 3 x 12 queries and 12 keys"):
        attend_dense(DenseStep.padded(LEFT, 12, 0, causal=True), dense_planner(spec, CPU), spec, k, k, k)
