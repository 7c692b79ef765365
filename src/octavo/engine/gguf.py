"""Read a GGUF file: its metadata, its tensor table, and its tensors as float32 arrays.

The header is parsed here over one memory map; the `gguf` package's reader touches every vocabulary string
several times, which makes it slow for a large vocabulary.
Dequantisation is that package's own: it is vectorised, and it comes from the format's authors.

Everything in the header is checked when the file is opened, so that a truncated download is refused before
anything is written or allocated. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TypeAlias

import numpy as np

from octavo.engine.errors import ModelError

MetadataValue: TypeAlias = "bool | int | float | str | list[str] | np.ndarray"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 counted in 32 bits and lived for weeks; nothing current writes it
_MAX_DIMS = 4  # GGML_MAX_DIMS
_DEFAULT_ALIGNMENT = 32

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_ARRAY_DTYPES = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file and how it is stored.

    `shape` is in torch's order (slowest dimension first). `offset` counts bytes from the start of the file.
    `qtype` is the number that GGUF gives the storage format; `type_name` is its name, such as "Q4_K".
    """

    name: str
    shape: tuple[int, ...]
    qtype: int
    type_name: str
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file. Owns a memory map; close it, or use it in a `with` block.

    Attributes: `path`; `metadata`, from key to value, with arrays of numbers as numpy arrays and arrays of
    strings as lists; `tensors`, from name to `TensorInfo`, in the file's order. Both mappings are read-only.

    Raises ModelError if the file is not GGUF, is of an unknown version, is truncated or contradicts itself.
    """

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise ModelError(f"{path} is not a GGUF file: it does not start with the bytes 'GGUF'")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
        try:
            metadata, tensors = _Header(self._map, path).parse()
        except BaseException:
            self._map.close()
            raise
        self.metadata = MappingProxyType(metadata)
        self.tensors = MappingProxyType(tensors)

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` as a new float32 array of its `shape`.

        Raises ModelError if the storage format has no dequantiser.
        """
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors[name]
        # bytes are copied out of the map, so that no array outlives it and close() always works
        stored = np.frombuffer(self._map[info.offset : info.offset + info.nbytes], np.uint8)
        rows = stored.reshape(*info.shape[:-1], -1)
        try:
            values = dequantize(rows, GGMLQuantizationType(info.qtype))
        except NotImplementedError as error:
            raise _unsupported_type(self.path, name, info.type_name) from error
        return np.ascontiguousarray(values, np.float32).reshape(info.shape)

    def close(self) -> None:
        """Release the memory map. Arrays that were read stay valid."""
        self._map.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Header:
    """A cursor over the header; every step checks that the file is long enough."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.size = len(data)
        self.at = len(_MAGIC)
        self.place = "the file header"  # what is being read, for messages

    def parse(self) -> tuple[dict[str, MetadataValue], dict[str, TensorInfo]]:
        self._check_version(self._number(_U32))
        tensor_count, metadata_count = self._number(_U64), self._number(_U64)
        metadata: dict[str, MetadataValue] = {}
        for index in range(metadata_count):
            self.place = f"metadata entry {index + 1} of {metadata_count}"
            key = self._string()
            self.place = f"the value of {key!r}"
            if key in metadata:
                raise self._corrupt(f"the key {key!r} appears twice")
            metadata[key] = self._value(self._number(_U32))
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for index in range(tensor_count):
            self.place = f"tensor entry {index + 1} of {tensor_count}"
            name, shape, qtype, offset = self._tensor_entry()
            if name in entries:
                raise self._corrupt(f"the tensor {name!r} appears twice")
            entries[name] = (shape, qtype, offset)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment is {alignment!r}, and must be a power of two")
        start = -(-self.at // alignment) * alignment
        return metadata, {name: self._place_tensor(name, *entry, start) for name, entry in entries.items()}

    def _check_version(self, version: int) -> None:
        if version in _VERSIONS:
            return
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise ModelError(f"{self.path} is a big-endian GGUF file; only little-endian files are read")
        known = " and ".join(map(str, _VERSIONS))
        raise ModelError(
            f"{self.path} is GGUF version {version}; versions {known} are read. Convert the model anew, "
            "with a current llama.cpp"
        )

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._number(_U32)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._corrupt(f"tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
        dims = [self._number(_U64) for _ in range(num_dims)]
        if 0 in dims:
            raise self._corrupt(f"tensor {name!r} has a dimension of 0 in {dims}")
        return name, tuple(reversed(dims)), self._number(_U32), self._number(_U64)

    def _place_tensor(self, name: str, shape: tuple[int, ...], qtype: int, offset: int, start: int) -> TensorInfo:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(qtype)
        except ValueError as error:
            raise _unsupported_type(self.path, name, f"number {qtype}") from error
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_size:
            raise self._corrupt(
                f"tensor {name!r} has rows of {shape[-1]} values, no multiple of the {block_size} in a "
                f"block of {kind.name}"
            )
        nbytes = prod(shape) // block_size * block_bytes
        if start + offset + nbytes > self.size:
            raise ModelError(
                f"{self.path} is truncated: tensor {name!r} ends at byte {start + offset + nbytes}, and the "
                f"file has {self.size}. Download it again"
            )
        return TensorInfo(name, shape, qtype, kind.name, start + offset, nbytes)

    def _value(self, kind: int) -> MetadataValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number(_U32), self._number(_U64))
        if kind not in _SCALARS:
            raise self._corrupt(f"{self.place} has the unknown type {kind}")
        value: MetadataValue = self._number(_SCALARS[kind])
        return value

    def _array(self, kind: int, count: int) -> MetadataValue:
        if kind == _STRING:
            return self._strings(count)
        if kind not in _ARRAY_DTYPES:
            raise self._corrupt(f"{self.place} is an array of the unknown or nested type {kind}")
        dtype = np.dtype(_ARRAY_DTYPES[kind])
        start = self._take(count * dtype.itemsize)
        return np.frombuffer(self.data[start : self.at], dtype)

    def _number(self, kind: struct.Struct) -> int:
        number: int = kind.unpack_from(self.data, self._take(kind.size))[0]
        return number

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # a vocabulary has up to a million strings: one tight loop, and one bounds check by the last of them
        data, at, size, length_at = self.data, self.at, self.size, _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                end = at + 8 + length_at(data, at)[0]
                if end > size:
                    raise self._truncated()
                strings.append(data[at + 8 : end].decode())
                at = end
        except struct.error as error:
            raise self._truncated() from error
        except UnicodeDecodeError as error:
            raise self._corrupt(f"{self.place} holds a string that is not UTF-8") from error
        self.at = at
        return strings

    def _take(self, nbytes: int) -> int:
        """Move past `nbytes` and return where they start."""
        start = self.at
        if start + nbytes > self.size:
            raise self._truncated()
        self.at = start + nbytes
        return start

    def _truncated(self) -> ModelError:
        return ModelError(f"{self.path} is truncated: its {self.size} bytes end inside {self.place}. Download it again")

    def _corrupt(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} is corrupt: {reason}. Download it again")


def _unsupported_type(path: Path, tensor: str, type_name: str) -> ModelError:
    return ModelError(
        f"{path} stores tensor {tensor!r} in the format {type_name}, which the installed gguf package cannot "
        "dequantise. Update gguf, or take the file in another quantisation, such as Q4_K_M or Q8_0"
    )
