"""Function constants: from Python values to the bytes that their declared type has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .rewrite import FunctionConstant

Constant = bool | int | float | np.generic

_DTYPES = {
    "bool": np.bool_,
    "char": np.int8,
    "int8_t": np.int8,
    "uchar": np.uint8,
    "uint8_t": np.uint8,
    "short": np.int16,
    "int16_t": np.int16,
    "ushort": np.uint16,
    "uint16_t": np.uint16,
    "int": np.int32,
    "int32_t": np.int32,
    "uint": np.uint32,
    "uint32_t": np.uint32,
    "long": np.int64,
    "int64_t": np.int64,
    "ulong": np.uint64,
    "uint64_t": np.uint64,
    "size_t": np.uint64,
    "half": np.float16,
    "float": np.float32,
}


def encode_constants(
    declared: Sequence[FunctionConstant], values: Mapping[int | str, Constant]
) -> dict[int, bytes]:
    """The bytes of each constant, by index.

    Args:
      declared: the constants of the source.
      values: by index or name. A Python int fits any integer type that holds it and a Python float
        any float type; NumPy scalars must have the declared type exactly, as Metal demands.

    Raises:
      ValueError: a constant is not declared, or its value does not fit the declared type.
    """
    by_name = {c.name: c for c in declared}
    by_index = {int(c.index, 0): c for c in declared if c.index.isdigit()}
    out = {}
    for key, value in values.items():
        constant = by_name.get(key) if isinstance(key, str) else by_index.get(int(key))
        if constant is None:
            names = ", ".join(f"{c.name} ({c.index})" for c in declared) or "none"
            raise ValueError(
                f"[metal_host] expected a declared function constant ({names}); got {key!r}"
            )
        out[int(constant.index, 0)] = _encode(constant, value)
    return out


def _encode(constant: FunctionConstant, value: Constant) -> bytes:
    dtype = _DTYPES.get(constant.type.removeprefix("metal::"))
    if dtype is None:
        raise ValueError(
            f"[metal_host] expected function constant {constant.name} of a scalar type;"
            f" got {constant.type}"
        )
    wanted: np.dtype[np.generic] = np.dtype(dtype)
    if isinstance(value, np.generic):
        fits = value.dtype == wanted
    elif isinstance(value, bool):
        fits = wanted.kind == "b"
    elif isinstance(value, int):
        bits = 8 * wanted.itemsize
        low, high = (
            (-(1 << bits - 1), (1 << bits - 1) - 1) if wanted.kind == "i" else (0, (1 << bits) - 1)
        )
        fits = wanted.kind in "iu" and low <= value <= high
    else:
        fits = wanted.kind == "f"
    if not fits:
        raise ValueError(
            f"[metal_host] expected {constant.type} for function constant {constant.name};"
            f" got {value!r}"
        )
    return np.asarray(value, wanted).tobytes()
