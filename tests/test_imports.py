"""Imports point one way (ARCHITECTURE section 2), and `import octavo` loads no optional package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "octavo"

FACTS = {"errors", "checks", "spec", "formats", "cache", "batch", "launch"}
"""What everything above the kernels may name."""

BELOW_THE_BACKEND = FACTS | {"planner", "run"}

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "spec": set(),
    "distributed": set(),
    "formats": {"errors"},
    "quantise": {"formats"},
    "checks": set(),
    "cpus": set(),
    "rotation": set(),
    "batch": {"checks", "spec"},
    "cache": {"checks", "errors", "formats"},
    "launch": {"checks", "spec"},
    "reference": {"spec", "batch", "cache", "quantise"},
    "scales": {"formats"},
    "calibration": FACTS | {"quantise", "scales"},
    "kernels": {"cpus", "errors", "spec", "formats", "launch", "quantise"},
    "planner": {"checks", "launch", "batch", "spec", "formats", "kernels"},
    "run": {"checks", "errors", "launch", "kernels", "distributed", "cache", "formats", "spec"},
    "warm_up": {"batch", "cache", "launch", "planner", "run", "spec", "kernels"},
    "ops": {"cache", "launch", "run", "spec"},
    "functional": BELOW_THE_BACKEND | {"kernels", "reference"},
    "backend": BELOW_THE_BACKEND | {"kernels", "rotation", "warm_up"},
    "bench": BELOW_THE_BACKEND | {"cpus", "reference", "quantise"},
    "plugins": BELOW_THE_BACKEND | {"attention_call", "backend", "dense", "rotation", "scales"},
    "attention_call": {"errors", "spec"},
    "dense": BELOW_THE_BACKEND,
    "engine": BELOW_THE_BACKEND | {"attention_call", "backend", "calibration", "rotation", "scales"},
    # `doctor` prints what the public package, the backend and the dispatch say of themselves.
    "cli": FACTS | {"bench", "cpus", "scales", "engine", "plugins", "backend", "kernels", ""},
    "__main__": {"cli"},
}
"""Part (module or package of octavo) to the parts that it may import ("": the public package).
A package may import its own modules."""

OPEN_TO_ALL = {"cli", "engine", "bench", "plugins", "calibration", "scales"}
"""Parts that may import more than torch and the standard library."""

KERNEL_PACKAGES = {"triton": {"triton"}, "gluon": {"triton"}, "cpu": {"numpy", "numba", "llvmlite"}}
"""What a kernel family may import besides, once it is chosen."""


def files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file loads when run; `if TYPE_CHECKING` blocks load nothing."""
    package = ["octavo", *path.relative_to(SOURCE).parts[:-1]]

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from visit(child)
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from octavo import run` loads octavo.run.
            yield from (f"{module}.{alias.name}" if module == "octavo" else module for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")))


def part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    own = part(path)
    assert own in ALLOWED, f"{own} is new: say in this test what it may import"
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "octavo":
            target = rest.split(".")[0]
            allowed = ALLOWED[own] | {own}
            assert target in allowed, f"{own} imports {name}; it may import octavo's {sorted(allowed)}"
            inside = path.relative_to(SOURCE).parts[1:]
            if own == target == "kernels" and len(inside) > 1 and "." in rest:
                family = rest.split(".")[1]
                assert family == inside[0], f"kernels/{inside[0]} imports {name}, of another family"
        elif own not in OPEN_TO_ALL and top not in sys.stdlib_module_names:
            extra = KERNEL_PACKAGES.get(path.relative_to(SOURCE).parts[1], set()) if own == "kernels" else set()
            assert top in {"torch", *extra}, f"{own} imports {top}; it may use torch and the standard library"


def test_the_walk_finds_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also inside functions, relative ones, and names taken from the package; none for types only."""
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    path = tmp_path / "kernels" / "cpu" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "from . import merge\nfrom ..triton.common import tile\nfrom octavo import run\n"
        "if TYPE_CHECKING:\n    import vllm\n"
        "def f():\n    import numpy.linalg\n"
    )
    assert list(imports(path)) == [
        "typing",
        "octavo.kernels.cpu",
        "octavo.kernels.triton.common",
        "octavo.run",
        "numpy.linalg",
    ]


def test_import_octavo_loads_nothing_optional() -> None:
    """What torch loads does not count; besides it only the library and the standard library."""
    program = "import sys, torch; before = set(sys.modules)\nimport octavo\nprint(*sorted(set(sys.modules) - before))\n"
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(SOURCE.parent)},
    )
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert "octavo" in loaded
    assert loaded - sys.stdlib_module_names - {"torch", "octavo"} == set()
    assert not loaded & {"numpy", "transformers", "triton", "vllm", "matplotlib", "typer", "rich"}
    parts = {name.split(".")[1] for name in result.stdout.split() if name.startswith("octavo.")}
    assert not parts & {"engine", "bench", "plugins", "cli"}
