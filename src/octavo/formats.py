"""How K and V are stored: the cache formats.

A format says what a row of K and of V is made of. The 16- and 32-bit formats store plain numbers; this is
also the place where the formats with scales (fp8, int8) belong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.errors import Unsupported

FLOAT_FORMATS: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
"""Format name to the dtype of both K and V."""

EIGHT_BIT_FORMATS = ("fp8", "fp8_e4m3", "fp8_e5m2", "int8_kv", "int8_k", "int8_per_token")
"""Names of the formats with 8-bit pages; this version refuses them with a reason."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """What one row of the cache stores.

    Args:
        name: the format's name, never "auto".
        k_dtype: dtype of the stored K.
        v_dtype: dtype of the stored V.
    """

    name: str
    k_dtype: torch.dtype
    v_dtype: torch.dtype

    @classmethod
    def parse(cls, name: str, model_dtype: torch.dtype) -> KVFormat:
        """The format called `name`; "auto" stores K and V in `model_dtype`.

        Raises:
            ValueError: unknown name; the message lists the known ones.
            Unsupported: a known format, or a model dtype, that this version cannot store.
        """
        if name == "auto":
            return cls.of_dtype(model_dtype)
        if name in FLOAT_FORMATS:
            return cls(name, FLOAT_FORMATS[name], FLOAT_FORMATS[name])
        available = ", ".join(["auto", *FLOAT_FORMATS])
        if name in EIGHT_BIT_FORMATS:
            raise Unsupported(
                f"cache format {name!r} needs kernels for 8-bit pages, which this version does not have; "
                f"use one of {available}"
            )
        raise ValueError(f"unknown cache format {name!r}; known formats: {available}")

    @classmethod
    def of_dtype(cls, dtype: torch.dtype) -> KVFormat:
        """The format that stores K and V as plain numbers of `dtype`."""
        for name, known in FLOAT_FORMATS.items():
            if dtype == known:
                return cls(name, dtype, dtype)
        raise Unsupported(f"K and V of {dtype} cannot be stored; use float16, bfloat16 or float32")
