"""The codec: float32 gradients to 1, 2, 4 or 8 bits per element, in NumPy. The reference that kernels are held to bitwise.

A tensor is cut into groups of 512 elements that never cross it. A whole group is rotated (``rotation``), the residual is
added, ``v = rotated + residual``, and each element is sent as the index of a level; the group's scale multiplies the levels.
``residual' = v - decoded`` stays with the sender. All but the outer edge (``encode``, ``rotate``, ``unrotate``, ``rotate_back``)
lives in the rotated domain.

*Scales*, of 1 bit: ``rotated`` ``sum v^2 / sum |v|``; without rotation, for comparison: ``l1`` ``mean |v|``, ``rms``
``sqrt(mean v^2)``, ``two_means`` CNTK's, the mean of the negative elements and that of the others. Rotated 2, 4 and 8 bits:
``LEVELS``, scaled so that <v, decoded> = sum v^2, as with 1 bit.

With 1 bit, except ``two_means``, the scale of a group whose |v| are all equal is that |v|, so that sums do not round it: a
constant tensor, which the rotation keeps so (``rotation``), is sent exactly.

*The tail*, a last group of fewer than 512 elements, is not rotated: its residual would leak into the padding and come back as
noise. Padding is exactly zero in residuals and rotated arrays, and never enters a scale. The scale is the same as that of other
groups: with that of least squares (1 bit: the mean |v|) a fixed gradient was up to 250 steps behind, with this one 2 to 12.

*Wire format*: little endian. For each group ``16 * bits`` words of 32 bits: bit ``lane`` of word ``row * bits + plane`` is bit
``plane`` of the level's index at (row, lane); with 1 bit, ``v >= 0``, so -0.0 counts as positive and padding sends ones. Then,
after all words of a message, one float32 scale for each group (``two_means``: two, the negative mean first).
Every operation is one float32 operation rounded to nearest even, nothing contracted, in this order: butterflies as
``rotation.BUTTERFLIES``; sums over a group: the rows of each lane in order, then lanes i and i + 16, i and i + 8, ... 1.

*Range*: if sum v^2 leaves [2^-80, infinity), v is multiplied by 2^100 or 2^-80 before it is summed and the scale divided by it:
exact, so finite groups, denormals and huge outliers included, get a finite scale; only the rotation itself overflows, when 16
elements of a lane add up to over 2^130. An all-zero group has scale 0 and decodes to exact zeros.

*Not finite*: a group whose v holds NaN or infinity has scale NaN, words 0 and a new residual of NaN, which must never be
swapped in; it decodes to NaN throughout, and so does every sum it enters. NaNs written here are all 0x7FC00000.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from hvdlite.compression.rotation import BUTTERFLIES, GROUP, LANES, ROWS, SIGNS
from hvdlite.compression.spec import (
    COUNT,
    FIRST,
    FLOOR,
    GRADIENT,
    LEVELS,
    LOWER,
    MOMENT,
    NAN,
    OUT,
    RAISE,
    RESIDUAL,
    SHADOW,
    SMALLEST,
    STEPS,
    CodecSpec,
    check_messages,
    check_pieces,
    check_table,
)


def encode_pieces(
    spec: CodecSpec,
    dtype: str,
    pieces: np.ndarray,
    incoming: Sequence[tuple[np.ndarray, np.ndarray]],
    words: np.ndarray,
    scales: np.ndarray,
    factor: float,
) -> None:
    """Quantise every piece of a table (``spec.GRADIENT`` and following): v = rotated gradient + residual + decoded incoming.

    *Shapes*: incoming messages (words, scales) are numbered by group as words (groups * words_per_group,) and scales
    (groups * scales_per_group,) are; they are added in the order given. Where a piece has OUT, what was just encoded is decoded,
    multiplied by factor and rotated back into it. Where it has MOMENT, the gradient is divided by p (``spec.FLOOR``) before it
    is rotated and the result multiplied by it. *Raises*: ValueError.
    """
    check_messages(spec, _groups_needed(spec, pieces), [*incoming, (words, scales)])
    for piece in pieces.tolist():
        num_elements, own = piece[COUNT], _part(spec, piece, words, scales)
        gradient = _gradient(dtype, piece[GRADIENT], num_elements)
        p = _divisors(piece)
        v = _to_rotated(spec, gradient, _float32(piece[RESIDUAL], spec.padded(num_elements)), p).ravel()
        for message in incoming:
            decode_add(spec, *_part(spec, piece, *message), v, num_elements)
        shadow = _float32(piece[SHADOW], spec.padded(num_elements))
        _encode(spec, v.reshape(-1, ROWS, LANES), _counts(num_elements), shadow, *own)
        _decode_piece(spec, dtype, piece, own, factor, p)


def decode_pieces(
    spec: CodecSpec, dtype: str, pieces: np.ndarray, words: np.ndarray, scales: np.ndarray, factor: float
) -> None:
    """The last decode, ``unrotate``, of every piece that has OUT, into it. *Raises*: ValueError."""
    check_messages(spec, _groups_needed(spec, pieces), [(words, scales)])
    for piece in pieces.tolist():
        _decode_piece(spec, dtype, piece, _part(spec, piece, words, scales), factor, _divisors(piece))


def finite_pieces(spec: CodecSpec, pieces: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """For every piece whether all its groups were finite on every rank. *Shapes*: (num_pieces,), bool. *Raises*: ValueError."""
    check_messages(spec, _groups_needed(spec, pieces), [(None, scales)])
    each = spec.scales_per_group
    starts, lengths = pieces[:, FIRST], -(-pieces[:, COUNT] // GROUP)
    parts = [scales[each * start : each * (start + length)] for start, length in zip(starts, lengths, strict=True)]
    return np.array([np.isfinite(part).all() for part in parts], np.bool_)


def encode(
    spec: CodecSpec,
    gradient: np.ndarray,
    residual: np.ndarray | None,
    shadow: np.ndarray | None,
    words: np.ndarray,
    scales: np.ndarray,
) -> None:
    """Quantise gradient + residual; the new residual goes to ``shadow``.

    *Shapes*: gradient (num_elements,), float32, float64, float16 or, as bits, bfloat16 (uint16): a tensor, or whole groups of one
    and perhaps its tail; residual and shadow (padded,), which may be the same; words (groups * words_per_group,); scales
    (groups * scales_per_group,). Without residual nothing is added, without shadow the new one is dropped.
    """
    _encode(spec, _to_rotated(spec, gradient, residual), _counts(len(gradient)), shadow, words, scales)


def encode_rotated(
    spec: CodecSpec, rotated: np.ndarray, shadow: np.ndarray | None, words: np.ndarray, scales: np.ndarray, num_elements: int
) -> None:
    """Quantise what is already in the rotated domain, residual included. *Shapes*: rotated and shadow (padded,)."""
    v = rotated[: spec.padded(num_elements)].reshape(-1, ROWS, LANES) + np.float32(0)
    _encode(spec, v, _counts(num_elements), shadow, words, scales)


def decode(spec: CodecSpec, words: np.ndarray, scales: np.ndarray, out: np.ndarray, num_elements: int) -> None:
    """Decode within the rotated domain. *Shapes*: out (padded,)."""
    out[: spec.padded(num_elements)] = _decoded(spec, words, scales, _counts(num_elements), 1.0).ravel()


def decode_add(spec: CodecSpec, words: np.ndarray, scales: np.ndarray, total: np.ndarray, num_elements: int) -> None:
    """Decode and add within the rotated domain. *Shapes*: total (padded,)."""
    decoded = _decoded(spec, words, scales, _counts(num_elements), 1.0).ravel()
    into = total[: len(decoded)]
    with np.errstate(all="ignore"):
        into += decoded
    into[np.isnan(decoded)] = NAN


def rotate(spec: CodecSpec, gradient: np.ndarray, residual: np.ndarray | None, out: np.ndarray) -> None:
    """Bring gradient + residual into the rotated domain. *Shapes*: gradient (num_elements,); residual and out (padded,)."""
    out[: spec.padded(len(gradient))] = _to_rotated(spec, gradient, residual).ravel()


def unrotate(spec: CodecSpec, words: np.ndarray, scales: np.ndarray, gradient: np.ndarray, factor: float) -> None:
    """Decode, rotate back and multiply by factor: the last decode. *Shapes*: gradient (num_elements,), written.

    The factor (1 / ranks, postscale) enters each group's scale in float64, rounded once; a constant tensor stays exact.
    """
    rotated = _decoded(spec, words, scales, _counts(len(gradient)), factor)
    _from_rotated(spec, rotated, gradient)


def rotate_back(spec: CodecSpec, rotated: np.ndarray, gradient: np.ndarray) -> None:
    """Bring an array of the rotated domain, such as a residual, back. *Shapes*: rotated (padded,), gradient (num_elements,)."""
    _from_rotated(spec, rotated[: spec.padded(len(gradient))].reshape(-1, ROWS, LANES), gradient)


def _groups_needed(spec: CodecSpec, pieces: np.ndarray) -> int:
    """How many groups a message has that holds every piece."""
    check_table(pieces)
    check_pieces(spec, bool((pieces[:, [COUNT, FIRST]] < 0).any()), bool((pieces[:, MOMENT] != 0).any()))
    return int((pieces[:, FIRST] + -(-pieces[:, COUNT] // GROUP)).max(initial=0))


def _part(spec: CodecSpec, piece: list[int], words: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The words and scales of a piece, as views."""
    first, last = piece[FIRST], piece[FIRST] + spec.num_groups(piece[COUNT])
    return (
        words[first * spec.words_per_group : last * spec.words_per_group],
        scales[first * spec.scales_per_group : last * spec.scales_per_group],
    )


def _at(address: int, length: int, dtype: str) -> np.ndarray:
    """What lies at an address, as an array."""
    kind = np.dtype(dtype)
    memory = (ctypes.c_uint8 * (length * kind.itemsize)).from_address(address)
    return np.ctypeslib.as_array(memory).view(kind)


def _float32(address: int, length: int) -> np.ndarray | None:
    return _at(address, length, "float32") if address else None


def _gradient(dtype: str, address: int, num_elements: int) -> np.ndarray:
    """A gradient as ``encode`` takes it: bfloat16 as bits; zeros without an address."""
    kind = "uint16" if dtype == "bfloat16" else dtype
    return _at(address, num_elements, kind) if address else np.zeros(num_elements, kind)


def _divisors(piece: list[int]) -> np.ndarray | None:
    """p for each element of a piece that has moments; 1 where it would be 0. *Shapes*: (groups, ROWS, LANES)."""
    if not piece[MOMENT]:
        return None
    counts = _counts(piece[COUNT])
    padded = np.zeros(len(counts) * GROUP, np.float32)
    padded[: piece[COUNT]] = _at(piece[MOMENT], piece[COUNT], "float32")
    moments = padded.reshape(-1, ROWS, LANES)
    with np.errstate(all="ignore"):
        p = np.sqrt(moments) + FLOOR * np.sqrt(_sum(moments) / counts.astype(np.float32))
    return np.where(p == 0, np.float32(1), p)


def _decode_piece(
    spec: CodecSpec, dtype: str, piece: list[int], own: tuple[np.ndarray, np.ndarray], factor: float, p: np.ndarray | None
) -> None:
    if piece[OUT]:
        rotated = _decoded(spec, *own, _counts(piece[COUNT]), factor)
        _from_rotated(spec, rotated, _gradient(dtype, piece[OUT], piece[COUNT]), p)


def _counts(num_elements: int) -> np.ndarray:
    """How many elements each group holds, the last perhaps fewer. *Shapes*: (groups, 1, 1)."""
    starts = np.arange(0, num_elements, GROUP)
    return np.minimum(num_elements - starts, GROUP).reshape(-1, 1, 1)


def _is_padding(counts: np.ndarray) -> np.ndarray:
    return np.arange(GROUP).reshape(1, ROWS, LANES) >= counts


def _is_rotated(spec: CodecSpec, counts: np.ndarray) -> np.ndarray:
    return (counts == GROUP) & (spec.scale == "rotated")


def _butterflies(values: np.ndarray) -> np.ndarray:
    rows = [values[:, row] for row in range(ROWS)]
    for a, b in BUTTERFLIES:
        rows[a], rows[b] = rows[a] + rows[b], rows[a] - rows[b]
    return np.stack(rows, axis=1)


def _to_rotated(
    spec: CodecSpec, gradient: np.ndarray, residual: np.ndarray | None, p: np.ndarray | None = None
) -> np.ndarray:
    counts = _counts(len(gradient))
    padded = np.zeros(spec.padded(len(gradient)), np.float32)
    with np.errstate(all="ignore"):
        if gradient.dtype == np.uint16:
            padded.view(np.uint32)[: len(gradient)] = gradient.astype(np.uint32) << 16
        else:
            padded[: len(gradient)] = gradient
        values: np.ndarray = padded.reshape(-1, ROWS, LANES)
        if p is not None:
            values = values / p
        values = np.where(_is_rotated(spec, counts), _butterflies(values * SIGNS.reshape(ROWS, LANES)), values)
        return values + (np.float32(0) if residual is None else residual[: values.size].reshape(values.shape))


def _from_rotated(spec: CodecSpec, rotated: np.ndarray, gradient: np.ndarray, p: np.ndarray | None = None) -> None:
    with np.errstate(all="ignore"):
        back = _butterflies(rotated) * SIGNS.reshape(ROWS, LANES)
        back = np.where(_is_rotated(spec, _counts(len(gradient))), back, rotated)
        back[np.isnan(rotated[:, 0, 0])] = NAN
        if p is not None:
            back = back * p
            back[np.isnan(back)] = NAN
        values = back.ravel()[: len(gradient)]
        if gradient.dtype == np.uint16:
            bits = values.view(np.uint32)
            rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            gradient[:] = np.where(np.isnan(values), bits >> 16, rounded)
        else:
            gradient[:] = values


def _sum(values: np.ndarray) -> np.ndarray:
    """In the order that the wire format fixes. *Shapes*: (groups, ROWS, LANES) to (groups, 1, 1)."""
    lanes = values[:, 0] + np.float32(0)
    for row in range(1, ROWS):
        lanes = lanes + values[:, row]
    half = LANES // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    return lanes[:, :, None]


def _encode(
    spec: CodecSpec, v: np.ndarray, counts: np.ndarray, shadow: np.ndarray | None, words: np.ndarray, scales: np.ndarray
) -> None:
    with np.errstate(all="ignore"):
        squares = _sum(v * v)
        factor = np.where(squares >= SMALLEST, np.where(squares < np.inf, np.float32(1), LOWER), RAISE)
        w, positive = v * factor, v >= 0
        index = _indices(spec, w, positive, counts)
        scale = _scale(spec, w, positive, index, counts) / factor
        if spec.bits == 1 and spec.scale != "two_means":
            size = np.abs(v)
            scale = np.where(((size == size[:, :1, :1]) | _is_padding(counts)).all((1, 2), keepdims=True), size[:, :1, :1], scale)
        broken = ~np.isfinite(scale * LEVELS[spec.bits][-1]).all(2, keepdims=True)
        scale = np.where(broken, NAN, scale)
        decoded = _levels(spec, scale, index)
        residual = np.where(broken, NAN, v - decoded)
    index = np.where(broken, 0, index)
    _pack(spec, index, words)
    scales[: scale.size] = scale.ravel()
    if shadow is not None:
        shadow[: v.size] = np.where(_is_padding(counts), np.float32(0), residual).ravel()


def _indices(spec: CodecSpec, w: np.ndarray, positive: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Of the level of each element. w may have lost its sign to underflow."""
    half = len(LEVELS[spec.bits]) // 2
    deviation = np.sqrt(_sum(w * w) / counts.astype(np.float32))
    step = STEPS[spec.bits] * deviation
    if spec.bits == 1:
        size = np.zeros(w.shape, np.int64)
    elif spec.bits == 2:
        size = ((np.abs(w) >= step) & (step > 0)).astype(np.int64)
    else:
        inverse = np.where(step > 0, np.float32(1) / step, np.float32(0))
        size = np.nan_to_num(np.minimum(np.abs(w) * inverse, np.float32(half - 1))).astype(np.int64)
    return np.where(positive, half + size, half - 1 - size)


def _scale(spec: CodecSpec, w: np.ndarray, positive: np.ndarray, index: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """*Shapes*: (groups, 1, scales_per_group)."""
    inside = ~_is_padding(counts)
    count = counts.astype(np.float32)
    if spec.scale == "two_means":
        below = np.where(positive, np.float32(0), w)
        above = np.where(positive, w, np.float32(0))
        num_above = (positive & inside).sum((1, 2), keepdims=True)
        num_below = counts - num_above
        means = [_sum(s) / np.maximum(n, 1).astype(np.float32) for s, n in ((below, num_below), (above, num_above))]
        return np.concatenate(means, axis=2)
    squares = _sum(w * w)
    if spec.scale == "rms":
        return np.sqrt(squares / count)
    product = _sum(np.abs(w * LEVELS[spec.bits][index]))
    if spec.scale == "l1":
        return product / count
    return np.where(product == 0, product, squares / product)


def _levels(spec: CodecSpec, scale: np.ndarray, index: np.ndarray) -> np.ndarray:
    if spec.scale == "two_means":
        return np.where(index == 1, scale[:, :, 1:], scale[:, :, :1])
    return LEVELS[spec.bits][index] * scale


def _decoded(spec: CodecSpec, words: np.ndarray, scales: np.ndarray, counts: np.ndarray, factor: float) -> np.ndarray:
    num_groups = len(counts)
    planes = words[: num_groups * spec.words_per_group].reshape(num_groups, ROWS, spec.bits, 1)
    bits = planes >> np.arange(LANES, dtype=np.uint32) & np.uint32(1)
    index = (bits << np.arange(spec.bits, dtype=np.uint32).reshape(-1, 1)).sum(2)
    with np.errstate(all="ignore"):
        scale = scales[: num_groups * spec.scales_per_group].reshape(num_groups, 1, spec.scales_per_group)
        scale = (scale.astype(np.float64) * factor).astype(np.float32)
        decoded = _levels(spec, scale, index)
    decoded = np.where(np.isfinite(scale).all(2, keepdims=True), decoded, NAN)
    return np.where(_is_padding(counts), np.float32(0), decoded)


def _pack(spec: CodecSpec, index: np.ndarray, words: np.ndarray) -> None:
    planes = index[:, :, None, :] >> np.arange(spec.bits).reshape(-1, 1) & 1
    packed = (planes.astype(np.uint32) << np.arange(LANES, dtype=np.uint32)).sum(3, dtype=np.uint32)
    words[: packed.size] = packed.ravel()
