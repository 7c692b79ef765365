"""What `octavo calibrate` and `octavo eval` have in common: the text, the model, a bar of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.cli.errors import CommandError
from octavo.cli.show import loading, quieten_transformers

if TYPE_CHECKING:
    from octavo.engine.models import LoadedModel

SHIPPED = "Alice's Adventures in Wonderland, chapters I to III (shipped)"
DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Source:
    """A text and where it comes from."""

    text: str
    name: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_text(path: Path | None) -> Source:
    """The text of a file; None: the one that ships with the package.

    Raises:
        CommandError: the file cannot be read, is no UTF-8 text or is empty.
    """
    if path is None:
        from octavo.engine.scoring import shipped_text

        return Source(shipped_text(), SHIPPED)
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise CommandError(f"--text {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"--text {path} is no UTF-8 text: {error}") from error
    if not text.strip():
        raise CommandError(f"--text {path} holds no text")
    return Source(text, path.name)


def load_model(console: Console, model: str, dtype: str, device: str | None) -> LoadedModel:
    """The model and its tokenizer.

    Raises:
        CommandError: a package is missing, or the model cannot be loaded.
    """
    with loading(console, model):
        try:
            from octavo.engine.device import best_device
            from octavo.engine.models import load  # loads Transformers, which takes seconds

            quieten_transformers()
            return load(model, dtype=dtype, device=device or best_device())
        except ImportError as error:
            raise CommandError(f"{error}; install it with: pip install 'octavo[models,cpu]'") from error
        except ValueError as error:
            raise CommandError(str(error)) from error


def context_of(loaded: LoadedModel, wanted: int | None) -> int:
    """Tokens of a window: what is wanted, else DEFAULT_CONTEXT or what the model allows.

    Raises:
        CommandError: more than the model has positions for.
    """
    longest = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        return DEFAULT_CONTEXT if longest is None else min(DEFAULT_CONTEXT, longest)
    if longest is not None and wanted > longest:
        raise CommandError(f"--context must be at most {longest}, the model's positions, got {wanted}")
    return wanted


@contextmanager
def token_bar(console: Console, what: str, num_tokens: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; to be fed with numbers of tokens."""
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("", total=num_tokens)
    with bar:
        yield lambda done: bar.advance(task, done)
