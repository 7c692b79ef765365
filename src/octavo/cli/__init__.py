"""The command line: `octavo generate`, `octavo eval`, `octavo calibrate`, `octavo bench`, `octavo warmup`,
`octavo doctor`.

Standard output carries what was asked for (text, tables, JSON), standard error everything else. Exit codes:
0, 1 (some prompts failed, or the reader of the output went away), 2 (wrong use), 130 (interrupted).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from octavo.cli.errors import INTERRUPTED, CommandError, print_error


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        argv: arguments without the program's name; None: those of the process.
    """
    try:
        import typer

        from octavo.cli.app import app
    except ImportError as error:
        print_error(f"the command line needs {error.name}; install it with: pip install 'octavo[models,cpu]'")
        return 2
    # Typer's newer versions carry a click of their own, older ones import it; both derive this class from it.
    usage_error: type[Exception] = typer.BadParameter.__bases__[0]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a model's text may hold what a terminal cannot show
    try:
        code = app(args=None if argv is None else list(argv), prog_name="octavo", standalone_mode=False)
    except CommandError as error:
        print_error(str(error))
        return 2
    except usage_error as error:
        context = getattr(error, "ctx", None)
        where = "octavo" if context is None else context.command_path
        message = error.format_message()  # type: ignore[attr-defined]
        print_error(f"{message.rstrip('.')}; see {where} --help")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return int(code or 0)
