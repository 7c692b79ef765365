"""How many CPUs there are to work with."""

from __future__ import annotations

import os


def usable_cpus() -> int:
    """CPUs that this process may use: what it is bound to, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
