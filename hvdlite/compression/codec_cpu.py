"""The codec on CPUs: the functions of ``codec``, compiled; words, scales, residuals and results bitwise those of the reference.

``encode_pieces`` and ``decode_pieces`` do a whole segment of a bucket in one call, one pass over memory, group by group; the
others serve single tensors. Importing this module compiles every kernel (once), or loads it from Numba's cache.

*Threads*: no lock and no state; kernels run without the GIL. Arrays are C-contiguous; residuals, rotated arrays and scales
float32, words uint32. Sizes are checked here, because kernels do not check their indices; addresses cannot be: who makes a
table keeps its arrays alive. A new residual is written past the caches, ordered before the call returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.compression.groups import (
    FLOAT32,
    ROTATED,
    TWO_MEANS,
    add_group,
    code_group,
    decode_group,
    divide_group,
    divisors,
    fill,
    load_group,
    multiply_group,
    rotate_back_group,
    rotate_group,
    store_group,
    sum_group,
)
from hvdlite.compression.rotation import GROUP, ROWS
from hvdlite.compression.spec import (
    COUNT,
    DTYPES,
    FIRST,
    GRADIENT,
    ITEM_BYTES,
    LEVELS,
    MOMENT,
    NAN,
    OUT,
    RESIDUAL,
    SCALES,
    SHADOW,
    STEPS,
    CodecSpec,
    check_messages,
    check_pieces,
    check_table,
)
from hvdlite.compression.vectors import STREAM_BYTES, fence, to_float32
from hvdlite.kernels import compiled

_NO_MESSAGES = np.zeros((0, 2), np.int64)
#: Where each part of a kernel's own memory begins, in float32 elements from a cache line on; and its length with what is
#: lost before that line.
_ZEROS, _SCRATCH, _UNUSED, _V, _P, _INDEX, _SIZES, _SQUARES = (GROUP * part for part in range(8))
_WORK = 8 * GROUP + 16


def encode_pieces(
    spec: CodecSpec,
    dtype: str,
    pieces: np.ndarray,
    incoming: Sequence[tuple[np.ndarray, np.ndarray]],
    words: np.ndarray,
    scales: np.ndarray,
    factor: float,
) -> None:
    """As ``codec.encode_pieces``."""
    check_messages(spec, _num_groups(spec, pieces), [*incoming, (words, scales)])
    _encode(spec, dtype, pieces, incoming, words, scales, factor, True)


def decode_pieces(
    spec: CodecSpec, dtype: str, pieces: np.ndarray, words: np.ndarray, scales: np.ndarray, factor: float
) -> None:
    """As ``codec.decode_pieces``."""
    check_messages(spec, _num_groups(spec, pieces), [(words, scales)])
    _decode_pieces(
        pieces, *_kind(dtype), _address(words), _address(scales), factor, *_constants(spec)[:3], np.empty(_WORK, np.float32)
    )


def finite_pieces(spec: CodecSpec, pieces: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """As ``codec.finite_pieces``."""
    check_messages(spec, _num_groups(spec, pieces), [(None, scales)])
    finite = np.empty(len(pieces), np.bool_)
    _finite_pieces(pieces, scales, spec.scales_per_group, finite)
    return finite


def encode(
    spec: CodecSpec,
    gradient: np.ndarray,
    residual: np.ndarray | None,
    shadow: np.ndarray | None,
    words: np.ndarray,
    scales: np.ndarray,
) -> None:
    """As ``codec.encode``."""
    _check(spec, len(gradient), residual, shadow)
    encode_pieces(spec, _dtype(gradient), _piece(gradient, residual, shadow), (), words, scales, 1.0)


def encode_rotated(
    spec: CodecSpec, rotated: np.ndarray, shadow: np.ndarray | None, words: np.ndarray, scales: np.ndarray, num_elements: int
) -> None:
    """As ``codec.encode_rotated``; ``shadow`` may be ``rotated``."""
    _check(spec, num_elements, rotated, shadow)
    pieces = _piece(rotated[:num_elements], shadow=shadow)
    check_messages(spec, _num_groups(spec, pieces), [(words, scales)])
    _encode(spec, "float32", pieces, (), words, scales, 1.0, False)


def decode(spec: CodecSpec, words: np.ndarray, scales: np.ndarray, out: np.ndarray, num_elements: int) -> None:
    """As ``codec.decode``."""
    _check_decode(spec, num_elements, words, scales, out)
    _decode(_address(words), _address(scales), _address(out), num_elements, False, *_constants(spec)[:3])


def decode_add(spec: CodecSpec, words: np.ndarray, scales: np.ndarray, total: np.ndarray, num_elements: int) -> None:
    """As ``codec.decode_add``."""
    _check_decode(spec, num_elements, words, scales, total)
    _decode(_address(words), _address(scales), _address(total), num_elements, True, *_constants(spec)[:3])


def rotate(spec: CodecSpec, gradient: np.ndarray, residual: np.ndarray | None, out: np.ndarray) -> None:
    """As ``codec.rotate``; ``out`` may be ``residual``."""
    _check(spec, len(gradient), residual, out)
    _rotate(_piece(gradient, residual, out), *_kind(_dtype(gradient)), spec.scale == "rotated", np.zeros(_WORK, np.float32))


def unrotate(spec: CodecSpec, words: np.ndarray, scales: np.ndarray, gradient: np.ndarray, factor: float) -> None:
    """As ``codec.unrotate``."""
    decode_pieces(spec, _dtype(gradient), _piece(gradient, out=gradient), words, scales, factor)


def rotate_back(spec: CodecSpec, rotated: np.ndarray, gradient: np.ndarray) -> None:
    """As ``codec.rotate_back``."""
    _check(spec, len(gradient), rotated)
    pieces = _piece(gradient, rotated, out=gradient)
    _rotate_back(pieces, *_kind(_dtype(gradient)), spec.scale == "rotated", np.empty(_WORK, np.float32))


def _check(spec: CodecSpec, num_elements: int, *padded: np.ndarray | None) -> None:
    for array in padded:
        if array is not None and len(array) < spec.padded(num_elements):
            raise ValueError(
                f"quantised exchange: an array of the rotated domain has {len(array)} elements where {num_elements} elements "
                f"need {spec.padded(num_elements)}: size it by CodecSpec.padded"
            )


def _check_decode(spec: CodecSpec, num_elements: int, words: np.ndarray, scales: np.ndarray, padded: np.ndarray) -> None:
    _check(spec, num_elements, padded)
    pieces = _piece(padded[:num_elements])
    check_messages(spec, _num_groups(spec, pieces), [(words, scales)])


def _dtype(gradient: np.ndarray) -> str:
    return "bfloat16" if gradient.dtype == np.uint16 else gradient.dtype.name


def _address(array: np.ndarray | None) -> int:
    if array is None:
        return 0
    address: int = array.__array_interface__["data"][0]
    return address


def _piece(
    gradient: np.ndarray, residual: np.ndarray | None = None, shadow: np.ndarray | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    """The table of one tensor."""
    row = [_address(gradient), len(gradient), _address(residual), _address(shadow), _address(out), 0, 0]
    return np.array([row], np.int64)


def _num_groups(spec: CodecSpec, pieces: np.ndarray) -> int:
    """That a message must have for these pieces."""
    check_table(pieces)
    num_groups, has_negative, has_moment = _groups_needed(pieces)
    check_pieces(spec, has_negative, has_moment)
    return int(num_groups)


def _encode(
    spec: CodecSpec,
    dtype: str,
    pieces: np.ndarray,
    incoming: Sequence[tuple[np.ndarray, np.ndarray]],
    words: np.ndarray,
    scales: np.ndarray,
    factor: float,
    turn: bool,
) -> None:
    table = np.array([(_address(w), _address(s)) for w, s in incoming], np.int64) if incoming else _NO_MESSAGES
    work = np.zeros(_WORK, np.float32)
    _encode_pieces(pieces, table, *_kind(dtype), _address(words), _address(scales), factor, turn, *_constants(spec), work)


def _kind(dtype: str) -> tuple[int, int]:
    return DTYPES.index(dtype), ITEM_BYTES[dtype]


def _constants(spec: CodecSpec) -> tuple[int, int, int, np.float32]:
    return SCALES.index(spec.scale), spec.bits, _address(LEVELS[spec.bits]), STEPS[spec.bits]


@compiled("Tuple((int64, boolean, boolean))(int64[:, ::1])")
def _groups_needed(pieces: np.ndarray) -> tuple[int, bool, bool]:
    needed, has_negative, has_moment = 0, False, False
    for piece in range(len(pieces)):
        has_negative |= pieces[piece, COUNT] < 0 or pieces[piece, FIRST] < 0
        has_moment |= pieces[piece, MOMENT] != 0
        needed = max(needed, pieces[piece, FIRST] + (pieces[piece, COUNT] + GROUP - 1) // GROUP)
    return needed, has_negative, has_moment


@compiled("int64(float32[::1])")
def _first_line(work: np.ndarray) -> int:
    return (np.int64(work.ctypes.data) + 63) // 64 * 64


@compiled("void(int64, int64, float64, int64, int64, int64, int64, int64, int64, int64, boolean, int64)")
def _decode_to(
    words: int, scales: int, factor: float, kind: int, bits: int, levels: int, out: int, count: int, dtype: int, item_bytes: int,
    has_moment: bool, memory: int,
) -> None:  # fmt: skip
    """The last decode of a group, to an address."""
    next_result = out + item_bytes * GROUP
    place = out if dtype == FLOAT32 and count == GROUP else memory + 4 * _SCRATCH
    if kind == ROTATED and count == GROUP:
        finite = decode_group(words, scales, factor, kind, bits, levels, False, memory + 4 * _V, next_result, item_bytes)
        if finite:
            rotate_back_group(memory + 4 * _V, place)
        else:
            fill(place, 0, GROUP, NAN)
    else:
        finite = decode_group(words, scales, factor, kind, bits, levels, False, place, next_result, item_bytes)
    if has_moment and finite:
        multiply_group(place, memory + 4 * _P)
    if place != out:
        store_group(place, out, count, dtype)


@compiled(
    "void(int64[:, ::1], int64[:, ::1], int64, int64, int64, int64, float64, boolean, int64, int64, int64, float32, float32[::1])"
)
def _encode_pieces(
    pieces: np.ndarray, incoming: np.ndarray, dtype: int, item_bytes: int, words: int, scales: int, factor: float,
    turn: bool, kind: int, bits: int, levels: int, step: float, work: np.ndarray,
) -> None:  # fmt: skip
    memory = _first_line(work)
    zeros, scratch, unused, v = memory + 4 * _ZEROS, memory + 4 * _SCRATCH, memory + 4 * _UNUSED, memory + 4 * _V
    p, index, sizes, squares = memory + 4 * _P, memory + 4 * _INDEX, memory + 4 * _SIZES, memory + 4 * _SQUARES
    words_bytes, scales_bytes = 4 * ROWS * bits, 8 if kind == TWO_MEANS else 4
    for piece in range(len(pieces)):
        gradient, first_residual, first_shadow = pieces[piece, GRADIENT], pieces[piece, RESIDUAL], pieces[piece, SHADOW]
        out, moment, num_elements = pieces[piece, OUT], pieces[piece, MOMENT], pieces[piece, COUNT]
        for start in range(0, num_elements, GROUP):
            group, count = pieces[piece, FIRST] + start // GROUP, min(GROUP, num_elements - start)
            residual = first_residual + 4 * start if first_residual else zeros
            shadow = first_shadow + 4 * start if first_shadow else unused
            values = load_group(gradient + item_bytes * start, count, dtype, scratch) if gradient else zeros
            if moment:
                divisors(moment + 4 * start, count, v, p, sizes)
                divide_group(values, p, scratch)
                values = scratch
            if turn and kind == ROTATED and count == GROUP:
                rotate_group(values, residual, v, sizes, squares)
            else:
                add_group(values, residual, v, sizes, squares)
            for message in range(len(incoming)):
                its_words, its_scales = incoming[message, 0] + words_bytes * group, incoming[message, 1] + scales_bytes * group
                decode_group(its_words, its_scales, 1.0, kind, bits, levels, True, v, v, 4)
            if len(incoming):
                fill(v, count, GROUP, np.float32(0))
                sum_group(v, sizes, squares)
            own_words, own_scales = words + words_bytes * group, scales + scales_bytes * group
            code_group(
                v, shadow, own_words, own_scales, count, kind, bits, levels, step, sizes, squares, index,
                gradient + item_bytes * (start + GROUP) if gradient else zeros, item_bytes,
                residual + 4 * GROUP if first_residual else zeros,
                moment + 4 * (start + GROUP) if moment else zeros, first_shadow != 0 and shadow % STREAM_BYTES == 0,
            )  # fmt: skip
            if out:
                to = out + item_bytes * start
                _decode_to(own_words, own_scales, factor, kind, bits, levels, to, count, dtype, item_bytes, moment != 0, memory)
    fence()


@compiled("void(int64[:, ::1], int64, int64, int64, int64, float64, int64, int64, int64, float32[::1])")
def _decode_pieces(
    pieces: np.ndarray, dtype: int, item_bytes: int, words: int, scales: int, factor: float,
    kind: int, bits: int, levels: int, work: np.ndarray,
) -> None:  # fmt: skip
    memory = _first_line(work)
    words_bytes, scales_bytes = 4 * ROWS * bits, 8 if kind == TWO_MEANS else 4
    for piece in range(len(pieces)):
        out, moment, num_elements = pieces[piece, OUT], pieces[piece, MOMENT], pieces[piece, COUNT]
        if not out:
            continue
        for start in range(0, num_elements, GROUP):
            group, count = pieces[piece, FIRST] + start // GROUP, min(GROUP, num_elements - start)
            if moment:
                divisors(moment + 4 * start, count, memory + 4 * _V, memory + 4 * _P, memory + 4 * _SIZES)
            _decode_to(
                words + words_bytes * group, scales + scales_bytes * group, factor, kind, bits, levels,
                out + item_bytes * start, count, dtype, item_bytes, moment != 0, memory,
            )  # fmt: skip


@compiled("void(int64[:, ::1], float32[::1], int64, boolean[::1])")
def _finite_pieces(pieces: np.ndarray, scales: np.ndarray, num_scales: int, finite: np.ndarray) -> None:
    for piece in range(len(pieces)):
        first = pieces[piece, FIRST] * num_scales
        last = first + (pieces[piece, COUNT] + GROUP - 1) // GROUP * num_scales
        finite[piece] = True
        for at in range(first, last):
            finite[piece] &= np.isfinite(scales[at])


@compiled("void(int64[:, ::1], int64, int64, boolean, float32[::1])")
def _rotate(pieces: np.ndarray, dtype: int, item_bytes: int, turn: bool, work: np.ndarray) -> None:
    """To SHADOW."""
    memory = _first_line(work)
    sizes, squares = memory + 4 * _SIZES, memory + 4 * _SQUARES
    for start in range(0, pieces[0, COUNT], GROUP):
        count = min(GROUP, pieces[0, COUNT] - start)
        values = load_group(pieces[0, GRADIENT] + item_bytes * start, count, dtype, memory + 4 * _SCRATCH)
        residual = pieces[0, RESIDUAL] + 4 * start if pieces[0, RESIDUAL] else memory + 4 * _ZEROS
        if turn and count == GROUP:
            rotate_group(values, residual, pieces[0, SHADOW] + 4 * start, sizes, squares)
        else:
            add_group(values, residual, pieces[0, SHADOW] + 4 * start, sizes, squares)


@compiled("void(int64[:, ::1], int64, int64, boolean, float32[::1])")
def _rotate_back(pieces: np.ndarray, dtype: int, item_bytes: int, turn: bool, work: np.ndarray) -> None:
    """From RESIDUAL to OUT."""
    scratch = _first_line(work) + 4 * _SCRATCH
    for start in range(0, pieces[0, COUNT], GROUP):
        count = min(GROUP, pieces[0, COUNT] - start)
        v, to = pieces[0, RESIDUAL] + 4 * start, pieces[0, OUT] + item_bytes * start
        if np.isnan(to_float32(v)[0]):
            fill(scratch, 0, GROUP, NAN)
            store_group(scratch, to, count, dtype)
        elif turn and count == GROUP:
            rotate_back_group(v, scratch)
            store_group(scratch, to, count, dtype)
        else:
            store_group(v, to, count, dtype)


@compiled("void(int64, int64, int64, int64, boolean, int64, int64, int64)")
def _decode(words: int, scales: int, out: int, num_elements: int, add: bool, kind: int, bits: int, levels: int) -> None:
    words_bytes, scales_bytes = 4 * ROWS * bits, 8 if kind == TWO_MEANS else 4
    for start in range(0, num_elements, GROUP):
        group, to = start // GROUP, out + 4 * start
        decode_group(words + words_bytes * group, scales + scales_bytes * group, 1.0, kind, bits, levels, add, to, to, 4)
        fill(to, min(GROUP, num_elements - start), GROUP, np.float32(0))
