"""What a measurement says: one row for each provider, case and number of threads, as CSV and as tables."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from octavo.bench.cases import Case

Kind = Literal["decode", "prefill"]
Outcome = Literal["timed", "wrong", "unsupported", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a provider did on a case with one number of threads. The fields are the columns of the CSV file.

    A figure that does not exist is None, and an empty cell. GB and GFLOP are 10**9; us is a millionth of a second.

    Args:
        case: the case's name.
        kind: "decode": no sequence has more than one new token, and reading K and V is the work; else "prefill".
        provider: the provider's name.
        variant: in which form it computes the case, with its version where it is neither Octavo nor torch.
        outcome: "timed"; "wrong": its output was, so it was not timed; "unsupported"; "failed": it raised an error.
        reason: why it was not timed.
        device: name of the processor.
        cores: CPUs that the process may use.
        threads: what torch's number of threads was set to.
        dtype: of q, K, V and the output: bf16, fp16 or fp32.
        lengths: new tokens and keys of the sequences.
        rounds: how often it was timed.
        median_us, min_us, max_us: of one call.
        times_octavo: median / Octavo's median in the same rounds.
        kv_bytes: K and V that some row sees, each sequence by itself.
        gb_per_s: decode: kv_bytes / median.
        read_gb_per_s: decode: a linear read of memory on `threads` threads in the same rounds, median (without
            Numba it is torch's sum).
        read_one_gb_per_s: the same on one thread (without Numba there is none, unless `threads` is 1).
        read_share: decode: gb_per_s / read_gb_per_s.
        flops: 2 * (head_dim + value_dim) for each (row, query head, key that the row sees).
        gflop_per_s: prefill: flops / median.
        error, allowed_error: against float64, at the value that was nearest to its limit or furthest past it.
        octavo, torch, numba: versions.
    """

    case: str
    kind: Kind
    provider: str
    variant: str | None = None
    outcome: Outcome = "timed"
    reason: str | None = None
    device: str
    cores: int
    threads: int
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
    flops: int
    gflop_per_s: float | None = None
    error: float | None = None
    allowed_error: float | None = None
    octavo: str
    torch: str
    numba: str | None


HEADER = tuple(field.name for field in fields(Row))


def check_csv(path: Path) -> None:
    """Refuse a file that rows cannot be appended to.

    Raises:
        ValueError: it has other columns.
        OSError: it cannot be read, or there is no folder for it.
    """
    if not path.exists():
        path.parent.resolve(strict=True)
        return
    with path.open(newline="", encoding="utf-8") as file:
        header = next(csv.reader(file), None)
    if header is not None and tuple(header) != HEADER:
        raise ValueError(f"{path} has other columns than these rows (its first is {header[:1]}); give a new file")


def append_csv(path: Path, rows: Sequence[Row]) -> None:
    """Append rows, after the header where the file is new or empty.

    Raises:
        ValueError, OSError: as `check_csv`, or the file cannot be written.
    """
    check_csv(path)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow(HEADER)
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
    """A table for decode and one for the rest, as far as there are rows for them."""
    rates = {"decode": ("GB/s of K and V", "of linear read"), "prefill": ("GFLOP/s",)}
    made = []
    for kind, columns in rates.items():
        mine = [row for row in rows if row.kind == kind]
        if not mine:
            continue
        table = Table(title=f"{kind.capitalize()} on {mine[0].device}", title_justify="left")
        for column in ("case", "threads", "provider", "as"):
            table.add_column(column, overflow="fold")
        for column in ("median us", "min to max", "Octavo is", *columns, "error of allowed"):
            table.add_column(column, justify="right")
        for (case, dtype, threads), group in groupby(mine, key=lambda row: (row.case, row.dtype, row.threads)):
            heads = [f"{case} {dtype}", str(threads)]
            for row in group:
                table.add_row(*(Text(cell) for cell in heads + _cells(row)))
                heads = ["", ""]
            table.add_section()
        made.append(table)
    return made


def _cells(row: Row) -> list[str]:
    """A row of a table, after the case and the threads; what is not there is an empty cell."""
    ratio = None if row.provider == "octavo" else row.times_octavo
    read = "" if row.read_gb_per_s is None else f" of {row.read_gb_per_s:.1f}"
    rates = {
        "decode": [f"{_number(row.gb_per_s, '.1f')}{read}", _number(row.read_share, ".0%")],
        "prefill": [_number(row.gflop_per_s, ".1f")],
    }
    span = "" if row.min_us is None else f"{row.min_us:,.0f} to {row.max_us:,.0f}"
    errors = "" if row.error is None else f"{row.error:.2g} of {row.allowed_error:.2g}"
    return [
        row.provider,
        (row.variant or "") if row.reason is None else f"{row.outcome}: {row.reason}",
        _number(row.median_us, ",.0f"),
        span,
        "" if ratio is None else f"{ratio:.2f}x",
        *rates[row.kind],
        errors,
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
