"""CPU kernels of the data path: packing over an address table, and sums of 16-bit floats.

Compiled by Numba without the GIL, without fast-math and without threads. Importing this module compiles (or loads from
Numba's cache) every kernel, so that nothing is compiled while peers wait.

*Guarantees*: 16-bit floats are accumulated in float32 in rank order and cast once, round to nearest even; a
result depends on the values alone, never on how tensors were fused or cut.
"""

from __future__ import annotations

import logging
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_log = logging.getLogger("hvdlite")

#: Codes of the reductions as the kernels know them.
SUM, MIN, MAX, PRODUCT = 0, 1, 2, 3


def compiled(signature: str | list[str]) -> Any:
    """``njit`` with an explicit signature, cached on disk where some place for the cache is writable."""

    def decorate(function: Any) -> Any:
        try:
            return numba.njit(signature, nogil=True, cache=True)(function)
        except RuntimeError as reason:  # numba: "no locator available": nothing writable
            _log.warning("numba cannot cache %s: %s: set NUMBA_CACHE_DIR to a writable directory; "
                         "compiling again in every process", function.__name__, reason)
            return numba.njit(signature, nogil=True)(function)

    return decorate


@intrinsic
def _copy(typing_context: Any, destination: Any, source: Any, num_bytes: Any) -> Any:
    """memcpy between two addresses (uint64)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = cgutils.voidptr_t
        to, origin = (builder.inttoptr(one, pointer) for one in arguments[:2])
        cgutils.raw_memcpy(builder, to, origin, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.int64), generate


@compiled("void(uint64[::1], int64[::1], int64[::1], uint64)")
def pack(addresses: np.ndarray, sizes_bytes: np.ndarray, offsets_bytes: np.ndarray, destination: int) -> None:
    """Copy tensor i (``sizes_bytes[i]`` bytes at ``addresses[i]``) to ``destination + offsets_bytes[i]``."""
    for i in range(len(addresses)):
        _copy(destination + np.uint64(offsets_bytes[i]), addresses[i], sizes_bytes[i])


@compiled("void(uint64[::1], int64[::1], int64[::1], uint64)")
def unpack(addresses: np.ndarray, sizes_bytes: np.ndarray, offsets_bytes: np.ndarray, source: int) -> None:
    """The way back of ``pack``."""
    for i in range(len(addresses)):
        _copy(addresses[i], source + np.uint64(offsets_bytes[i]), sizes_bytes[i])


@compiled("void(float32[::1], float32)")
def multiply_float32(values: np.ndarray, factor: float) -> None:
    """Multiply in place. *Shapes*: (n,)."""
    for i in range(len(values)):
        values[i] *= factor


@compiled("void(float64[::1], float64)")
def multiply_float64(values: np.ndarray, factor: float) -> None:
    """Multiply in place. *Shapes*: (n,)."""
    for i in range(len(values)):
        values[i] *= factor


@compiled("void(uint16[::1], float32[::1], boolean)")
def halves_to_float(source: np.ndarray, destination: np.ndarray, is_bfloat16: bool) -> None:
    """Widen 16-bit floats, given as their bits, exactly. *Shapes*: both (n,)."""
    bits = destination.view(np.uint32)
    if is_bfloat16:
        for i in range(len(source)):
            bits[i] = np.uint32(source[i]) << np.uint32(16)
        return
    scale = np.float32(2.0**112)
    for i in range(len(source)):
        half = np.uint32(source[i])
        sign = (half & np.uint32(0x8000)) << np.uint32(16)
        bits[i] = (half & np.uint32(0x7FFF)) << np.uint32(13)
        # Exponent 15 -> 127 by a multiplication: exact, and right for subnormals too.
        destination[i] = destination[i] * scale
        special = np.uint32(0x7F800000) if (half & np.uint32(0x7C00)) == np.uint32(0x7C00) else np.uint32(0)
        bits[i] = bits[i] | special | sign


@compiled("void(float32[::1], uint16[::1], boolean)")
def float_to_halves(source: np.ndarray, destination: np.ndarray, is_bfloat16: bool) -> None:
    """Narrow to 16-bit floats, round to nearest even; NaN stays NaN. *Shapes*: both (n,)."""
    bits = source.view(np.uint32)
    if is_bfloat16:
        for i in range(len(source)):
            one = bits[i]
            rounded = (one + np.uint32(0x7FFF) + ((one >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            is_nan = (one & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            quiet = (one >> np.uint32(16)) | np.uint32(0x40)
            destination[i] = np.uint16(quiet if is_nan else rounded)
        return
    for i in range(len(source)):
        one = bits[i]
        sign = (one >> np.uint32(16)) & np.uint32(0x8000)
        size = one & np.uint32(0x7FFFFFFF)
        normal = (size + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1)) - np.uint32(0x38000000)) >> np.uint32(13)
        half = normal
        if size < np.uint32(0x38800000):
            # Subnormal halves are multiples of 2^-24: rint rounds to nearest even.
            half = np.uint32(np.int64(np.rint(np.float64(abs(source[i])) * 16777216.0)))
        if size >= np.uint32(0x477FF000):
            half = np.uint32(0x7C00)
        if size > np.uint32(0x7F800000):
            half = np.uint32(0x7E00)
        destination[i] = np.uint16(half | sign)


@compiled("void(float32[::1], float32[::1], int64)")
def _accumulate(total: np.ndarray, value: np.ndarray, op: int) -> None:
    if op == SUM:
        for i in range(len(total)):
            total[i] += value[i]
    elif op == PRODUCT:
        for i in range(len(total)):
            total[i] *= value[i]
    elif op == MIN:
        for i in range(len(total)):
            if value[i] < total[i] or value[i] != value[i]:
                total[i] = value[i]
    else:
        for i in range(len(total)):
            if value[i] > total[i] or value[i] != value[i]:
                total[i] = value[i]


#: Elements handled at a time, so that both float32 rows stay in the first-level cache. Chosen: 2 x 8 KiB.
_BLOCK = 2048


@compiled("void(uint16[:, ::1], uint16[::1], int64, boolean, float32, float32)")
def reduce_halves(
    rows: np.ndarray, out: np.ndarray, op: int, is_bfloat16: bool, prescale: float, postscale: float
) -> None:
    """Combine one row per rank in float32, in rank order; scale, and cast once.

    *Shapes*: rows (ranks, n), out (n,), as bits of 16-bit floats.
    """
    total = np.empty(_BLOCK, np.float32)
    value = np.empty(_BLOCK, np.float32)
    for start in range(0, out.shape[0], _BLOCK):
        stop = min(start + _BLOCK, out.shape[0])
        count = stop - start
        for rank in range(rows.shape[0]):
            into = total if rank == 0 else value
            halves_to_float(rows[rank, start:stop], into[:count], is_bfloat16)
            if prescale != 1.0:
                for i in range(count):
                    into[i] *= prescale
            if rank:
                _accumulate(total[:count], value[:count], op)
        if postscale != 1.0:
            for i in range(count):
                total[i] *= postscale
        float_to_halves(total[:count], out[start:stop], is_bfloat16)
