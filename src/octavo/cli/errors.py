"""How a command says that it cannot be run as it was asked for."""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""Exit code of a command that the user ended with Ctrl-C."""


class CommandError(Exception):
    """Wrong use of a command: ends it with the message and exit code 2."""


def print_error(message: str) -> None:
    """One line on standard error, whatever the message holds."""
    print("error:", " ".join(message.split()), file=sys.stderr)
