"""One group of the codec at a time: the kernels below ``codec_cpu``, which keep ``codec``'s order of operations bitwise.

A group is read, rotated, coded and decoded while it lies in the first-level cache. Meanwhile the next one is asked for, a row at
a time (all rows at once stall: the last decode of 64 MB took 14 ms instead of 6), and the new residual, which nobody reads before
the next step, goes past the caches where it is aligned (encoding 64 MB: 12 ms, 20 ms otherwise).
Everything is passed by address: a Numba array as an argument costs two atomic operations, which made up half of a group's time.
Gradients also have a dtype code, so that one compilation serves all dtypes. Names of addresses end in ``_at``.

Numba's cache notices changes of a kernel's own file only: after editing this one or ``vectors``, delete ``__pycache__``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from hvdlite.compression.rotation import BUTTERFLIES, GROUP, LANES, ROWS, SIGNS
from hvdlite.compression.spec import DTYPES, FLOOR, LOWER, NAN, RAISE, SCALES, SMALLEST
from hvdlite.compression.vectors import (
    code_row,
    code_row_streamed,
    decode_add_row,
    decode_row,
    prefetch,
    prefetch_to_write,
    to_float32,
    to_float64,
    to_uint16,
    to_uint32,
)
from hvdlite.kernels import compiled, float_to_halves, halves_to_float

ROTATED, L1, TWO_MEANS, RMS = range(len(SCALES))
FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = range(len(DTYPES))
#: Floats per cache line, and bytes.
_LINE, _LINE_BYTES = 16, 64


def _lane_loop(name: str, arrays: str, load: str, middle: list[str], store: str, end: list[str]) -> Any:
    """A kernel that holds the 16 rows of a lane in local variables, in a loop over lanes, which LLVM makes vectors of."""
    names = arrays.split()
    rows = [(f"a{row}", f"[{LANES * row} + lane]") for row in range(ROWS)]
    body = [load.format(a=a, at=at) for a, at in rows] + middle + [store.format(a=a, at=at) for a, at in rows if store] + end
    lines = [
        f"def {name}({', '.join(one + '_at' for one in names)}):",
        *(f"    {one} = to_float32({one}_at)" for one in names),
        f"    for lane in range({LANES}):",
        *(f"        {line}" for line in body),
    ]
    known: dict[str, Any] = {"SIGNS": SIGNS, "to_float32": to_float32, "__name__": __name__}
    exec(compile("\n".join(lines), __file__, "exec"), known)  # as from this file, so that Numba's cache notices its changes
    return compiled(f"void({', '.join(['int64'] * len(names))})")(known[name])


_TRANSFORM = [f"a{i}, a{j} = a{i} + a{j}, a{i} - a{j}" for i, j in BUTTERFLIES]
_SUMS = (
    ["size = abs(a0)", "square = a0 * a0"]
    + [line for row in range(1, ROWS) for line in (f"size = size + abs(a{row})", f"square = square + a{row} * a{row}")]
    + ["sizes[lane] = size", "squares[lane] = square"]
)
_INTO = "values residual v sizes squares"
_KEEP = "{a} = {a} + residual{at}; v{at} = {a}"
#: v = values + residual, with or without rotation; and of each lane the sums of |v| and v^2.
rotate_group = _lane_loop("rotate_group", _INTO, "{a} = values{at} * SIGNS{at}", _TRANSFORM, _KEEP, _SUMS)
add_group = _lane_loop("add_group", _INTO, "{a} = values{at}", [], _KEEP, _SUMS)
rotate_back_group = _lane_loop("rotate_back_group", "v out", "{a} = v{at}", _TRANSFORM, "out{at} = {a} * SIGNS{at}", [])
sum_group = _lane_loop("sum_group", "v sizes squares", "{a} = v{at}", [], "", _SUMS)
_ALL = " + ".join(f"a{row}" for row in range(ROWS))
_sum_moments = _lane_loop("_sum_moments", "moment lanes", "{a} = moment{at}", [], "", [f"lanes[lane] = {_ALL}"])


@compiled("float32(int64)")
def _tree(lanes_at: int) -> float:
    """Add up the lanes, which are overwritten."""
    lanes = to_float32(lanes_at)
    for half in (16, 8, 4, 2, 1):
        for lane in range(half):
            lanes[lane] += lanes[half + lane]
    return lanes[0]


@compiled("void(int64, int64, int64, float32)")
def fill(at: int, start: int, stop: int, value: float) -> None:
    """Set elements start to stop."""
    values = to_float32(at)
    for i in range(start, stop):
        values[i] = value


@compiled("void(int64, float32, int64, int64)")
def _sums_scaled(v_at: int, factor: float, sizes_at: int, squares_at: int) -> None:
    """The sums of each lane once more, of v * factor: for groups whose squares leave the range of float32."""
    v, sizes, squares = to_float32(v_at), to_float32(sizes_at), to_float32(squares_at)
    fill(sizes_at, 0, LANES, np.float32(0))
    fill(squares_at, 0, LANES, np.float32(0))
    for row in range(ROWS):
        for lane in range(LANES):
            value = v[LANES * row + lane] * factor
            sizes[lane] += abs(value)
            squares[lane] += value * value


@compiled("UniTuple(float32, 2)(int64, int64, float32, int64, int64)")
def _two_means(v_at: int, count: int, factor: float, below_at: int, above_at: int) -> tuple[float, float]:
    v, below, above = to_float32(v_at), to_float32(below_at), to_float32(above_at)
    fill(below_at, 0, LANES, np.float32(0))
    fill(above_at, 0, LANES, np.float32(0))
    num_above = 0
    for row in range(ROWS):
        for lane in range(LANES):
            value = v[LANES * row + lane] * factor
            positive = v[LANES * row + lane] >= 0  # not value, which may have lost its sign to underflow
            num_above += positive and LANES * row + lane < count
            above[lane] += value if positive else np.float32(0)
            below[lane] += np.float32(0) if positive else value
    low = _tree(below_at) / np.float32(max(count - num_above, 1))
    high = _tree(above_at) / np.float32(max(num_above, 1))
    return low / factor, high / factor


@compiled("float32(int64, int64, int64, float32, float32, float32, int64, int64, int64)")
def _choose_levels(
    v_at: int, count: int, bits: int, factor: float, square: float, step: float, levels_at: int, index_at: int, products_at: int,
) -> float:  # fmt: skip
    """Of more than 2 levels: the nearest one's index for each element; returns the scale, in units of v * factor."""
    v, levels, index = to_float32(v_at), to_float32(levels_at), to_uint32(index_at)
    products = to_float32(products_at)
    half = 1 << (bits - 1)
    width = step * np.sqrt(square / np.float32(count))
    inverse = np.float32(1) / width if width > 0 else np.float32(0)
    fill(products_at, 0, LANES, np.float32(0))
    for row in range(ROWS):
        for lane in range(LANES):
            at = LANES * row + lane
            value = v[at] * factor
            distance = np.float32(1 if abs(value) >= width > 0 else 0) if bits == 2 else abs(value) * inverse
            size = int(distance) if distance < half - 1 else half - 1  # NaN: not below
            chosen = half + size if v[at] >= 0 else half - 1 - size
            index[at] = chosen
            products[lane] += abs(value * levels[chosen])
    product = _tree(products_at)
    return square / product if product != 0 else product


@compiled("void(int64, int64, int64, float32, int64, int64, int64)")
def _code_planes(v_at: int, index_at: int, bits: int, scale: float, levels_at: int, words_at: int, shadow_at: int) -> None:
    v, index, levels = to_float32(v_at), to_uint32(index_at), to_float32(levels_at)
    words, shadow = to_uint32(words_at), to_float32(shadow_at)
    for row in range(ROWS):
        for plane in range(bits):
            word = np.uint32(0)
            for lane in range(LANES):
                word |= (index[LANES * row + lane] >> np.uint32(plane) & np.uint32(1)) << np.uint32(lane)
            words[row * bits + plane] = word
    for at in range(GROUP):
        shadow[at] = v[at] - levels[index[at]] * scale


@compiled(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, float32, int64, int64, int64, int64, int64, int64, int64, "
    "boolean)"
)
def code_group(
    v_at: int, shadow_at: int, words_at: int, scales_at: int, count: int, kind: int, bits: int, levels_at: int, step: float,
    sizes_at: int, squares_at: int, index_at: int, next_gradient: int, item_bytes: int, next_residual: int, next_moment: int,
    stream: bool,
) -> None:  # fmt: skip
    """Words, scales and new residual of v, whose sums are given for each lane; and ask for the next group's lines."""
    words, scales, levels = to_uint32(words_at), to_float32(scales_at), to_float32(levels_at)
    size, square, factor = _tree(sizes_at), _tree(squares_at), np.float32(1)
    if size != 0 and not SMALLEST <= square < np.inf:
        factor = LOWER if square > 1 else RAISE
        _sums_scaled(v_at, factor, sizes_at, squares_at)
        size, square = _tree(sizes_at), _tree(squares_at)
    low = np.float32(0)
    if bits > 1:
        high = _choose_levels(v_at, count, bits, factor, square, step, levels_at, index_at, sizes_at) / factor
    elif kind == TWO_MEANS:
        low, high = _two_means(v_at, count, factor, sizes_at, squares_at)
    elif kind == RMS:
        high = np.sqrt(square / np.float32(count)) / factor
    elif kind == ROTATED:
        high = (square / size if size != 0 else size) / factor
    else:
        high = size / np.float32(count) / factor
    if bits == 1 and kind != TWO_MEANS:
        v = to_float32(v_at)
        equal = 1  # most often found wrong at the second element
        while equal < count and abs(v[equal]) == abs(v[0]):
            equal += 1
        if equal == count:
            high = abs(v[0])
    if not (np.isfinite(high * levels[(1 << bits) - 1]) and np.isfinite(low)):
        scales[0] = NAN
        if kind == TWO_MEANS:
            scales[1] = NAN
        for row in range(ROWS * bits):
            words[row] = 0
        fill(shadow_at, 0, GROUP, NAN)
    else:
        if kind == TWO_MEANS:
            scales[0], scales[1] = low, high
        else:
            scales[0], low = high, -high
        if bits == 1:
            for row in range(ROWS):
                # A row of the next group for each row of this one: all at once would stall.
                for line in range(2 * row, 2 * row + 2):
                    prefetch(next_residual + _LINE_BYTES * line)
                    prefetch(next_moment + _LINE_BYTES * line)
                    prefetch(next_gradient + _LINE * item_bytes * line)
                if stream:
                    words[row] = code_row_streamed(v_at, shadow_at, LANES * row, low, high)
                else:
                    words[row] = code_row(v_at, shadow_at, LANES * row, low, high)
        else:
            _code_planes(v_at, index_at, bits, high, levels_at, words_at, shadow_at)
    fill(shadow_at, count, GROUP, np.float32(0))


@compiled("boolean(int64, int64, float64, int64, int64, int64, boolean, int64, int64, int64)")
def decode_group(
    words_at: int, scales_at: int, factor: float, kind: int, bits: int, levels_at: int, add: bool, out_at: int,
    next_result: int, item_bytes: int,
) -> bool:  # fmt: skip
    """Decode, or add, all 512 elements; whether they are finite. If not, all become NaN. Asks for the next result's lines."""
    words, scales = to_uint32(words_at), to_float32(scales_at)
    if kind == TWO_MEANS:
        low, high = np.float32(scales[0] * factor), np.float32(scales[1] * factor)
    else:
        high = np.float32(scales[0] * factor)
        low = -high
    if not (np.isfinite(low) and np.isfinite(high)):
        fill(out_at, 0, GROUP, NAN)
        return False
    if bits > 1:
        levels, out = to_float32(levels_at), to_float32(out_at)
        for row in range(ROWS):
            for lane in range(LANES):
                index = np.uint32(0)
                for plane in range(bits):
                    index |= (words[row * bits + plane] >> np.uint32(lane) & np.uint32(1)) << np.uint32(plane)
                value = levels[index] * high
                out[LANES * row + lane] = out[LANES * row + lane] + value if add else value
    elif add:
        for row in range(ROWS):
            decode_add_row(words[row], low, high, out_at, LANES * row)
    else:
        for row in range(ROWS):
            decode_row(words[row], low, high, out_at, LANES * row)
            for line in range(2 * row, 2 * row + 2):
                prefetch_to_write(next_result + _LINE * item_bytes * line)
    return True


@compiled("int64(int64, int64, int64, int64)")
def load_group(address: int, count: int, dtype: int, scratch_at: int) -> int:
    """A group of a gradient as 512 float32: where it lies if it can be used there, else in scratch, padded with zeros."""
    scratch = to_float32(scratch_at)
    if dtype == FLOAT32:
        if count == GROUP:
            return address
        narrow = to_float32(address)
        for at in range(count):
            scratch[at] = narrow[at]
    elif dtype == FLOAT64:
        wide = to_float64(address)
        for at in range(count):
            scratch[at] = np.float32(wide[at])
    else:
        halves_to_float(carray(to_uint16(address), (count,)), carray(scratch, (count,)), dtype == BFLOAT16)
    fill(scratch_at, count, GROUP, np.float32(0))
    return scratch_at


@compiled("void(int64, int64, int64, int64, int64)")
def divisors(moment_at: int, count: int, scratch_at: int, p_at: int, lanes_at: int) -> None:
    """p of each element of a group, from its second moments; 1 where it would be 0."""
    here = load_group(moment_at, count, FLOAT32, scratch_at)
    _sum_moments(here, lanes_at)
    moment, p = to_float32(here), to_float32(p_at)
    least = FLOOR * np.sqrt(_tree(lanes_at) / np.float32(count))
    for at in range(GROUP):
        one = np.sqrt(moment[at]) + least
        p[at] = one if one != 0 else np.float32(1)


@compiled("void(int64, int64, int64)")
def divide_group(values_at: int, p_at: int, out_at: int) -> None:
    values, p, out = to_float32(values_at), to_float32(p_at), to_float32(out_at)
    for at in range(GROUP):
        out[at] = np.true_divide(values[at], p[at])


@compiled("void(int64, int64)")
def multiply_group(values_at: int, p_at: int) -> None:
    """In place; NaN becomes the codec's own."""
    values, p = to_float32(values_at), to_float32(p_at)
    for at in range(GROUP):
        value = values[at] * p[at]
        values[at] = value if value == value else NAN


@compiled("void(int64, int64, int64, int64)")
def store_group(values_at: int, address: int, count: int, dtype: int) -> None:
    """Bring 512 float32 to where a group of a gradient belongs."""
    values = to_float32(values_at)
    if dtype == FLOAT32:
        narrow = to_float32(address)
        for at in range(count):
            narrow[at] = values[at]
    elif dtype == FLOAT64:
        wide = to_float64(address)
        for at in range(count):
            wide[at] = values[at]
    else:
        float_to_halves(carray(values, (count,)), carray(to_uint16(address), (count,)), dtype == BFLOAT16)
