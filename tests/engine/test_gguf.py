"""Reading GGUF files, and refusing broken ones."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.tiny_gguf import finish
from octavo.engine.errors import ModelError
from octavo.engine.gguf import GGUFFile


def q8_0_block(scale: float, values: list[int]) -> bytes:
    return struct.pack("<e32b", scale, *values)


def q4_1_block(scale: float, minimum: float, values: list[int]) -> bytes:
    """32 values of 0..15: the low nibbles hold the first half, the high nibbles the second."""
    return struct.pack(
        "<ee16B",
        scale,
        minimum,
        *(low | high << 4 for low, high in zip(values[:16], values[16:], strict=True)),
    )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Every kind of metadata, and four tensors in four formats."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_int64("a.below", -(2**40))
    writer.add_float32("a.scale", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "grün")
    writer.add_array("a.words", ["", "Ġone", "two"])
    writer.add_array("a.numbers", [1.5, -2.0, 3.25])
    writer.add_tensor("plain", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("half", np.array([[0.5, -2.0]], np.float16))
    eight = np.frombuffer(q8_0_block(0.5, list(range(-16, 16))) * 2, np.uint8).reshape(2, 34)
    writer.add_tensor("eight", eight, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    four = np.frombuffer(q4_1_block(2.0, -3.0, [i % 16 for i in range(32)]), np.uint8).reshape(1, 20)
    writer.add_tensor("four", four, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    finish(writer)
    return path


def refusal(path: Path, data: bytes | bytearray) -> str:
    path.write_bytes(data)
    with pytest.raises(ModelError) as raised:
        GGUFFile(path)
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_metadata(small: Path) -> None:
    with GGUFFile(small) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["a.count"] == 7
        assert file.metadata["a.below"] == -(2**40)
        assert file.metadata["a.scale"] == 0.5
        assert file.metadata["a.flag"] is True
        assert file.metadata["a.text"] == "grün"
        assert file.metadata["a.words"] == ["", "Ġone", "two"]
        np.testing.assert_array_equal(file.metadata["a.numbers"], [1.5, -2.0, 3.25])


def test_tensors_are_float32_in_torch_order_and_outlive_the_file(small: Path) -> None:
    with GGUFFile(small) as file:
        assert list(file.tensors) == ["plain", "half", "eight", "four"]
        values = {name: file.read(name) for name in file.tensors}
    assert all(array.dtype == np.float32 for array in values.values())
    np.testing.assert_array_equal(values["plain"], np.arange(12).reshape(3, 4))
    np.testing.assert_array_equal(values["half"], [[0.5, -2.0]])
    np.testing.assert_array_equal(values["eight"], [np.arange(-16, 16) * 0.5] * 2)
    np.testing.assert_array_equal(values["four"], [[2.0 * (i % 16) - 3.0 for i in range(32)]])


def test_every_truncation_is_refused(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    with GGUFFile(small) as file:
        last = max(info.offset + info.nbytes for info in file.tensors.values())
    for length in range(last):  # what follows `last` is padding
        message = refusal(tmp_path / "cut.gguf", data[:length])
        assert ("truncated" if length >= 4 else "not a GGUF file") in message, (length, message)


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack("<I", 99), "version 99"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "Download it again"),
        (16, struct.pack("<Q", 1 << 60), "truncated"),
        (24, struct.pack("<Q", 1 << 63), "truncated"),
    ],
)
def test_bad_preamble(small: Path, tmp_path: Path, at: int, value: bytes, words: str) -> None:
    data = bytearray(small.read_bytes())
    data[at : at + len(value)] = value
    assert words in refusal(tmp_path / "bad.gguf", data)


def changed(small: Path, name: str, after: int, form: str, value: int) -> bytes:
    """The file with the number `after` bytes behind the name of a tensor or key replaced."""
    data = bytearray(small.read_bytes())
    needle = struct.pack("<Q", len(name)) + name.encode()
    assert data.count(needle) == 1
    struct.pack_into(form, data, data.index(needle) + len(needle) + after, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "after", "form", "value", "words"),
    [
        # a tensor's entry: number of dimensions, dimensions, type, offset
        ("plain", 0, "<I", 9, "9 dimensions"),
        ("plain", 4, "<Q", 0, "dimension of 0"),
        ("plain", 12, "<Q", 1 << 40, "truncated"),
        ("plain", 20, "<I", 2, "no multiple"),
        ("plain", 20, "<I", 999, "number 999"),
        ("plain", 24, "<Q", 1 << 50, "truncated: tensor 'plain'"),
        # a key's entry: type, value
        ("a.count", 0, "<I", 77, "unknown type 77"),
        ("a.words", 4, "<I", 9, "nested"),
        ("a.words", 8, "<Q", 1 << 50, "truncated"),
        ("a.numbers", 8, "<Q", 1 << 50, "truncated"),
        ("a.text", 12, "<B", 0xFF, "not UTF-8"),
    ],
)
def test_bad_entry(small: Path, tmp_path: Path, name: str, after: int, form: str, value: int, words: str) -> None:
    assert words in refusal(tmp_path / "bad.gguf", changed(small, name, after, form, value))


def test_repeated_names(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    assert "'a.count' appears twice" in refusal(tmp_path / "bad.gguf", data.replace(b"a.below", b"a.count"))
    assert "'four' appears twice" in refusal(tmp_path / "bad.gguf", data.replace(b"half", b"four"))


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        GGUFFile(tmp_path / "none.gguf")


def test_format_without_a_dequantiser_is_named(tmp_path: Path) -> None:
    path = tmp_path / "integers.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("ids", np.arange(4, dtype=np.int32))
    finish(writer)
    with GGUFFile(path) as file, pytest.raises(ModelError, match=r"'ids' in the format I32.*Q8_0"):
        file.read("ids")
