"""Versions of the distributions that are measured."""

from __future__ import annotations

from importlib import metadata


def version(distribution: str) -> str | None:
    """The version of a distribution; None: it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
