"""What a measurement says: one row for each provider, case and number of threads, as CSV and as tables."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from octavo.bench.cases import Case

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Kind = Literal["decode", "prefill"]
Outcome = Literal["timed", "wrong", "unsupported", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a provider did on a case, on a CPU with one number of threads. The fields are the columns of the CSV file.

    A figure that does not exist is None, and an empty cell. GB and GFLOP are 10**9; us is a millionth of a second.

    Args:
        case: the case's name.
        kind: "decode": no sequence has more than one new token, and reading K and V is the work; else "prefill".
        provider: the provider's name.
        variant: in which form it computes the case, with its version where it is neither Octavo nor torch.
        outcome: "timed"; "wrong": its output was, so it was not timed; "unsupported"; "failed": it raised an error.
        reason: why it was not timed.
        device: name of the processor or of the GPU.
        cores: CPUs that the process may use.
        threads: CPU: what torch's number of threads was set to.
        layers: GPU: how many layers with inputs of their own a CUDA graph has; times are of one layer.
        dtype: of q, K, V and the output: bf16, fp16 or fp32.
        lengths: new tokens and keys of the sequences.
        rounds: how often it was timed.
        median_us, min_us, max_us: of one call.
        times_octavo: median / Octavo's median in the same rounds.
        kv_bytes: K and V that some row sees, each sequence by itself.
        gb_per_s: decode: kv_bytes / median.
        read_gb_per_s: decode, CPU: a linear read of memory on `threads` threads in the same rounds, median (without
            Numba it is torch's sum).
        read_one_gb_per_s: the same on one thread (without Numba there is none, unless `threads` is 1).
        read_share: decode, CPU: gb_per_s / read_gb_per_s.
        copy_gb_per_s: decode, GPU: a copy within its memory in the same rounds, bytes read and written, median.
        copy_share: decode, GPU: gb_per_s / copy_gb_per_s.
        flops: 2 * (head_dim + value_dim) for each (row, query head, key that the row sees).
        gflop_per_s: prefill: flops / median.
        matmul_gflop_per_s: prefill, GPU: a bf16 product of 8192 x 8192 matrices in the same rounds, median.
        matmul_share: prefill, GPU: gflop_per_s / matmul_gflop_per_s.
        error, allowed_error: against float64, at the value that was nearest to its limit or furthest past it.
        octavo, torch, numba, triton: versions.
    """

    case: str
    kind: Kind
    provider: str
    variant: str | None = None
    outcome: Outcome = "timed"
    reason: str | None = None
    device: str
    cores: int
    threads: int | None = None
    layers: int | None = None
    dtype: str
    lengths: str
    rounds: int
    median_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None
    times_octavo: float | None = None
    kv_bytes: int
    gb_per_s: float | None = None
    read_gb_per_s: float | None = None
    read_one_gb_per_s: float | None = None
    read_share: float | None = None
    copy_gb_per_s: float | None = None
    copy_share: float | None = None
    flops: int
    gflop_per_s: float | None = None
    matmul_gflop_per_s: float | None = None
    matmul_share: float | None = None
    error: float | None = None
    allowed_error: float | None = None
    octavo: str
    torch: str
    numba: str | None
    triton: str | None = None


HEADER = tuple(field.name for field in fields(Row))


def check_csv(path: Path, columns: tuple[str, ...] = HEADER) -> None:
    """Refuse a file that rows with these columns cannot be appended to.

    Raises:
        ValueError: it has other columns.
        OSError: it cannot be read, or there is no folder for it.
    """
    if not path.exists():
        path.parent.resolve(strict=True)
        return
    with path.open(newline="", encoding="utf-8") as file:
        header = next(csv.reader(file), None)
    if header is not None and tuple(header) != columns:
        raise ValueError(f"{path} has other columns than these rows (its first is {header[:1]}); give a new file")


def append_csv(path: Path, rows: Sequence[DataclassInstance], columns: tuple[str, ...] = HEADER) -> None:
    """Append rows, whose fields are the columns, after the header where the file is new or empty.

    Raises:
        ValueError, OSError: as `check_csv`, or the file cannot be written.
    """
    check_csv(path, columns)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow(columns)
        writer.writerows(asdict(row).values() for row in rows)


def lengths(case: Case) -> str:
    """New tokens and keys of a case's sequences in a few words."""
    pairs = zip(case.query_lens, case.seq_lens, strict=True)
    runs = [(len(list(equal)), *pair) for pair, equal in groupby(pairs)]
    if len(runs) <= 2:
        return ", ".join(f"{count} x {new} of {keys}" for count, new, keys in runs)
    new, keys = case.query_lens, case.seq_lens
    return f"{len(new)} x {min(new)} to {max(new)} of {min(keys)} to {max(keys)}"


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table for decode and one for the rest, as far as there are rows for them; all rows are of one machine.

    The peers on a GPU are many and each serves a part of the cases: what they do not compute is left out there.
    """
    made = []
    for kind in ("decode", "prefill"):
        mine = [row for row in rows if row.kind == kind and (row.threads is not None or row.outcome != "unsupported")]
        if not mine:
            continue
        on_gpu = mine[0].threads is None
        table = Table(title=f"{kind.capitalize()} on {mine[0].device}", title_justify="left")
        for column in ("case", "layers" if on_gpu else "threads", "provider", "as"):
            table.add_column(column, overflow="fold")
        for column in ("median us", "min to max", "Octavo is", *_RATES[kind, on_gpu], "error of allowed"):
            table.add_column(column, justify="right")
        for (case, dtype, count), group in groupby(mine, key=_heading):
            heads = [f"{case} {dtype}", str(count)]
            for row in group:
                table.add_row(*(Text(cell) for cell in heads + _cells(row)))
                heads = ["", ""]
            table.add_section()
        made.append(table)
    return made


def _heading(row: Row) -> tuple[str, str, int | None]:
    """What the rows of a group have in common: case, dtype, threads or layers."""
    return row.case, row.dtype, row.layers if row.threads is None else row.threads


_RATES: dict[tuple[str, bool], tuple[str, ...]] = {
    ("decode", False): ("GB/s of K and V", "of linear read"),
    ("decode", True): ("GB/s of K and V", "of copy"),
    ("prefill", False): ("GFLOP/s",),
    ("prefill", True): ("TFLOP/s", "of matmul"),
}
"""Columns for (kind of case, whether on a GPU)."""


def _cells(row: Row) -> list[str]:
    """A row of a table, after the case and the threads; what is not there is an empty cell."""
    on_gpu = row.threads is None
    ratio = None if row.provider == "octavo" else row.times_octavo
    us = ",.1f" if on_gpu else ",.0f"
    span = "" if row.min_us is None else f"{_number(row.min_us, us)} to {_number(row.max_us, us)}"
    errors = "" if row.error is None else f"{row.error:.2g} of {row.allowed_error:.2g}"
    return [
        row.provider,
        (row.variant or "") if row.reason is None else f"{row.outcome}: {row.reason}",
        _number(row.median_us, us),
        span,
        "" if ratio is None else f"{ratio:.2f}x",
        *_rates(row, on_gpu),
        errors,
    ]


def _rates(row: Row, on_gpu: bool) -> list[str]:
    if row.kind == "decode":
        limit, share = (row.copy_gb_per_s, row.copy_share) if on_gpu else (row.read_gb_per_s, row.read_share)
        return [_of(row.gb_per_s, limit), _number(share, ".0%")]
    if on_gpu:
        return [_of(row.gflop_per_s, row.matmul_gflop_per_s, 1e3), _number(row.matmul_share, ".0%")]
    return [_of(row.gflop_per_s, None)]


def _of(value: float | None, limit: float | None, unit: float = 1.0) -> str:
    """A rate, and what it is compared with."""
    if value is None:
        return ""
    return f"{value / unit:.1f}" if limit is None else f"{value / unit:.1f} of {limit / unit:.1f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
