"""`octavo doctor`: what this machine has, what Octavo supports on it, and why not where it does not.

Every answer about support is the code's own: `Backend.supports` and `kernels.unsupported`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import octavo
from octavo import kernels
from octavo.backend import AttentionKind, Backend
from octavo.cache import Order
from octavo.cpus import usable_cpus
from octavo.plugins.transformers import status as transformers_status
from octavo.plugins.vllm import status as vllm_status
from octavo.spec import AttentionSpec

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "numpy",
    "numba",
    "triton",
    "matplotlib",
    "vllm",
)
BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
HEAD_DIMS = (8, 32, 64, 80, 96, 100, 128, 192, 256, 512, 576)
FEATURES: dict[str, dict[str, Any]] = {
    "grouped queries": {"num_q_heads": 8},
    "value dim of its own": {"value_dim": 32},
    "window": {"window_left": 127},
    "soft cap": {"logits_soft_cap": 50.0},
    "ALiBi": {"alibi": "linear"},
    "ALiBi of the square root": {"alibi": "sqrt"},
    "sinks": {"sinks": True},
}
"""Parts of an AttentionSpec that differ from the ordinary one."""

SAMPLE_MODEL = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128}
"""A model of common sizes, for which pages are counted."""

_SPEC: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 4, "head_dim": 64}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> int:
    """Show devices, versions, kernels, and what is supported here."""
    facts = {
        "versions": versions(),
        "devices": devices(),
        "backends": backends(),
        "support": support(),
        "pages": pages(),
        "integrations": integrations(),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts, Console(highlight=False))
    return 0


def versions() -> dict[str, str | None]:
    """Versions of Octavo, Python and the packages that it can use, read and not imported; None: not there."""
    found: dict[str, str | None] = {"octavo": octavo.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def devices() -> dict[str, Any]:
    """The processor, and the CUDA devices or why there is none."""
    cpu = {
        "model": _cpu_model(),
        "logical_cpus": os.cpu_count(),
        "usable_cpus": usable_cpus(),
        "torch_threads": torch.get_num_threads(),
        "instruction_sets": _instruction_sets(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }
    cuda: list[dict[str, Any]] = []
    reason = None
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA"
    elif not torch.cuda.is_available():
        reason = f"torch is built for CUDA {torch.version.cuda}, and finds no device or driver"
    else:
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            cuda.append(
                {
                    "name": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "memory_bytes": properties.total_memory,
                    "processors": properties.multi_processor_count,
                }
            )
    return {"cpu": cpu, "cuda": cuda, "cuda_reason": reason}


def _instruction_sets() -> list[str]:
    """What torch's own kernels use, then the extensions for narrow types that it reports."""
    reported = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    narrow = (
        "avx512_vnni",
        "avx_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "amx_bf16",
        "amx_int8",
        "dotprod",
        "bf16",
    )
    return [torch.backends.cpu.get_cpu_capability(), *(name for name in narrow if reported.get(name) is True)]


def _cpu_model() -> str:
    with suppress(OSError):  # not every system has the file
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def backends() -> list[dict[str, Any]]:
    """The kernel families, each asked about its own kind of device; `reason` None: available."""
    rows: list[dict[str, Any]] = [{"name": "reference", "device": "any", "reason": None, "note": None}]
    for name in kernels.BACKENDS:
        device = torch.device("cpu" if name == "cpu" else "cuda")
        reason = kernels.unsupported(AttentionSpec(**_SPEC), device, torch.float32, name)
        rows.append({"name": name, "device": device.type, "reason": reason, "note": _note(name)})
    return rows


def _note(backend: str) -> str | None:
    """How an available family runs here."""
    if backend != "cpu":
        return None
    if importlib.util.find_spec("numba") is not None:
        return "decode in Numba, prefill in PyTorch"
    return "all in PyTorch; decode is faster in Numba: pip install 'octavo[cpu]'"


def support() -> list[dict[str, Any]]:
    """What `Backend` serves on each device, one option at a time; `reason` None: served."""
    places = [torch.device("cpu")]
    if torch.cuda.is_available():
        places.append(torch.device("cuda", 0))
    return [
        {"device": str(device), "option": option, "value": value, "reason": reason}
        for device in places
        for option, value, reason in _answers(device)
    ]


def _answers(device: torch.device) -> Iterator[tuple[str, str, str | None]]:
    def ask(
        spec: dict[str, Any] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        kv_format: str = "auto",
        block_size: int = Backend.preferred_block_size,
        kind: AttentionKind = "decoder",
    ) -> str | None:
        try:
            wanted = AttentionSpec(**(_SPEC | (spec or {})))
        except ValueError as error:
            return str(error)
        return Backend.supports(
            spec=wanted, dtype=dtype, device=device, kv_format=kv_format, block_size=block_size, kind=kind
        )

    for kind in Backend.kinds:
        yield "attention kind", kind, ask({"causal": kind == "decoder"}, kind=kind)
    for name, spec in FEATURES.items():
        yield "feature", name, ask(spec)
    for dtype in Backend.dtypes:
        yield "dtype", str(dtype).removeprefix("torch."), ask(dtype=dtype)
    for kv_format in Backend.kv_formats:
        yield "cache format", kv_format, ask(kv_format=kv_format)
    for order in Backend.layouts:
        yield "page layout", order, _page_layout_reason(order)
    for block_size in BLOCK_SIZES:
        yield "block size", str(block_size), ask(block_size=block_size)
    for head_dim in HEAD_DIMS:
        yield "head dim", str(head_dim), ask({"head_dim": head_dim})


def pages() -> list[dict[str, Any]]:
    """What each format's pages take, for the sizes of `SAMPLE_MODEL`."""
    spec = AttentionSpec(SAMPLE_MODEL["num_kv_heads"], SAMPLE_MODEL["num_kv_heads"], SAMPLE_MODEL["head_dim"])
    block_size, rows = Backend.preferred_block_size, []
    for kv_format in Backend.kv_formats:
        if kv_format == "auto":
            continue
        layer = Backend.page_layout(spec, torch.bfloat16, kv_format, block_size).page_bytes
        page = SAMPLE_MODEL["num_layers"] * layer
        rows.append(
            {"kv_format": kv_format, "bytes_per_token": page / block_size, "pages_per_gib": 2**30 // page}
            | {"tokens_per_gib": 2**30 // page * block_size}
        )
    return rows


def integrations() -> list[dict[str, Any]]:
    """The engines that Octavo plugs into; `reason`: why one would run without it, None: it would not."""
    found = vllm_status.version()
    return [
        {
            "name": "vLLM",
            "version": None if found is None else found[1],
            "reason": vllm_status.why_inactive(),
            "how": vllm_status.HOW_TO_ASK,
        },
        {
            "name": "Transformers",
            "version": transformers_status.version(),
            "reason": transformers_status.why_inactive(),
            "how": f"{transformers_status.note()}; {transformers_status.HOW_TO_ASK}",
        },
    ]


def _page_layout_reason(order: Order) -> str | None:
    try:
        Backend.page_layout(AttentionSpec(**_SPEC), torch.float32, "auto", Backend.preferred_block_size, order)
    except ValueError as error:
        return str(error)
    return None


def _show(facts: dict[str, Any], console: Console) -> None:
    """The facts as tables. Reasons are plain text, never markup."""
    cpu, cuda = facts["devices"]["cpu"], facts["devices"]["cuda"]
    table = _table("Devices", "device", "facts")
    _row(
        table,
        "cpu",
        f"{cpu['model']}, {cpu['usable_cpus']} of {cpu['logical_cpus']} CPUs usable, "
        f"torch threads: {cpu['torch_threads']}, {', '.join(cpu['instruction_sets'])}, "
        f"{_gib(cpu['memory_bytes'])}",
    )
    for i, gpu in enumerate(cuda):
        _row(
            table,
            f"cuda:{i}",
            f"{gpu['name']}, capability {gpu['capability']}, {gpu['processors']} multiprocessors, "
            f"{_gib(gpu['memory_bytes'])}",
        )
    if not cuda:
        _row(table, "cuda", f"none: {facts['devices']['cuda_reason']}")
    console.print(table)
    table = _table("Versions", "package", "version")
    for package, version in facts["versions"].items():
        _row(table, package, version or "not installed")
    console.print(table)
    table = _table("Kernels", "backend", "device", "state")
    for row in facts["backends"]:
        _row(table, row["name"], row["device"], row["reason"] or ": ".join(filter(None, ("available", row["note"]))))
    console.print(table)
    table = _table("Integrations", "engine", "version", "state")
    for row in facts["integrations"]:
        state = f"found: {row['how']}" if row["reason"] is None else f"runs without Octavo: {row['reason']}"
        _row(table, row["name"], row["version"] or "not installed", state)
    console.print(table)
    table = _table("Support", "device", "option", "served", "not served")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in facts["support"]:
        groups.setdefault((row["device"], row["option"]), []).append(row)
    for (device, option), rows in groups.items():
        served = ", ".join(row["value"] for row in rows if row["reason"] is None)
        refused = ", ".join(row["value"] for row in rows if row["reason"] is not None)
        _row(table, device, option, served, refused)
    console.print(table)
    sample = f"{SAMPLE_MODEL['num_layers']} layers of {SAMPLE_MODEL['num_kv_heads']} KV heads of "
    sample += f"{SAMPLE_MODEL['head_dim']}, pages of {Backend.preferred_block_size} tokens"
    table = _table(f"Cache of a model of {sample}", "format", "bytes a token", "pages per GiB", "tokens per GiB")
    for row in facts["pages"]:
        figures = (row["bytes_per_token"], row["pages_per_gib"], row["tokens_per_gib"])
        _row(table, row["kv_format"], *(f"{figure:,.0f}" for figure in figures))
    console.print(table)
    for row in facts["support"]:
        if row["reason"] is not None:
            what = f"{row['device']}, {row['option']} {row['value']}"
            console.print(Text.assemble((what, "bold"), f": {row['reason']}"), soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _row(table: Table, *cells: str) -> None:
    table.add_row(*(Text(cell) for cell in cells))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB memory"
