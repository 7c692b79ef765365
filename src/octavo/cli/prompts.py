"""From what the user wrote to what the engine reads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.errors import CommandError
from octavo.engine.errors import RequestError

if TYPE_CHECKING:
    from octavo.engine.llm import LLM, Prompt

DEFAULT_PROMPT = "Describe a library at night in one paragraph."


def read_prompts(arguments: Sequence[str], file: str | None) -> list[str]:
    """The prompts: the arguments, the lines of `file` ("-": standard input), or the built-in one.

    Raises:
        CommandError: both are given, or the file cannot be read or holds no prompt.
    """
    if file is None:
        return list(arguments) or [DEFAULT_PROMPT]
    if arguments:
        raise CommandError("prompts come from the arguments or from --file; give one of them")
    name = "standard input" if file == "-" else file
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except OSError as error:
        raise CommandError(f"{name} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"{name} is no UTF-8 text: {error}") from error
    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise CommandError(f"{name} holds no prompt; write one a line")
    return prompts


def encode(llm: LLM, text: str, system: str | None, chat: bool) -> Prompt | RequestError:
    """A prompt as the engine reads it (a chat's tokens, or the text itself), or why it cannot be one."""
    if not text:
        return RequestError("the prompt is empty; give it at least one character")
    if not chat:
        return text
    messages = [] if system is None else [{"role": "system", "content": system}]
    try:
        return llm.chat_prompt([*messages, {"role": "user", "content": text}])
    except RequestError as error:
        return error
