"""float16 and bfloat16 on hosts: 16 bits on the wire, summed in float32 by the piece's owner.

Two shots: every rank sends piece j to rank j (alltoall); the owner widens, combines in rank order, scales and
casts once; the pieces are gathered. The sum of an element does not depend on where it lies in the buffer.
What is long goes in segments, so that the wire and the sums overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hvdlite import kernels
from hvdlite.dataplane.base import DataPlane, Transfer, as_bits, even_counts
from hvdlite.message import ReduceOp

#: Elements of a segment for each rank, and segments between two stages of one, while its messages travel. Measured
#: (tools/bench_allreduce.py).
SEGMENT_ELEMENTS, LAG = 1 << 16, 2
_CODES = {ReduceOp.Sum: kernels.SUM, ReduceOp.Min: kernels.MIN, ReduceOp.Max: kernels.MAX,
          ReduceOp.Product: kernels.PRODUCT}


def allreduce(
    plane: DataPlane, source: np.ndarray, target: np.ndarray, op: ReduceOp, is_bfloat16: bool,
    prescale: float, postscale: float,
) -> None:
    """Combine 16-bit floats. *Shapes*: ``source`` and ``target`` (n,), any 16-bit dtype; may be the same."""
    source, target = as_bits(source), as_bits(target)
    combine = (_CODES[op], is_bfloat16, np.float32(prescale), np.float32(postscale))
    if plane.size > 1 and len(source) > SEGMENT_ELEMENTS * plane.size:
        _in_segments(plane, source, target, combine)
        return
    counts = even_counts(len(source), plane.size)
    mine = np.empty(counts[plane.rank], np.uint16)
    reducescatter(plane, source, mine, counts, op, is_bfloat16, prescale, postscale)
    plane.allgather(mine, target, counts)


def _in_segments(plane: DataPlane, source: np.ndarray, target: np.ndarray, combine: tuple[int, bool, float, float]) -> None:
    """Step s sends segment s to its owners, combines segment s - LAG as an owner, and gets the results of segment s - 2 LAG."""
    peers = [peer for peer in range(plane.size) if peer != plane.rank]
    length = SEGMENT_ELEMENTS * plane.size
    starts = range(0, len(source), length)
    places = []
    for start in starts:
        ends = np.cumsum([start, *even_counts(min(length, len(source) - start), plane.size)]).tolist()
        places.append([slice(*pair) for pair in pairwise(ends)])
    memory = np.empty((LAG + 1, length), np.uint16)

    def rows(segment: int) -> np.ndarray:
        """Room for all ranks' values of this rank's piece."""
        count = places[segment][plane.rank].stop - places[segment][plane.rank].start
        return memory[segment % len(memory), : plane.size * count].reshape(plane.size, count)

    arriving: list[list[Transfer]] = [[] for _ in starts]
    leaving: list[list[Transfer]] = [[] for _ in starts]
    for step in range(len(starts) + 2 * LAG):
        if step < len(starts):
            mine = places[step][plane.rank]
            own = rows(step)
            own[plane.rank] = source[mine]
            arriving[step] = [plane.receive(own[peer], peer, 2 * step) for peer in peers]
            leaving[step] = [plane.send(source[places[step][peer]], peer, 2 * step) for peer in peers]
        if 0 <= (segment := step - LAG) < len(starts):
            # Where target is source, results may come only when what is there has left.
            for transfer in (*arriving[segment], *leaving[segment]):
                transfer.wait()
            mine = places[segment][plane.rank]
            kernels.reduce_halves(rows(segment), target[mine], *combine)
            arriving[segment] = [plane.receive(target[places[segment][peer]], peer, 2 * segment + 1) for peer in peers]
            leaving[segment] = [plane.send(target[mine], peer, 2 * segment + 1) for peer in peers]
        if 0 <= (segment := step - 2 * LAG) < len(starts):
            for transfer in (*arriving[segment], *leaving[segment]):
                transfer.wait()


def reducescatter(
    plane: DataPlane, source: np.ndarray, target: np.ndarray, counts: Sequence[int], op: ReduceOp,
    is_bfloat16: bool, prescale: float, postscale: float,
) -> None:
    """Combine as ``allreduce`` and keep this rank's piece. *Shapes*: ``target`` (counts[rank],)."""
    rows = np.empty((plane.size, len(target)), np.uint16)
    plane.alltoall(as_bits(source), rows.reshape(-1), np.tile(np.array(counts, np.int64), (plane.size, 1)))
    kernels.reduce_halves(
        rows, as_bits(target), _CODES[op], is_bfloat16, np.float32(prescale), np.float32(postscale))
