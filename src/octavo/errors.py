"""Refusals that carry their reason."""

from __future__ import annotations


class Unsupported(ValueError):
    """A combination that Octavo refuses.

    The message is the reason, in words that a user can act on. Wrong arguments (shapes, dtypes,
    values out of range) are plain `ValueError` or `TypeError`; `Unsupported` says that the arguments
    make sense and that this backend, device or format cannot serve them.
    """
