"""The oracle against masks drawn by hand and against softmax by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from octavo import reference
from octavo.batch import AttentionBatch
from octavo.spec import AttentionSpec
from tolerance import assert_within

CAUSAL = """
    1 . . . . .
    1 1 . . . .
    1 1 1 . . .
    1 1 1 1 . .
    1 1 1 1 1 .
    1 1 1 1 1 1
"""
WINDOW_OF_3 = """
    1 . . . . .
    1 1 . . . .
    1 1 1 . . .
    . 1 1 1 . .
    . . 1 1 1 .
    . . . 1 1 1
"""
CHUNK_OF_3_NEW = """
    1 1 1 1 . .
    1 1 1 1 1 .
    1 1 1 1 1 1
"""
WINDOWED_CHUNK = """
    . . 1 1 . .
    . . . 1 1 .
    . . . . 1 1
"""
ONLY_ITSELF = """
    1 . . .
    . 1 . .
    . . 1 .
    . . . 1
"""
ENCODER = """
    1 1 1 1
    1 1 1 1
    1 1 1 1
    1 1 1 1
"""
ENCODER_WINDOW = """
    1 1 . . . .
    1 1 1 . . .
    1 1 1 1 . .
    . 1 1 1 1 .
    . . 1 1 1 1
    . . . 1 1 1
"""
OPEN_TO_THE_LEFT = """
    1 1 . . .
    1 1 1 . .
    1 1 1 1 .
    1 1 1 1 1
    1 1 1 1 1
"""
OPEN_TO_THE_RIGHT = """
    1 1 1 1
    1 1 1 1
    . 1 1 1
    . . 1 1
"""
CROSS = """
    1 1 1 1 1
    1 1 1 1 1
"""
MORE_QUERIES_THAN_KEYS = """
    . .
    . .
    1 .
    1 1
"""


@pytest.mark.parametrize(
    ("picture", "options"),
    [
        (CAUSAL, {}),
        (CAUSAL, {"window_left": 5}),
        (CAUSAL, {"window_right": 0, "causal": False}),
        (CAUSAL, {"window_right": 3}),
        (WINDOW_OF_3, {"window_left": 2}),
        (CHUNK_OF_3_NEW, {}),
        (WINDOWED_CHUNK, {"window_left": 1}),
        (ONLY_ITSELF, {"window_left": 0}),
        (ONLY_ITSELF, {"window_left": 0, "window_right": 0, "causal": False}),
        (ENCODER, {"causal": False}),
        (ENCODER_WINDOW, {"causal": False, "window_left": 2, "window_right": 1}),
        (OPEN_TO_THE_LEFT, {"causal": False, "window_right": 1}),
        (OPEN_TO_THE_RIGHT, {"causal": False, "window_left": 1}),
        (CROSS, {"causal": False}),
        (MORE_QUERIES_THAN_KEYS, {}),
    ],
)
@pytest.mark.parametrize("block_size", [1, 4])
def test_masks_by_hand(picture: str, options: dict, block_size: int) -> None:
    """With q = 0 and V one-hot the output is the mask, each row divided by its count; the LSE is its log."""
    mask = torch.tensor([[mark == "1" for mark in line.split()] for line in picture.strip().splitlines()])
    q_len, seq_len = mask.shape
    k, v = torch.full((2, 3, 8, 1, 8), float("nan"))
    table = torch.full((1, 9), 2**30, dtype=torch.int32)
    k, v = k.reshape(-1, block_size, 1, 8), v.reshape(-1, block_size, 1, 8)
    blocks = range(len(k) - 1, -1, -1)
    for j in range(seq_len):
        block = blocks[j // block_size]
        table[0, j // block_size] = block
        k[block, j % block_size] = 1.0
        v[block, j % block_size] = torch.eye(8)[j]
    batch = AttentionBatch.from_lengths([q_len], [seq_len], table)
    out, lse = reference.attention(AttentionSpec(1, 1, 8, **options), batch, torch.zeros(q_len, 1, 8), k, v)
    count = mask.sum(-1, keepdim=True).double()
    assert out.dtype == lse.dtype == torch.float64
    assert_within("out", out[:, 0, :seq_len], mask / count.clamp(min=1), mask.double())
    assert torch.equal(out[:, 0, seq_len:], torch.zeros_like(out[:, 0, seq_len:]))
    assert_within("lse", lse, count.log(), count.log())


def attend(products: Sequence[float], **options: object) -> tuple[list[float], float]:
    """Weights and LSE of the last of `products` keys, whose q . k is given."""
    n = len(products)
    slope, sink = options.pop("slope", None), options.pop("sink", None)
    spec = AttentionSpec(1, 1, 8, softmax_scale=1.0, sinks=sink is not None, **options)
    q, k, v = torch.zeros(1, 1, 8), torch.zeros(1, n, 1, 8), torch.zeros(1, n, 1, 8)
    q[..., 0], k[0, :, 0, 0], v[0, :, 0, :n] = 1.0, torch.tensor(products), torch.eye(n)
    batch = AttentionBatch.from_lengths([1], [n], [[0]])
    out, lse = reference.attention(
        spec,
        batch,
        q,
        k,
        v,
        alibi_slopes=None if slope is None else torch.tensor([slope]),
        sinks=None if sink is None else torch.tensor([sink]),
    )
    return out[0, 0, :n].tolist(), float(lse)


E = math.exp(1.0)
TANH = math.tanh


@pytest.mark.parametrize(
    ("options", "logits", "sink"),
    [
        ({}, (2.0, -1.0, 1.0), None),
        ({"sink": 0.0}, (2.0, -1.0, 1.0), 1.0),
        ({"sink": 1.0}, (2.0, -1.0, 1.0), E),
        ({"logits_soft_cap": 2.0}, (2 * TANH(1.0), 2 * TANH(-0.5), 2 * TANH(0.5)), None),
        ({"logits_soft_cap": 2.0, "sink": 1.0}, (2 * TANH(1.0), 2 * TANH(-0.5), 2 * TANH(0.5)), E),
        ({"alibi": "linear", "slope": 0.5}, (1.0, -1.5, 1.0), None),
        ({"alibi": "linear", "slope": 0.5, "sink": 1.0}, (1.0, -1.5, 1.0), E),
        ({"alibi": "linear", "slope": 0.5, "causal": False}, (1.0, -1.5, 1.0), None),
        ({"alibi": "sqrt", "slope": 0.5}, (2.0 - 0.5 * math.sqrt(2), -1.5, 1.0), None),
        ({"alibi": "sqrt", "slope": 0.5, "sink": 0.0}, (2.0 - 0.5 * math.sqrt(2), -1.5, 1.0), 1.0),
        (
            {"alibi": "linear", "slope": 0.5, "logits_soft_cap": 2.0},
            (2 * TANH(1.0) - 1.0, 2 * TANH(-0.5) - 0.5, 2 * TANH(0.5)),
            None,
        ),
        (
            {"alibi": "sqrt", "slope": 1.0, "logits_soft_cap": 2.0, "sink": 1.0},
            (2 * TANH(1.0) - math.sqrt(2), 2 * TANH(-0.5) - 1.0, 2 * TANH(0.5)),
            E,
        ),
        ({"window_left": 1, "alibi": "linear", "slope": 0.5}, (-math.inf, -1.5, 1.0), None),
        ({"window_left": 0, "sink": 1.0}, (-math.inf, -math.inf, 1.0), E),
    ],
)
def test_scores_by_hand(options: dict, logits: tuple[float, ...], sink: float | None) -> None:
    """Three keys with q . k = 2, -1, 1: cap, then bias, then mask, then the sink (given as exp(sink))."""
    weights = [math.exp(s) for s in logits]
    total = sum(weights) + (0.0 if sink is None else sink)
    out, lse = attend((2.0, -1.0, 1.0), **options)
    assert out == pytest.approx([w / total for w in weights], rel=1e-7)
    assert lse == pytest.approx(math.log(total), rel=1e-7)


def test_bias_after_the_query() -> None:
    """Not causal, two queries over two keys: the first is biased against the key after it."""
    spec = AttentionSpec(1, 1, 8, causal=False, alibi="linear")
    q, k, v = torch.zeros(2, 1, 8), torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8)
    batch = AttentionBatch.from_lengths([2], [2], [[0]])
    _, lse = reference.attention(spec, batch, q, k, v, alibi_slopes=torch.tensor([0.5]))
    assert lse.flatten().tolist() == pytest.approx([math.log(1 + math.exp(-0.5))] * 2, rel=1e-12)


def test_grouped_heads_and_value_width() -> None:
    """Query head h reads KV head h // group_size; V may be wider than K."""
    spec = AttentionSpec(6, 2, 8, 16)
    k, v = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 16)
    v[0, 0, 0], v[0, 0, 1] = 1.0, 2.0
    batch = AttentionBatch.from_lengths([1], [1], [[0]])
    out, _ = reference.attention(spec, batch, torch.randn(1, 6, 8), k, v)
    assert out.shape == (1, 6, 16)
    assert out[0, :, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_rows_of_no_sequence() -> None:
    """A batch of 5 rows with 3 in sequences: the others hold the identity."""
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, 2, 3], dtype=torch.int32),
        seq_lens=torch.tensor([2, 0], dtype=torch.int32),
        block_table=torch.tensor([[0], [2**30]], dtype=torch.int32),
        num_tokens=5,
        max_query_len=2,
        max_seq_len=2,
    )
    ones = torch.ones(1, 4, 1, 8)
    out, lse = reference.attention(
        AttentionSpec(1, 1, 8, sinks=True), batch, torch.ones(5, 1, 8), ones, ones, sinks=torch.ones(1)
    )
    assert bool((out[:2] != 0).all())
    assert float(lse[2]) == 1.0  # a sequence without keys still has the sink
    assert bool((out[2:] == 0).all())
    assert bool((lse[3:] == -math.inf).all())
