"""Triton kernels on the CPU, through Triton's interpreter. It must be on before a kernel is defined, so these
tests run in a process of their own: tests/test_interpreter.py starts it."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
