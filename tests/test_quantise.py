"""The definitions of stored numbers: what every writer, kernel and oracle must give bit by bit."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.formats import EIGHT_BIT_FORMATS, KVFormat
from octavo.quantise import quantise_channels, quantise_rows, real_rows, store_rows, to_fp8

NAN, INF = float("nan"), float("inf")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = st.floats(-1e6, 1e6, width=32)


def nearest_float32(x: Fraction) -> float:
    """Correctly rounded to float32, by comparing a guess with its neighbours exactly; ties to even."""
    guess = torch.tensor(float(x), dtype=torch.float32)
    around = (torch.nextafter(guess, torch.tensor(-INF)), guess, torch.nextafter(guess, torch.tensor(INF)))
    bits = {float(y): int(y.view(torch.int32)) for y in around}
    return min(bits, key=lambda y: (abs(Fraction(y) - x), bits[y] % 2))


def half_even(x: Fraction) -> int:
    return round(x)  # Python rounds half to even


@given(row=st.lists(FLOATS, min_size=1, max_size=9))
def test_rows_by_exact_arithmetic(row: list[float]) -> None:
    """scale = absmax / 127 and rint(x / scale), each division rounded correctly, in fractions of whole numbers."""
    x = torch.tensor(row, dtype=torch.float32)
    values, scale = quantise_rows(x)
    exact_scale = nearest_float32(Fraction(max(abs(float(y)) for y in x)) / 127)
    assert float(scale) == exact_scale
    for value, y in zip(values.tolist(), x.tolist(), strict=True):
        if exact_scale == 0:
            assert value == 0
        else:
            rounded = half_even(Fraction(nearest_float32(Fraction(y) / Fraction(exact_scale))))
            assert value == max(-127, min(127, rounded))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_error_of_rows_is_half_a_step(dtype: torch.dtype) -> None:
    x = (torch.randn(200, 3, 64) * torch.logspace(-4, 4, 200)[:, None, None]).to(dtype)
    values, scale = quantise_rows(x)
    assert values.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert int(values.min()) >= -127
    assert bool((values.abs().amax(-1) == 127).all())
    error = (values.double() * scale.double().unsqueeze(-1) - x.float().double()).abs()
    # Besides half a step, the scale's own rounding and the quotient's, half a unit of the last place each, 127 times.
    assert bool((error <= scale.double().unsqueeze(-1) * (0.5 + 127 * 2**-23)).all())


def test_halves_go_to_even() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    values, scale = quantise_rows(x)
    assert float(scale) == 1.0
    assert values.tolist() == [127, 0, 2, 2, 0, -2, -2]


def test_a_reciprocal_would_change_values() -> None:
    """Why the division is part of the definition: x * (127 / absmax) gives other numbers in many rows."""
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    values, _ = quantise_rows(x)
    by_reciprocal = (x * (127.0 / x.abs().amax(-1, keepdim=True))).round().to(torch.int8)
    assert bool((values != by_reciprocal).any())


def test_rows_of_zeros_and_of_almost_nothing() -> None:
    """I04: scale 0 and values 0, no NaN; so too where absmax / 127 is no number above 0."""
    x = torch.tensor([[0.0, -0.0], [1e-45, -1e-45], [1e-38, 5e-39]])
    values, scale = quantise_rows(x)
    assert scale[:2].tolist() == [0.0, 0.0]
    assert values[:2].tolist() == [[0, 0], [0, 0]]
    assert float(scale[2]) > 0
    assert int(values[2, 0]) == 127


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_row_that_is_not_finite_says_so(bad: float) -> None:
    x = torch.tensor([[1.0, bad, 3.0], [1.0, 2.0, 3.0]])
    values, scale = quantise_rows(x)
    assert math.isnan(scale[0])
    assert values[0].tolist() == [0, 0, 0]
    assert values[1].tolist() == quantise_rows(x[1])[0].tolist()
    assert bool((values[0] * scale[0]).isnan().all())


def test_float64_beyond_float32_is_not_finite() -> None:
    assert math.isnan(quantise_rows(torch.tensor([1e300, 1.0], dtype=torch.float64))[1])


def test_channels() -> None:
    """A scale for every channel; what lies beyond 127 steps saturates, a channel of scale 0 is 0."""
    x = torch.tensor([[1.0, 3.0, 5.0, -500.0, INF, NAN], [-0.5, 0.0, -5.0, 2.0, -INF, 1.0]])
    scale = torch.tensor([0.5, 2.0, 0.0, 1.0, 1.0, 1.0])
    assert quantise_channels(x, scale).tolist() == [[2, 2, 0, -127, 127, 0], [-1, 0, 0, 2, -127, 1]]


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_saturates(dtype: torch.dtype) -> None:
    """I09: 1000 and infinities become the largest number; NaN stays; 3 at a scale of 0.5 comes back as 3."""
    most = torch.finfo(dtype).max
    given = torch.tensor([1e6, -1e6, INF, -INF, most, 3.0, NAN])
    stored = to_fp8(given, dtype).float()
    assert stored[:6].tolist() == [most, -most, most, -most, most, 3.0]
    assert math.isnan(stored[6])
    assert (to_fp8(given, dtype, torch.tensor(0.5)).float() * 0.5)[5] == 3.0


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    """Every number of the format and every middle between two neighbours."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = codes[codes.isfinite()].unique()
    assert torch.equal(to_fp8(numbers, dtype).float(), numbers)
    middles = (numbers[:-1] + numbers[1:]) / 2
    rounded = to_fp8(middles, dtype)
    assert bool((rounded.view(torch.uint8) % 2 == 0).all())
    assert bool(((rounded.float() == numbers[:-1]) | (rounded.float() == numbers[1:])).all())


def stored_bits(x: Tensor | None) -> list[int] | None:
    return None if x is None else x.contiguous().view(torch.uint8).flatten().tolist()


STATIC = {
    "fp8_e4m3": {"k_descale": torch.tensor([0.5, 2.0]), "v_descale": torch.tensor(3.0)},
    "fp8_e5m2": {"k_descale": torch.tensor(0.25)},
    "int8_kv": {"v_descale": torch.rand(2, 24) + 0.01},
}


@pytest.mark.parametrize("name", ["auto", *EIGHT_BIT_FORMATS])
def test_stored_rows_come_back(name: str) -> None:
    """Real numbers of stored rows lie within the format's step of what was given, and are stored as themselves."""
    format, static = KVFormat.parse(name, torch.bfloat16), STATIC.get(name, {})
    k, v = torch.randn(7, 2, 16).bfloat16(), torch.randn(7, 2, 24).bfloat16()
    rows = store_rows(format, k, v, **static)
    assert (rows.k.dtype, rows.v.dtype) == (format.k_dtype, format.v_dtype)
    assert (rows.k_scale is not None, rows.v_scale is not None) == (format.k_scaled_by_row, format.v_scaled_by_row)
    real_k, real_v = real_rows(format, rows, **static)
    limits = {
        "auto": (0, 0),
        "fp8_e4m3": (2**-4, 2**-4),
        "fp8_e5m2": (2**-3, 2**-3),
        "int8_kv": (1 / 254, 0.51 * 1.01),  # V's scales are below 1.01, and nothing here is beyond 127 of the smallest
        "int8_k": (1 / 254, 0),
        "int8_per_token": (1 / 254, 1 / 254),
    }[name]
    k_unit, v_unit = (
        x.float().abs() + 0.05 if format.is_fp8 else x.float().abs().amax(-1, keepdim=True) for x in (k, v)
    )
    v_unit = STATIC["int8_kv"]["v_descale"] if name == "int8_kv" else v_unit
    beyond = 127 * STATIC["int8_kv"]["v_descale"] < v.float().abs() if name == "int8_kv" else torch.zeros(())
    assert bool(((real_k - k.float()).abs() <= limits[0] * 1.001 * k_unit).all())
    assert bool((((real_v - v.float()).abs() <= limits[1] * 1.001 * v_unit) | beyond.bool()).all())
    again = store_rows(format, real_k, real_v, **static)
    assert stored_bits(again.v) == stored_bits(rows.v)
    assert stored_bits(again.k) == stored_bits(rows.k)


def test_a_nan_in_v_by_channel_shows_in_k() -> None:
    """int8 has no code for NaN and a static scale cannot say so: K's scale of that token and head does."""
    format = KVFormat.parse("int8_kv", torch.float32)
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    v[1, 0, 5] = NAN
    rows = store_rows(format, k, v, v_descale=torch.ones(2, 8))
    assert rows.k_scale is not None
    assert rows.k_scale.isnan().tolist() == [[False, False], [True, False], [False, False]]
