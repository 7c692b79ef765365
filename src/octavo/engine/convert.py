"""Convert a GGUF file to a Transformers folder, once, in seconds, and keep it in a cache.

The weights are stored so that they load exactly in any dtype: quantised tensors as the float32 values that
they stand for, 16-bit tensors as they are. They go to disk one by one, so the memory needed is that of the
largest tensor.

A folder appears under its final name only when it is complete; processes that want the same one wait for
each other.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from filelock import FileLock

from octavo.engine.errors import ModelError
from octavo.engine.gguf import GGUFFile, TensorInfo
from octavo.engine.gguf_config import Architecture, Config, architecture_of, model_config, token_ids
from octavo.engine.gguf_tokenizer import stop_token_ids, write_tokenizer

_FORMAT = 1  # raise it when the conversion changes: folders that an older one wrote are not used any more
_SAMPLE = 1 << 20  # bytes of each end of the file that go into the key

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma has four norms a layer, and its ffn_norm is another one
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IN_CONFIG = {"rope_freqs.weight"}  # tensors that became part of the configuration
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<leaf>\w+)\.(?P<kind>weight|bias)")

_Shape = tuple[int, ...]


def convert(gguf: Path, cache_dir: Path, extra_files: Sequence[Path] = ()) -> Path:
    """The Transformers folder for the file `gguf`, converted if the cache does not have it yet.

    The folder is `cache_dir/converted/NAME-KEY` with config.json, generation_config.json, model.safetensors,
    tokenizer.json, tokenizer_config.json and copies of `extra_files` (a licence, say). KEY covers the file's
    size, time of change and both ends, so a changed file is converted anew.

    Raises ModelError if the file cannot be read or its model is not known, if the disk is too small, or if
    the cache cannot be written; then nothing is left behind.
    """
    try:
        key = _key(gguf)
    except OSError as error:
        raise ModelError(f"{gguf} cannot be read: {error.strerror or error}") from error
    root = cache_dir / "converted"
    folder, partial = root / key, root / f"{key}.partial"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{key}.lock"):
            if folder.is_dir():  # another process was faster
                return folder
            shutil.rmtree(partial, ignore_errors=True)  # the lock is ours, so whoever left it is gone
            try:
                partial.mkdir()
                with GGUFFile(gguf) as file:
                    _write_folder(file, partial)
                for extra in extra_files:
                    shutil.copy(extra, partial)
                partial.rename(folder)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        raise ModelError(
            f"the converted model cannot be written to {root}: {error.strerror or error}. Make room or give "
            "another cache directory"
        ) from error
    return folder


def _key(gguf: Path) -> str:
    """NAME-KEY. Hashing all of a large file at every start would take longer than loading the model."""
    stat = gguf.stat()
    digest = hashlib.sha256(f"{_FORMAT} {stat.st_size} {stat.st_mtime_ns} ".encode())
    with gguf.open("rb") as file:
        digest.update(file.read(_SAMPLE))
        file.seek(max(0, stat.st_size - _SAMPLE))
        digest.update(file.read(_SAMPLE))
    return f"{gguf.stem}-{digest.hexdigest()[:16]}"


def _write_folder(file: GGUFFile, folder: Path) -> None:
    arch = architecture_of(file)
    config = model_config(file, arch)
    tensors = _match(file, arch, config)
    write_tokenizer(file, arch.name, folder, config["max_position_embeddings"])
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(file))
    _write_weights(folder / "model.safetensors", file, tensors, arch, config)


def _generation_config(file: GGUFFile) -> Config:
    config = token_ids(file)
    stops = stop_token_ids(file)
    if stops:
        config["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    return config


def _match(file: GGUFFile, arch: Architecture, config: Config) -> dict[str, TensorInfo]:
    """Each parameter's name to the tensor that it comes from: all of them, with the shapes of the model."""
    wanted = _parameter_shapes(config, file.path)
    layer_names = _GEMMA_LAYER if arch.name.startswith("gemma") else _LAYER
    found: dict[str, TensorInfo] = {}
    for name, info in file.tensors.items():
        if name in _IN_CONFIG:
            continue
        parameter = _parameter_name(name, layer_names)
        if parameter not in wanted:
            raise ModelError(
                f"{file.path}: the tensor {name!r} has no place in {config['architectures'][0]}, so the "
                "file's model is another variant. Use the model's Transformers folder instead"
            )
        if info.shape != wanted[parameter]:
            raise ModelError(
                f"{file.path} is corrupt: tensor {name!r} has the shape {list(info.shape)}, and its metadata "
                f"call for {list(wanted[parameter])}. Download it again"
            )
        found[parameter] = info
    if missing := [name for name in wanted if name not in found]:
        raise ModelError(
            f"{file.path} is incomplete: {len(missing)} of {len(wanted)} tensors are missing, such as "
            f"{missing[0]!r}. Download it again"
        )
    return found


def _parameter_name(name: str, layer_names: Mapping[str, str]) -> str | None:
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        return None
    layer, leaf, kind = match["layer"], match["leaf"], match["kind"]
    module = (_TOP if layer is None else layer_names).get(leaf)
    if module is None:
        return None
    return f"{module}.{kind}" if layer is None else f"model.layers.{layer}.{module}.{kind}"


def _parameter_shapes(config: Config, path: Path) -> dict[str, _Shape]:
    """Name and shape of each parameter, asked of Transformers' own model (built without memory)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in config.items() if name not in ("model_type", "dtype")}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings))
    except Exception as error:  # nonsense from the file can surface anywhere in Transformers
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{path}: its metadata do not make a {config['architectures'][0]}: {reason[-1]}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    return shapes


def _write_weights(
    path: Path, file: GGUFFile, tensors: Mapping[str, TensorInfo], arch: Architecture, config: Config
) -> None:
    """Write the tensors as one safetensors file, one after the other."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stored = {name: _stored_type(name, info, arch) for name, info in tensors.items()}
    # wide types first, so that every tensor is aligned
    names = sorted(tensors, key=lambda name: (-stored[name].itemsize, tensors[name].offset))
    header, total = _safetensors_header((name, stored[name], tensors[name].shape) for name in names)
    free = shutil.disk_usage(path.parent).free
    if free < total + len(header):
        raise ModelError(
            f"the converted weights of {file.path} take {(total + len(header)) / 1e9:.1f} GB, and "
            f"{path.parent.parent} has {free / 1e9:.1f} GB left. Make room or give another cache directory"
        )
    with path.open("wb") as out:
        out.write(header)
        for name in names:
            values = file.read(tensors[name].name)
            if arch.norm_offset and name.endswith("norm.weight"):
                values = values - np.float32(arch.norm_offset)
            projection = name.split(".")[-2]
            if arch.paired_rotary and projection in heads:
                values = _unpair_rotary(values, heads[projection])
            out.write(stored[name].encode(values).data)


def _unpair_rotary(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (x0, y0, x1, y1, ...) to (x0, x1, ..., y0, y1, ...).

    `weight` and the result are [num_heads * head_dim, hidden_size].
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


@dataclass(frozen=True)
class _StoredType:
    """A float type in safetensors' terms."""

    name: str
    itemsize: int

    def encode(self, values: np.ndarray) -> np.ndarray:
        """float32 `values` in this type; only used where it is exact."""
        if self.name == "F16":
            return values.astype("<f2")
        if self.name == "BF16":  # the upper half of a float32
            return (values.view(np.uint32) >> 16).astype("<u2")
        return values.astype("<f4", copy=False)


def _stored_type(name: str, info: TensorInfo, arch: Architecture) -> _StoredType:
    changed = arch.norm_offset and name.endswith("norm.weight")
    if info.type_name in ("F16", "BF16") and not changed:
        return _StoredType(info.type_name, 2)
    return _StoredType("F32", 4)


def _safetensors_header(tensors: Iterator[tuple[str, _StoredType, _Shape]]) -> tuple[bytes, int]:
    """The file's start and the number of bytes that follow it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, kind, shape in tensors:
        end = at + prod(shape) * kind.itemsize
        entries[name] = {"dtype": kind.name, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, at


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
