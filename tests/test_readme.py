"""What the README shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_core_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """The first block, and the one with a planner, which goes on from it."""
    scope: dict[str, object] = {}
    exec(BLOCKS[0], scope)
    assert capsys.readouterr().out.strip() == BLOCKS[0].rsplit("# ", 1)[1].strip()
    (driven,) = [block for block in BLOCKS if "octavo.Planner" in block]
    exec(driven, scope)
    assert bool(scope["out"].isfinite().all())  # type: ignore[attr-defined]


@pytest.mark.model
def test_engine_example(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in BLOCKS if "LLM" in block]
    exec(block, {})
    shown = capsys.readouterr().out
    assert "Paris" in shown
    assert len(shown.splitlines()) >= 3
