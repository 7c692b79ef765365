"""The compiled CPU kernels: vector widths, numbers at the edges, what is kept on disk, and what falls to PyTorch."""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

import octavo
from apart import run_apart
from conformance.harness import Cut, attend, make_plan
from octavo.bench.cases import Case, build
from octavo.formats import EIGHT_BIT_FORMATS
from octavo.kernels import cpu
from octavo.kernels.cpu import compiled, jobs, plain, simd, simd_dots, stored
from octavo.kernels.cpu.simd_eight_bit import E4M3_UNIT
from octavo.launch import State
from octavo.spec import AttentionSpec
from tolerance import assert_attention, assert_same_bits, assert_within


@njit
def _exp2_all(source, target, count):
    for i in range(0, count, 8):
        simd.store(target + i * 4, simd.exp2(simd.load_f32(source + i * 4)))


@njit
def _tanh_all(source, target, count):
    for i in range(0, count, 8):
        simd.store(target + i * 4, simd.tanh(simd.load_f32(source + i * 4)))


def apply(function: Callable[..., None], x: np.ndarray) -> np.ndarray:
    """A vector operation on [n] float32, n a multiple of eight."""
    y = np.full_like(x, 99)
    function(np.int64(x.ctypes.data), np.int64(y.ctypes.data), len(x))
    return y


def ulps(found: np.ndarray, true: np.ndarray) -> float:
    return float(np.max(np.abs(found - true) / np.spacing(np.abs(true).astype(np.float32))))


def test_exp2() -> None:
    x = np.linspace(-126, 127, 80_000, dtype=np.float32)
    assert ulps(apply(_exp2_all, x), np.exp2(x.astype(np.float64))) < 3
    edges = np.array([0, -0.0, -126, -127, -1e30, -np.inf, np.nan, -126.5], np.float32)
    found = apply(_exp2_all, edges)
    assert found.tolist()[:6] == [1, 1, 2.0**-126, 0, 0, 0]
    assert math.isnan(found[6])
    assert 0 <= found[7] < 2.0**-126
    every = np.array([0xFFFFFFFF, 0x7FFFFFFF, 0x7FC00001, 0xFFC001FF] * 2, np.uint32).view(np.float32)
    assert np.isnan(apply(_exp2_all, every)).all()


def test_tanh() -> None:
    x = np.concatenate([np.linspace(-12, 12, 40_000), np.logspace(-30, 1, 40_000)]).astype(np.float32)
    assert ulps(apply(_tanh_all, x), np.tanh(x.astype(np.float64))) < 5
    assert np.all(np.abs(apply(_tanh_all, np.array([1e30, -1e30, np.inf, -np.inf] * 2, np.float32))) <= 1)


@njit
def _store_all(source, halves, brains, count):
    for i in range(0, count, 8):
        simd.store_f16(halves + i * 2, simd.load_f32(source + i * 4))
        simd.store_bf16(brains + i * 2, simd.load_f32(source + i * 4))


def test_rounding_to_sixteen_bits_is_torch_s() -> None:
    """Ties, numbers that overflow, infinities; NaN stays NaN."""
    bits = torch.randint(0, 2**31, (1 << 14,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    ties = torch.arange(1 << 14, dtype=torch.int32) * 0x8000 + 0x3F000000
    x = torch.cat([bits, -bits, ties, ties + 1, ties - 1]).view(torch.float32)
    halves, brains = (torch.empty(len(x), dtype=dtype) for dtype in (torch.float16, torch.bfloat16))
    _store_all(*(np.int64(each.data_ptr()) for each in (x, halves, brains)), len(x))
    for found in (halves, brains):
        assert torch.equal(found.nan_to_num(123.0), x.to(found.dtype).nan_to_num(123.0))


@njit
def _load_all(source, ones, pairs, tag):
    for i in range(0, 256, 16):
        for j in (i, i + 8):
            simd.store(ones + j * 4, stored.load(source + j, tag))
        x, y = stored.load_pair(source + i, tag)
        x, y = stored.from_pair(x, y, tag)
        simd.store(pairs + i * 4, x)
        simd.store(pairs + i * 4 + 32, y)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    ones, pairs = torch.empty(2, 256)
    _load_all(*(np.int64(x.data_ptr()) for x in (codes, ones, pairs)), stored.TAGS[dtype])
    unit = E4M3_UNIT if dtype == torch.float8_e4m3fn else 1.0
    wanted = codes.float().nan_to_num(7777.0)
    assert torch.equal((ones * unit).nan_to_num(7777.0), wanted)
    if dtype == torch.float8_e4m3fn:  # in pairs NaN is found apart
        wanted[[0x7F, 0xFF]] = torch.tensor([480.0, -480.0])
    assert torch.equal((pairs * unit).nan_to_num(7777.0), wanted)


@pytest.mark.parametrize("plainly", [False, True], ids=["as it is here", "in plain terms"])
@pytest.mark.parametrize("dtype", stored.DOTS)
def test_every_code_is_a_bfloat16(dtype: torch.dtype, plainly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 32 numbers as words for dot products; of those that are not asked for nothing is read."""
    if plainly:
        monkeypatch.setattr(simd_dots, "has_byte_tables", lambda: False)
    tag, unit = stored.DOTS[dtype], E4M3_UNIT if dtype == torch.float8_e4m3fn else 1.0

    @njit
    def load_all(one, other, words, target):
        for x in (*stored.load_words_of_two(one, other, tag), *stored.load_some_words_of_two(one, other, words, tag)):
            simd.store(target, x)
            target += 64
        for x in (*stored.load_zipped(one, other, True, tag), *stored.load_zipped(one, other, False, tag)):
            simd.store(target, x)
            target += 64

    numbers = torch.arange(256).to(torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.randn(256).to(dtype)
    for first in range(0, 256, 64):
        rows = numbers[first : first + 64].view(2, 32)
        for words in (1, 4, 15):
            found = torch.empty(8, 32, dtype=torch.bfloat16)
            load_all(*(np.int64(row.data_ptr()) for row in rows), words, np.int64(found.data_ptr()))
            wanted, low = rows.to(torch.bfloat16) / unit, [8 * lane + i for lane in range(4) for i in range(4)]
            some = torch.where(torch.arange(32) < 2 * words, wanted, 0)
            zipped = [
                torch.stack([wanted[0, lanes], second[lanes]], 1).flatten()
                for second in (wanted[1], torch.zeros(32))
                for lanes in (low, [lane + 4 for lane in low])
            ]
            expected = torch.stack([*wanted, *some, *zipped]).to(torch.bfloat16)
            assert_same_bits("words", found.nan_to_num(7777.0), expected.nan_to_num(7777.0))


EDGES = torch.tensor(
    [0.0, -0.0, 1.0, 127.0, 0.5, 1.5, -2.5, 126.5, 1e-45, -1e-40, 2**-9, 2**-10, 3 * 2**-10, 2**-17, 448.0, 464.0, 1e30]
)
BAD = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", EIGHT_BIT_FORMATS)
def test_append_to_eight_bits_is_pytorch_s(name: str, source: torch.dtype) -> None:
    """Ties, denormal numbers and scales, zeros, rows with NaN and infinities, all float32 there are a few of; behind
    strides, and rows that must stay."""
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (40, 3, 40), generator=random).to(torch.int32).view(torch.float32)
    edges = EDGES[torch.randint(len(EDGES), (80, 3, 40), generator=random)]
    tiny = torch.randn(20, 3, 40, generator=random) * 2.0 ** torch.randint(-149, 127, (20, 3, 1), generator=random)
    normal = torch.randn(60, 3, 40, generator=random)
    new = torch.cat([bits, edges, edges[:20] * 0, tiny, normal, 1000 * normal])
    rows, heads, width = (torch.randint(n, (40,), generator=random) for n in (len(new), 3, 40))
    new[rows, heads, width] = BAD[torch.randint(4, (40,), generator=random)]
    new = new.to(source)
    k, v = new[..., :16], new.transpose(0, 1).contiguous().transpose(0, 1)[..., 16:]
    slots = torch.randperm(41 * 8, generator=random)[: len(new)]
    slots[::7] = -1
    static = {}
    if name.startswith("fp8"):
        static = {"k_descale": torch.tensor([0.37, 2.0, 1e-3]), "v_descale": torch.tensor(0.7)}
    if name == "int8_kv":
        scale = torch.rand(3, 2 * 24, generator=random)[:, ::2] / 50
        scale[1, 3], scale[2, 20], scale[0, 0] = 0, 1e-40, 3e38
        static = {"v_descale": scale}
    caches = []
    for kernels in (compiled, plain):
        pages = octavo.PagedKVCache(
            num_layers=1, num_blocks=41, block_size=8, num_kv_heads=3, head_dim=16, value_dim=24, format=name
        )
        pages.pages.fill_(7)
        layer = pages.layer(0, **static)
        assert compiled.can_append(layer, k, v)
        kernels.append(layer, k, v, slots)
        if name == "int8_k":  # a NaN of 16 bits has many codes
            layer.v_cache[layer.v_cache.isnan()] = torch.nan
        caches.append(pages.pages)
    assert torch.equal(*caches)


LAYERS = [
    AttentionSpec(6, 2, 72, value_dim=40),
    AttentionSpec(4, 4, 8, value_dim=88, window_left=70, sinks=True),
    AttentionSpec(5, 1, 104, value_dim=24, logits_soft_cap=20.0, alibi="sqrt"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", LAYERS)
def test_widths_that_are_odd_multiples_of_eight(spec: AttentionSpec, dtype: torch.dtype) -> None:
    """The sixteen-wide loops leave a rest of eight in K, in V, or in both."""
    problem = build(Case("odd", spec, (1, 3, 30, 65), (150, 3, 31, 200), dtype=dtype), poison=float("nan"))
    assert_attention(problem, *attend(problem, make_plan(problem)))


@pytest.mark.parametrize("name", EIGHT_BIT_FORMATS)
@pytest.mark.parametrize("spec", LAYERS)
def test_widths_of_eight_bit_rows(spec: AttentionSpec, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the 8-bit formats, NaN in codes and scales that nobody reads. Numba serves them all."""
    monkeypatch.delattr(plain, "attend")
    case = Case("odd", spec, (1, 3, 30, 65), (150, 3, 31, 200), dtype=torch.bfloat16, kv_format=name, order="NHD")
    problem = build(case, poison=float("nan"))
    assert_attention(problem, *attend(problem, make_plan(problem)))


def test_k_and_v_of_different_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(plain, "attend")
    problem = build(Case("mixed", AttentionSpec(6, 2, 72, value_dim=40), (1, 30), (150, 31), dtype=torch.float32))
    cache = replace(problem.cache, k_cache=problem.cache.k_cache.bfloat16())
    exact = replace(problem, cache=replace(cache, k_cache=cache.k_cache.float()))
    for found, true in zip(
        attend(replace(problem, cache=cache), make_plan(problem)), attend(exact, make_plan(problem)), strict=True
    ):
        assert_within("mixed", found, true.double(), true)


WIDE = """
import llvmlite.binding
import numba
found = llvmlite.binding.get_host_cpu_features()
llvmlite.binding.get_host_cpu_features = lambda: type(found)({**found, "avx512f": True, "avx2": False})
from octavo.kernels.cpu import simd
from octavo.kernels.cpu.simd_base import WIDE
from octavo.kernels.cpu.simd_eight_bit import HAS_PAIRS
assert (WIDE, HAS_PAIRS) == (16, False)
numba.config.CPU_FEATURES = found.flatten()  # code for this machine, in vectors of two registers
import torch
from conformance.harness import attend, make_plan
from octavo.bench.cases import Case, build
from octavo.spec import AttentionSpec
from tolerance import assert_attention
torch.set_num_threads(1)
for spec, name in ((AttentionSpec(6, 2, 72, value_dim=40, window_left=33, sinks=True), "int8_per_token"),
                   (AttentionSpec(4, 1, 64, logits_soft_cap=20.0, alibi="linear"), "auto")):
    case = Case("wide", spec, (1, 30, 65), (150, 31, 200), dtype=torch.float32, kv_format=name)
    problem = build(case, poison=float("nan"))
    assert_attention(problem, *attend(problem, make_plan(problem)))
"""


def test_vectors_of_sixteen(tmp_path: Path) -> None:
    """The kernels of a machine with AVX-512, computed with two registers a vector where this one has none; and whole
    numbers multiplied in plain terms, as without AVX2."""
    run_apart(WIDE, tmp_path)


HASWELL = """
from octavo.kernels.cpu import prefill_matrix_products, simd_base
assert (simd_base.WIDE, prefill_matrix_products.UNITS) == (8, "")
import torch
from conformance.harness import attend, make_plan
from octavo.bench.cases import Case, build
from octavo.kernels.cpu import jobs
from octavo.spec import AttentionSpec
from tolerance import assert_attention
torch.set_num_threads(1)
problem = build(Case("haswell", AttentionSpec(6, 2, 72, value_dim=40), (1, 30), (150, 31)), poison=float("nan"))
assert_attention(problem, *attend(problem, make_plan(problem)))
assert set(jobs._MADE) == {
    "attend", "decode_of_bfloat16_and_bfloat16", "prefill", "load_keys_of_bfloat16", "load_values_of_bfloat16"
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other machine is x86_64")
@pytest.mark.parametrize("setting", [{"NUMBA_CPU_NAME": "haswell"}, {"NUMBA_ENABLE_AVX": "0"}], ids=str)
def test_code_for_another_machine(setting: dict[str, str], tmp_path: Path) -> None:
    """Numba may be told to compile for less than this machine has."""
    run_apart(HASWELL, tmp_path, **setting)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_begins_with_scores_of_minus_infinity(dtype: torch.dtype) -> None:
    """A row whose first tile has no weight goes on to the next."""
    problem = build(Case("minus infinity", AttentionSpec(1, 1, 8, window_left=1), (1,), (33,), dtype=dtype))
    problem.q.fill_(1)
    problem.cache.k_cache[problem.batch.block_table[0, 31 // 16], 31 % 16, 0, 0] = -torch.inf
    out, lse = attend(problem, make_plan(problem))
    assert torch.equal(out[0, 0], problem.values[0][32, 0])
    assert lse[0, 0].item() == pytest.approx((problem.keys[0][32, 0].double().sum() / math.sqrt(8)).item(), abs=1e-5)


@pytest.mark.parametrize("compiles", [True, False], ids=["Numba", "PyTorch"])
@pytest.mark.parametrize("num_tokens", [1, 20], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_scores_of_minus_infinity_has_no_weight(
    dtype: torch.dtype, num_tokens: int, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "HAS_NUMBA", compiles)
    problem = build(Case("part", AttentionSpec(2, 1, 8), (num_tokens,), (23,), 1, dtype=dtype))
    problem.q.abs_()
    for position in (2, 3, 22):
        problem.keys[0][position, 0, 5] = -torch.inf
        problem.cache.k_cache[problem.batch.block_table[0, position].long(), 0, 0, 5] = -torch.inf
    for num_splits in (1, 4, 23):
        assert_attention(problem, *attend(problem, make_plan(problem, Cut(num_splits=num_splits))))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize(("which", "bad"), [("v", torch.nan), ("v", torch.inf), ("k", torch.nan)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_is_not_a_number_stays_with_its_rows(
    dtype: torch.dtype, which: str, bad: float, group: int, window: int | None
) -> None:
    """Rows of a prefill tile share vectors of keys; a bad V (or K) reaches the rows that see it and no others."""
    spec = AttentionSpec(2 * group, 2, 16, window_left=window)
    problem = build(Case("bad", spec, (20,), (90,), 8, dtype=dtype))
    plan = make_plan(problem)
    clean, _ = attend(problem, plan)
    pages, position = getattr(problem.cache, f"{which}_cache"), 80
    pages[problem.batch.block_table[0, position // 8].long(), position % 8, 1] = bad  # of the second KV head
    rows = torch.arange(70, 90)
    sees = torch.zeros(20, 2 * group, dtype=torch.bool)
    sees[(rows >= position) & (rows - (window or 90) <= position), group:] = True
    for _ in range(3):
        dirty, _ = attend(problem, plan)
        assert not dirty[sees].isfinite().any()
        assert_within("the other rows", dirty[~sees], clean[~sees].double(), clean[~sees])


@pytest.mark.parametrize(
    ("name", "which", "dtype"),
    [
        ("fp8_e4m3", "k", torch.float32),
        ("fp8_e4m3", "k", torch.bfloat16),
        ("fp8_e4m3", "v", torch.float32),
        ("fp8_e4m3", "v", torch.bfloat16),
        ("fp8_e5m2", "v", torch.float32),
        ("fp8_e5m2", "v", torch.bfloat16),
        ("int8_kv", "k", torch.float32),
        ("int8_per_token", "v", torch.float32),
    ],
)
def test_a_bad_code_or_scale_stays_with_its_rows(name: str, which: str, dtype: torch.dtype) -> None:
    """The same where NaN is a code, or the scale of a row: of K it takes the LSE too."""
    spec = AttentionSpec(6, 2, 48)
    problem = build(Case("bad", spec, (20, 1, 1), (90, 90, 40), 8, dtype=dtype, kv_format=name))
    plan = make_plan(problem)
    clean, clean_lse = attend(problem, plan)
    position, channel, cache = 80, 5 if name == "fp8_e4m3" else slice(None), problem.cache
    for seq in (0, 1):
        block = problem.batch.block_table[seq, position // 8].long()
        if name.startswith("fp8"):
            getattr(cache, f"{which}_cache")[block, position % 8, 1, channel] = torch.nan
        else:
            getattr(cache, f"{which}_descale")[block, 1, position % 8] = torch.nan
    sees = torch.zeros(22, 6, 48, dtype=torch.bool)
    sees[10:21, 3:, channel if which == "v" else slice(None)] = True
    dirty, lse = attend(problem, plan)
    assert not dirty[sees].isfinite().any()
    assert bool(lse[10:21, 3:].isnan().all()) == (which == "k")
    like = clean.half() if name.startswith("int8") else clean  # the decode kernel computes tiles with a NaN again
    assert_within("the other numbers", dirty[~sees], clean[~sees].double(), like[~sees])
    alone = ~sees.all(2) if which == "k" else torch.ones(22, 6, dtype=torch.bool)
    assert_within("their LSE", lse[alone], clean_lse[alone].double(), clean_lse[alone])


def test_items_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts make larger items, wide heads and short prompts do not."""
    monkeypatch.delattr(plain, "attend")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    spec = AttentionSpec(8, 1, 8, window_left=200)
    problem = build(Case("many", spec, (400, 30), (500, 300), 8, dtype=torch.float32))
    plan = make_plan(problem)
    assert_attention(problem, *attend(problem, plan))
    rows = [work.prefill[2] * spec.group_size for work in plan.memo.values() if isinstance(work, compiled.Work)]
    assert rows == [compiled.MOST_TILE_ROWS]
    assert compiled._tile_rows(spec, 30) == compiled.LEAST_TILE_ROWS
    assert compiled._tile_rows(replace(spec, head_dim=256), 400) == compiled.LEAST_TILE_ROWS


@pytest.mark.parametrize("num_tokens", [3, 20], ids=["decode", "prefill"])
@pytest.mark.parametrize("key", [-1.5e38, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_as_low_as_they_get(
    dtype: torch.dtype, key: float, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest scores still weigh; where all are -inf, nothing does, which is not a number and not a row of zeros."""
    monkeypatch.delattr(plain, "attend")
    spec = AttentionSpec(2, 1, 8, softmax_scale=1.0)
    problem = build(Case("low", spec, (num_tokens,), (num_tokens,), 8, dtype=dtype))
    problem.q.zero_()[..., 0] = 1
    problem.cache.k_cache.zero_()[..., 0] = key
    if math.isinf(key):
        out, lse = torch.empty(num_tokens, 2, 8, dtype=dtype), torch.empty(num_tokens, 2)
        octavo.run(make_plan(problem), spec, problem.q, problem.cache, out, lse)
        assert out.isnan().all()
        assert bool((lse == -math.inf).all())
    else:
        assert_attention(problem, *attend(problem, make_plan(problem)))


def test_kernels_are_kept_on_disk_until_their_sources_change(tmp_path: Path) -> None:
    """Numba watches one file; ours call functions of others."""
    package = Path(octavo.__file__).parent
    shutil.copytree(package, tmp_path / "octavo", ignore=shutil.ignore_patterns("__pycache__"))
    code = """
import sys
from octavo.kernels.cpu import jobs
for name in sys.argv[1:]:
    function = jobs._functions()[name]
    print(jobs.cfunc(jobs.signature_of(function), cache=True, **jobs.COUNTING)(function).cache_hits)
"""
    env = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def hits(*names: str) -> list[str]:
        command = [sys.executable, "-c", code, *names]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()

    names = ("merge", "decode_of_int8_and_float32", "load_values_of_int8")
    assert [hits(*names), hits(*names)] == [["0"] * 3, ["1"] * 3]
    with (tmp_path / "octavo/kernels/cpu/simd.py").open("a") as source:
        source.write("# changed\n")
    assert hits("merge") == ["0"]


@pytest.mark.parametrize("fact", ["WIDE", "IS_ZEN", "HAS_PAIRS"])
def test_code_for_another_answer_is_other_code(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba may find the same machine where the kernels are told another one: tiles of two widths must never meet."""
    before = jobs._checksum()
    monkeypatch.setattr(jobs, fact, 24 if fact == "WIDE" else not getattr(jobs, fact))
    assert jobs._checksum() != before


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_is_pytorch_s(sinks: bool, dtype: torch.dtype) -> None:
    """Empty parts (whose output may be anything), rows without any key, strides, and rows that must stay."""
    random = torch.Generator().manual_seed(0)
    out = torch.randn(9, 3, 4, 24, generator=random).transpose(0, 1)[..., 8:]  # [3, 9, 4, 16]
    lse = 4 * torch.randn(3, 9, 4, generator=random)
    lse[1, :4] = lse[:, 5, 1] = -torch.inf
    out[1, :4], out[:, 5, 1] = torch.nan, torch.inf
    given = torch.randn(4, generator=random) if sinks else None
    results = []
    for kernels in (compiled, plain):
        result = State(torch.full((1, 9, 4, 16), 7, dtype=dtype), torch.full((1, 9, 4), 7.0))
        kernels.merge(State(out, lse), given, result, 8)
        results.append(result)
    (found, found_lse), (true, true_lse) = results
    assert_within("out", found, true.double(), true)
    assert_within("lse", found_lse, true_lse.double(), true_lse)
    assert bool((found[0, 8] == 7).all())
    assert bool((found_lse[0, 8] == 7).all())


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_append_is_pytorch_s(source: torch.dtype, target: torch.dtype, layout: str) -> None:
    random = torch.Generator().manual_seed(0)
    new = torch.randn(2, 50, 3, 48, generator=random).to(source)
    k, v = new[0, :, :, :16], new[1].transpose(0, 1).contiguous().transpose(0, 1)[..., 16:40]
    slots = torch.randperm(64, generator=random)[:45]
    slots[::7] = -1
    caches = []
    for kernels in (compiled, plain):
        cache = octavo.PagedKVCache(
            num_layers=1,
            num_blocks=8,
            block_size=8,
            num_kv_heads=3,
            head_dim=16,
            value_dim=24,
            dtype=target,
            layout=layout,
        ).layer(0)
        cache.k_cache.fill_(7), cache.v_cache.fill_(7)
        kernels.append(cache, k[:45], v[:45], slots)
        caches.append(cache)
    assert_same_bits("k", caches[0].k_cache, caches[1].k_cache)
    assert_same_bits("v", caches[0].v_cache, caches[1].v_cache)
    assert int((caches[0].k_cache[:, :, 0, 0] != 7).sum()) == int((slots >= 0).sum())


def test_what_the_compiled_kernels_do_not_serve_goes_to_pytorch() -> None:
    """Rows that are not contiguous, widths that are no multiple of eight."""
    cache = octavo.PagedKVCache(
        num_layers=1, num_blocks=2, block_size=4, num_kv_heads=1, head_dim=8, value_dim=12, dtype=torch.float32
    ).layer(0)
    new, slots = torch.randn(2, 1, 12, generator=torch.Generator().manual_seed(0)), torch.tensor([5, 2])
    assert not compiled.can_append(cache, new[..., :8], new)
    cpu.append(cache, new[..., :8], new, slots)
    assert torch.equal(cache.v_cache.flatten(0, 1)[slots], new)
    outs = torch.randn(2, 3, 1, 12, generator=torch.Generator().manual_seed(0))
    merged, _ = octavo.merge_states(outs, torch.zeros(2, 3, 1))
    assert_within("merged", merged, outs.double().mean(0), outs.mean(0))
