"""Adasum: add gradients that are orthogonal, average those that are parallel.

Two vectors become ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``, each tensor for itself; ranks combine in a binary
tree, neighbours first. Every result of the tree is a linear combination of the ranks' vectors, so the tree is walked
on their inner products alone: one alltoall brings every rank a piece of all vectors, one small allreduce adds up the
inner products of the pieces, one allgather returns the combined pieces.

*Guarantees*: bitwise equal on all ranks; inner products and combinations are computed in float64.
*Source*: Maleki et al., Scaling Distributed Training with Adaptive Summation, MLSys 2021, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite import kernels
from hvdlite.buffer import HALVES
from hvdlite.dataplane.base import DataPlane, as_bits, even_counts, offsets
from hvdlite.message import ReduceOp


def combine(
    plane: DataPlane, source: np.ndarray, target: np.ndarray, tensors: Sequence[slice], dtype: str,
    prescale: float, postscale: float,
) -> None:
    """Combine ``source`` of all ranks into ``target``. *Shapes*: both (n,); ``tensors``: where each tensor lies in it."""
    size = plane.size
    counts = even_counts(len(source), size)
    begin = offsets(counts)
    rows = np.empty((size, counts[plane.rank]), source.dtype)
    plane.alltoall(as_bits(source), as_bits(rows.reshape(-1)), np.tile(np.array(counts, np.int64), (size, 1)))
    values = _widened(rows, dtype) * prescale
    start, stop = int(begin[plane.rank]), int(begin[plane.rank + 1])
    pieces = [slice(max(one.start, start) - start, max(min(one.stop, stop), start) - start) for one in tensors]
    products = np.zeros((len(pieces), size, size))
    for index, piece in enumerate(pieces):
        if piece.start < piece.stop:
            products[index] = values[:, piece] @ values[:, piece].T
    flat = products.reshape(-1)
    plane.allreduce(flat, flat, ReduceOp.Sum)
    result = np.zeros(values.shape[1])
    for index, piece in enumerate(pieces):
        if piece.start < piece.stop:
            result[piece] = coefficients(products[index]) @ values[:, piece]
    plane.allgather(as_bits(_narrowed(result * postscale, source.dtype, dtype)), as_bits(target), counts)


def coefficients(products: np.ndarray) -> np.ndarray:
    """The weights of the vectors in their Adasum, from their inner products. *Shapes*: (n, n) to (n,), n a power of two."""
    weights = list(np.eye(len(products)))
    while len(weights) > 1:
        weights = [_pair(products, a, b) for a, b in zip(weights[::2], weights[1::2], strict=True)]
    return np.asarray(weights[0])


def _pair(products: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot, norm_a, norm_b = a @ products @ b, a @ products @ a, b @ products @ b
    share_a = 1.0 - dot / (2.0 * norm_a) if norm_a > 0 else 1.0
    share_b = 1.0 - dot / (2.0 * norm_b) if norm_b > 0 else 1.0
    return share_a * a + share_b * b


def _widened(rows: np.ndarray, dtype: str) -> np.ndarray:
    if dtype not in HALVES:
        return rows.astype(np.float64)
    wide = np.empty(rows.size, np.float32)
    kernels.halves_to_float(as_bits(rows.reshape(-1)), wide, dtype == "bfloat16")
    return wide.reshape(rows.shape).astype(np.float64)


def _narrowed(values: np.ndarray, array_dtype: np.dtype, dtype: str) -> np.ndarray:
    if dtype not in HALVES:
        return values.astype(array_dtype)
    bits = np.empty(len(values), np.uint16)
    kernels.float_to_halves(values.astype(np.float32), bits, dtype == "bfloat16")
    return bits
