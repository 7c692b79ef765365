"""Errors that the engine raises to its callers."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be loaded or served, with the reason and the way out."""


class RequestError(ValueError):
    """A prompt that cannot be served, with the reason and the way out; other prompts are not affected."""
