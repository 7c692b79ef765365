"""Code in a process of its own, whose kernels are compiled for it alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_apart(code: str, cache: Path, *arguments: str, **settings: str) -> None:
    """Run code that may import what tests may; kernels are kept in `cache`, compiled quickly and not made quick.

    settings: of the environment.
    """
    tests = Path(__file__).parent
    path = f"{tests.parent / 'src'}:{tests}"
    environment = {"PYTHONPATH": path, "NUMBA_CACHE_DIR": str(cache), "NUMBA_OPT": "0", **settings}
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=300, env=environment)
