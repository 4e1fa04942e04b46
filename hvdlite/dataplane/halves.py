"""float16 and bfloat16 on hosts: 16 bits on the wire, summed in float32 by the piece's owner.

Two shots: every rank sends piece j to rank j (alltoall); the owner widens, combines in rank order, scales and
casts once; the pieces are gathered. The sum of an element does not depend on where it lies in the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite import kernels
from hvdlite.dataplane.base import DataPlane, as_bits, even_counts
from hvdlite.message import ReduceOp

_CODES = {ReduceOp.Sum: kernels.SUM, ReduceOp.Min: kernels.MIN, ReduceOp.Max: kernels.MAX,
          ReduceOp.Product: kernels.PRODUCT}


def allreduce(
    plane: DataPlane, source: np.ndarray, target: np.ndarray, op: ReduceOp, is_bfloat16: bool,
    prescale: float, postscale: float,
) -> None:
    """Combine 16-bit floats. *Shapes*: ``source`` and ``target`` (n,), any 16-bit dtype; may be the same."""
    counts = even_counts(len(source), plane.size)
    mine = np.empty(counts[plane.rank], np.uint16)
    reducescatter(plane, source, mine, counts, op, is_bfloat16, prescale, postscale)
    plane.allgather(mine, as_bits(target), counts)


def reducescatter(
    plane: DataPlane, source: np.ndarray, target: np.ndarray, counts: Sequence[int], op: ReduceOp,
    is_bfloat16: bool, prescale: float, postscale: float,
) -> None:
    """Combine as ``allreduce`` and keep this rank's piece. *Shapes*: ``target`` (counts[rank],)."""
    rows = np.empty((plane.size, len(target)), np.uint16)
    plane.alltoall(as_bits(source), rows.reshape(-1), np.tile(np.array(counts, np.int64), (plane.size, 1)))
    kernels.reduce_halves(
        rows, as_bits(target), _CODES[op], is_bfloat16, np.float32(prescale), np.float32(postscale))
