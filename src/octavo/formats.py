"""How K and V are stored: the cache formats, as facts that caches and kernels ask.

Real numbers are stored numbers times a scale ("descale"). `octavo.quantise` defines how rows become stored numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from octavo.errors import Unsupported

FLOAT_FORMATS: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
"""Format name to the dtype of both K and V."""

FP8_FORMATS: dict[str, torch.dtype] = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""The same for the fp8 formats."""

EIGHT_BIT_FORMATS = ("fp8_e4m3", "fp8_e5m2", "int8_kv", "int8_k", "int8_per_token")
"""Names of the formats with 8-bit pages."""

ALIASES = {"fp8": "fp8_e4m3"}
"""Other names of formats."""


def how_to_calibrate(model: str = "MODEL") -> str:
    """What to do when int8_kv has no scales: the command to run for a model of that name."""
    command = f"octavo calibrate {model} --kv-format int8_kv --out scales.safetensors"
    return (
        f"run `{command}` and give the file (--kv-scales scales.safetensors, LLM(kv_scales=...)), "
        f"or use int8_per_token, which needs no scales"
    )


HOW_TO_CALIBRATE = how_to_calibrate()
"""The same where the model's name is not known."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """What one row of the cache stores; everything else that a format is follows from these.

    Args:
        name: the format's name, never "auto".
        k_dtype: dtype of the stored K.
        v_dtype: dtype of the stored V.
        v_scaled_by_row: V has a scale per (token, KV head), in the page, made on write.
    """

    name: str
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    v_scaled_by_row: bool = False

    @property
    def k_scaled_by_row(self) -> bool:
        """K is int8 with a scale per (token, KV head), in the page, made on write; kernels quantise q alike."""
        return self.k_dtype == torch.int8

    @property
    def v_scaled_by_channel(self) -> bool:
        """V is int8 with a static scale per (KV head, channel), given beside the pages: [num_kv_heads, value_dim]."""
        return self.v_dtype == torch.int8 and not self.v_scaled_by_row

    @property
    def is_fp8(self) -> bool:
        """K and V are fp8, with static scales per tensor, per KV head or per (sequence, KV head); none given: 1."""
        return self.k_dtype in FP8_FORMATS.values()

    @property
    def is_eight_bit(self) -> bool:
        """K takes one byte an element (V one or two)."""
        return self.k_dtype.itemsize == 1

    @classmethod
    def parse(cls, name: str, model_dtype: torch.dtype) -> KVFormat:
        """The format called `name`; "auto" stores K and V in `model_dtype`, int8_k stores V in it.

        Raises:
            ValueError: unknown name; the message lists the known ones.
            Unsupported: a model dtype that cannot be stored.
        """
        name = ALIASES.get(name, name)
        if name == "auto":
            return cls.of_dtype(model_dtype)
        if name in FLOAT_FORMATS:
            return cls(name, FLOAT_FORMATS[name], FLOAT_FORMATS[name])
        if name in FP8_FORMATS:
            return cls(name, FP8_FORMATS[name], FP8_FORMATS[name])
        if name == "int8_k":
            return cls(name, torch.int8, cls.of_dtype(model_dtype).v_dtype)
        if name in EIGHT_BIT_FORMATS:
            return cls(name, torch.int8, torch.int8, v_scaled_by_row=name == "int8_per_token")
        known = ", ".join(["auto", *FLOAT_FORMATS, *ALIASES, *EIGHT_BIT_FORMATS])
        raise ValueError(f"unknown cache format {name!r}; known formats: {known}")

    @classmethod
    def of_dtype(cls, dtype: torch.dtype) -> KVFormat:
        """The format that stores K and V as plain numbers of `dtype`."""
        for name, known in FLOAT_FORMATS.items():
            if dtype == known:
                return cls(name, dtype, dtype)
        raise Unsupported(f"K and V of {dtype} cannot be stored; use float16, bfloat16 or float32")

    @staticmethod
    @cache
    def of_pages(k_dtype: torch.dtype, v_dtype: torch.dtype, v_scaled_by_row: bool) -> KVFormat | None:
        """The format that stores these; K and V may be plain numbers of different dtypes. None: no format does."""
        floats = {dtype: name for name, dtype in FLOAT_FORMATS.items()}
        if k_dtype in floats and v_dtype in floats:
            name = floats[k_dtype] if k_dtype == v_dtype else f"{floats[k_dtype]}/{floats[v_dtype]}"
            return KVFormat(name, k_dtype, v_dtype)
        names = EIGHT_BIT_FORMATS if v_dtype not in floats else ("int8_k",)
        for name in names:
            found = KVFormat.parse(name, v_dtype if v_dtype in floats else torch.float32)
            if (found.k_dtype, found.v_dtype, found.v_scaled_by_row) == (k_dtype, v_dtype, v_scaled_by_row):
                return found
        return None
