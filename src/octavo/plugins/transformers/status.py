"""Whether Transformers here can run with Octavo, read from what is installed; Transformers is not imported."""

from __future__ import annotations

from importlib import metadata

OLDEST, NEWEST = (5, 17), (5, 24)
"""Versions of Transformers, as (major, minor), that the plug-in is tested with."""

HOW_TO_ASK = 'models use Octavo after octavo.plugins.transformers.register(), with attn_implementation="octavo"'


def version() -> str | None:
    """The version that is installed; None: none is."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


def why_inactive() -> str | None:
    """Why Transformers cannot run with Octavo; None: it can."""
    found = version()
    if found is None:
        return "Transformers is not installed: pip install 'octavo[models]'"
    if _numbers(found) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"Octavo needs Transformers {oldest} or newer, this is {found}: pip install -U transformers"
    return None


def note() -> str:
    """What to know of a version that can run with Octavo."""
    found = version()
    if found is not None and _numbers(found) in (OLDEST, NEWEST):
        return "a tested version"
    return f"not a tested version, which are {' and '.join('.'.join(map(str, x)) for x in (OLDEST, NEWEST))}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
