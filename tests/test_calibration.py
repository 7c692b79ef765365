"""Statistics of K and V, the scales that follow from them, and the file that keeps those."""

from __future__ import annotations

import dataclasses
import json
import math
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import save_file

from octavo.calibration import FP8_HEADROOM, Recorder
from octavo.formats import EIGHT_BIT_FORMATS, KVFormat
from octavo.quantise import quantise_channels
from octavo.scales import KVModel, KVScales, LayerShape, Provenance

LAYERS = (LayerShape(2, 16, 24), LayerShape(1, 8, 8))
MODEL = KVModel("a model", "0123456789abcdef", LAYERS)
ORIGIN = Provenance(40, "f" * 64, 100.0, "0.0")
INT8_KV = KVFormat.parse("int8_kv", torch.float32)


def rows(num_tokens: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer."""
    torch.manual_seed(seed)
    return [
        (torch.randn(num_tokens, x.num_kv_heads, x.head_dim), torch.randn(num_tokens, x.num_kv_heads, x.value_dim))
        for x in LAYERS
    ]


def recorded(*parts: list[tuple[torch.Tensor, torch.Tensor]]) -> Recorder:
    recorder = Recorder(LAYERS)
    for part in parts:
        for i, (k, v) in enumerate(part):
            recorder.observe(i, k, v)
    return recorder


def facts(recorder: Recorder) -> list[torch.Tensor]:
    percentiles = [recorder.v_percentile(i, p) for i in range(len(LAYERS)) for p in (60, 99, 100)]
    return [recorder.num_tokens, *recorder.k_absmax, *recorder.v_absmax, *percentiles]


def test_a_recorder_knows_maxima_exactly_and_percentiles_to_four_percent() -> None:
    parts = [rows(400, seed) for seed in range(3)]
    recorder = recorded(*parts)
    assert int(recorder.num_tokens) == 1200
    for i in range(len(LAYERS)):
        k, v = (torch.cat([part[i][j] for part in parts]).abs() for j in (0, 1))
        assert recorder.k_absmax[i].equal(k.amax(0))
        assert recorder.v_absmax[i].equal(v.amax(0))
        assert recorder.v_percentile(i, 100).equal(v.amax(0))
        for percentile in (50, 90, 99.5):
            exact = v.sort(0).values[math.ceil(1200 * percentile / 100) - 1]
            found = recorder.v_percentile(i, percentile)
            assert bool((found >= exact * 0.999).all())
            assert bool((found <= exact * 2 ** (1 / 16) * 1.001).all())


def test_recorders_merge_to_what_one_would_have_seen() -> None:
    parts = [rows(30, seed) for seed in range(3)]
    merged = recorded(parts[0])
    merged.merge(recorded(*parts[1:]))
    for ours, whole in zip(facts(merged), facts(recorded(*parts)), strict=True):
        assert ours.equal(whole)
    with pytest.raises(ValueError, match="different layers cannot merge"):
        merged.merge(Recorder(LAYERS[:1]))


def _rank(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    recorder = recorded(rows(30, rank))
    recorder.all_reduce()
    torch.save(facts(recorder), f"{folder}/{rank}")
    dist.destroy_process_group()


def test_ranks_merge_to_what_one_would_have_seen(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (port, str(tmp_path)), nprocs=2)
    whole = facts(recorded(rows(30, 0), rows(30, 1)))
    for rank in range(2):
        for ours, theirs in zip(torch.load(tmp_path / str(rank)), whole, strict=True):
            assert ours.equal(theirs)


def test_scales_of_int8_kv_reach_the_largest_v_of_each_channel() -> None:
    part = rows(40, 0)
    scales = recorded(part).scales(INT8_KV, MODEL, ORIGIN)
    assert scales.k is None
    for i, (_, v) in enumerate(part):
        _, scale = scales.of_layer(i)
        assert scale.shape == (LAYERS[i].num_kv_heads, LAYERS[i].value_dim)
        stored = quantise_channels(v, scale)
        assert stored.abs().amax(0).eq(127).all()
    lower = recorded(part).scales(INT8_KV, MODEL, dataclasses.replace(ORIGIN, percentile=60.0))
    assert bool((lower.v[0] < scales.v[0]).all())


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_scales_of_fp8_leave_headroom(name: str) -> None:
    part = rows(40, 0)
    part[1][0][:] = 0.0
    format = KVFormat.parse(name, torch.float32)
    scales = recorded(part).scales(format, MODEL, ORIGIN)
    k, v = scales.of_layer(0)
    assert torch.allclose(part[0][0].abs().amax((0, 2)) / k, torch.tensor(torch.finfo(format.k_dtype).max) / 2)
    assert FP8_HEADROOM == 2
    assert v.shape == (2,)
    assert scales.of_layer(1)[0].tolist() == [1.0]  # K that was always 0: nothing to divide by
    scales.check(MODEL, format)


def test_what_gives_no_scales() -> None:
    part = rows(40, 0)
    with pytest.raises(ValueError, match="int8_k has no static scales; int8_kv, fp8_e4m3 and fp8_e5m2 have"):
        recorded(part).scales(KVFormat.parse("int8_k", torch.float32), MODEL, ORIGIN)
    with pytest.raises(ValueError, match="no token was seen"):
        recorded().scales(INT8_KV, MODEL, ORIGIN)
    with pytest.raises(ValueError, match=r"percentile is 40.0; it must lie in \[50, 100\]"):
        recorded(part).scales(INT8_KV, MODEL, dataclasses.replace(ORIGIN, percentile=40.0))
    part[1][1][3, 0, 5] = torch.nan
    with pytest.raises(ValueError, match="V of attention layer 1 held NaN or infinities"):
        recorded(part).scales(INT8_KV, MODEL, ORIGIN)


@pytest.mark.parametrize("name", ["int8_kv", "fp8_e4m3"])
def test_a_file_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    format = KVFormat.parse(name, torch.float32)
    scales = recorded(rows(40, 0)).scales(format, MODEL, ORIGIN)
    scales.save(tmp_path / "s.safetensors")
    read = KVScales.load(tmp_path / "s.safetensors")
    assert (read.format, read.model, read.provenance) == (name, MODEL, ORIGIN)
    for i in range(len(LAYERS)):
        for ours, theirs in zip(read.of_layer(i), scales.of_layer(i), strict=True):
            assert (ours is None and theirs is None) or ours.equal(theirs)
    read.check(MODEL, format)
    with safe_open(tmp_path / "s.safetensors", framework="pt") as file:
        header = file.metadata()
    assert header["text_sha256"] == ORIGIN.text_sha256
    assert header["octavo"] == "0.0"
    assert json.loads(header["layers"])[1] == {"num_kv_heads": 1, "head_dim": 8, "value_dim": 8}


def test_files_that_hold_no_scales(tmp_path: Path) -> None:
    how = "give a file that `octavo calibrate` wrote"
    with pytest.raises(ValueError, match=f"no scales at .*nowhere: there is no such file; {how}"):
        KVScales.load(tmp_path / "nowhere")
    path = tmp_path / "x.safetensors"
    path.write_text("not at all")
    with pytest.raises(ValueError, match=f"no safetensors file .*; {how}"):
        KVScales.load(path)
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="holds no scales of this version"):
        KVScales.load(path)
    recorded(rows(40, 0)).scales(INT8_KV, MODEL, ORIGIN).save(path)
    with safe_open(path, framework="pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del tensors["layers.1.v_scale"]
    save_file(tensors, path, metadata=header)
    with pytest.raises(ValueError, match=r"damaged.*layers\.1\.v_scale"):
        KVScales.load(path)
    with pytest.raises(ValueError, match="cannot be written"):
        recorded(rows(40, 0)).scales(INT8_KV, MODEL, ORIGIN).save(tmp_path / "no" / "folder")
    with pytest.raises(ValueError, match="saved with their model and provenance"):
        KVScales("int8_kv", None, ()).save(path)


def test_a_check_names_every_mismatch() -> None:
    scales = recorded(rows(40, 0)).scales(INT8_KV, MODEL, ORIGIN)
    scales.check(MODEL, INT8_KV)
    other = KVModel("another", "fedcba9876543210", (LayerShape(4, 32, 48), LayerShape(1, 8, 8), LayerShape(1, 8, 8)))
    with pytest.raises(ValueError, match="the scales do not fit") as raised:
        scales.check(other, KVFormat.parse("fp8", torch.float32))
    for part in (
        "the scales are for 'int8_kv', the cache's format is 'fp8_e4m3'",
        "they are for 2 layers, the model has 3",
        "num_kv_heads 2 in layer 0, the model has 4",
        "head_dim 16 in layer 0, the model has 32",
        "value_dim 24 in layer 0, the model has 48",
        "another model, a model, with configuration 0123456789abcdef, another has fedcba9876543210",
    ):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (KVScales("int8_kv", None, (torch.ones(2, 24),)), "v scales are for 1 layers, the model has 2"),
        (KVScales("int8_kv", None, (torch.ones(2, 24), torch.ones(1, 9))), r"layer 1: v scales .* \(1, 8\), got"),
        (KVScales("int8_kv", None, (torch.ones(2, 24).double(), torch.ones(1, 8))), "layer 0: .* torch.float64"),
        (KVScales("int8_kv", (torch.ones(()),) * 2, None), "int8_kv has no static k scales, these have some"),
    ],
)
def test_tensors_that_do_not_fit(scales: KVScales, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scales.check(MODEL, INT8_KV)


@pytest.mark.parametrize("name", EIGHT_BIT_FORMATS)
def test_only_formats_with_static_scales_take_some(name: str) -> None:
    format = KVFormat.parse(name, torch.float32)
    scales = KVScales(name, None, (torch.ones(2, 24), torch.ones(1, 8)))
    if name == "int8_kv":
        scales.check(MODEL, format)
    else:
        with pytest.raises(ValueError, match=r"the scales do not fit: (layer 0: v scales|int8_\w+ has no static v)"):
            scales.check(MODEL, format)
