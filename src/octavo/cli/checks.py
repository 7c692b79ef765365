"""What can be refused before a model is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from octavo import kernels
from octavo.cli.errors import CommandError
from octavo.errors import Unsupported
from octavo.formats import FLOAT_FORMATS, KVFormat, how_to_calibrate

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size such as 512MiB, 2GiB, 1.5GB or 1000000.

    Raises:
        CommandError: it is not a size, or less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise CommandError(f"{text!r} is not a size; write it as 512MiB, 2GiB, 1.5GB or a number of bytes")
    base = 1024 if match[3] else 1000
    size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if size < 1:
        raise CommandError(f"a size must be at least one byte, got {text!r}")
    return size


def check_early(
    dtype: str, kv_format: str, device: str | None, *, kv_scales: Path | None = None, model: str = "MODEL"
) -> None:
    """Check names that the engine would refuse only after it has loaded the model.

    Args:
        kv_scales: the file of the format's scales; None: there is none.
        model: its name, for the command that would make them.

    Raises:
        CommandError: a name is unknown, or cannot be served.
    """
    if dtype != "auto" and dtype not in FLOAT_FORMATS:
        raise CommandError(f"unknown dtype {dtype!r}; known dtypes: auto, {', '.join(FLOAT_FORMATS)}")
    try:
        parsed = KVFormat.parse(kv_format, FLOAT_FORMATS.get(dtype, torch.float32))
    except ValueError as error:
        raise CommandError(str(error)) from error
    if parsed.v_scaled_by_channel and kv_scales is None:
        raise CommandError(f"cache format {kv_format} needs the model's scales: {how_to_calibrate(model)}")
    if device is None:
        return
    try:
        kernels.for_device(torch.device(device))
    except Unsupported as error:
        raise CommandError(str(error)) from error
    except RuntimeError as error:  # torch's answer to a name that it does not know
        raise CommandError(f"unknown device {device!r}; give cpu or cuda") from error
