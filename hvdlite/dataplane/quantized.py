"""The quantised exchange: every element is encoded once by each rank, and decoded alike by all.

Two schedules over messages between two ranks, both with the tensors cut for their owners (``compression.exchange``) and in
segments, so that encoding, the wire and decoding overlap:

``two_shot``: every rank sends its codes of a piece straight to the piece's owner, who adds them to its own values in the order of
ranks, encodes the sum once, and sends that to all. Two phases, two quantisations on a value's way.
``ring``: to neighbours only; each adds its values to the decoded partial sum it gets and encodes that; the owner, last in the
ring, encodes the total, whose code travels on unchanged. 2 (n - 1) hops, n quantisations.

*Guarantees*: outputs are bitwise equal on all ranks, because the owner decodes its own code too.
``sum(values + residuals) = result before scaling + sum(new residuals)`` up to rounding, element by element in the rotated domain.
*Not finite*: a group with NaN or infinity on any rank becomes NaN on all; all see all final scales, so all know.
*Source*: F. Seide et al., 1-Bit Stochastic Gradient Descent, 2014 (error feedback at every quantiser).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdlite.compression import spec
from hvdlite.compression.exchange import COUNT, FIRST, START, TENSOR, ExchangeSpec, plan_layout
from hvdlite.compression.spec import GRADIENT, MOMENT, NUM_COLUMNS, OUT, RESIDUAL, SHADOW
from hvdlite.dataplane.base import DataPlane, Transfer

#: Segments between two stages of one segment: meanwhile its message travels. Measured (tools/bench_allreduce.py on 1 Gbit/s):
#: with 1 or 3 the exchange took 1.07 and 1.3 times as long.
LAG = 2


@dataclass(frozen=True)
class Tensors:
    """What is exchanged. *Shapes*: one entry each; int64 addresses, 0 where there is no residual, shadow or second moment.

    ``item_bytes``: of the gradients' dtype, ``dtype``.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str
    item_bytes: int
    sources: np.ndarray
    targets: np.ndarray
    residuals: np.ndarray
    shadows: np.ndarray
    moments: np.ndarray


def allreduce(plane: DataPlane, exchange: ExchangeSpec, tensors: Tensors, factor: float) -> np.ndarray:
    """Write the sum times ``factor`` to every tensor's target, and new residuals to the shadows. The schedule must be chosen.

    Returns of each tensor whether all its final scales are finite, equal on all ranks: only then are the shadows of any use.
    """
    made = _Exchange(plane, exchange, tensors, factor)
    {"ring": made.ring, "two_shot": made.two_shot}[exchange.schedule]()
    made.finish()
    return made.is_finite


def table_of(tensors: Tensors, place: np.ndarray) -> np.ndarray:
    """The codec's table of a message, given where its pieces lie in their tensors."""
    tensor, start = place[:, TENSOR], place[:, START]
    table = np.zeros((len(place), NUM_COLUMNS), np.int64)
    table[:, GRADIENT] = tensors.sources[tensor] + start * tensors.item_bytes
    table[:, OUT] = tensors.targets[tensor] + start * tensors.item_bytes
    for column, addresses in ((RESIDUAL, tensors.residuals), (SHADOW, tensors.shadows), (MOMENT, tensors.moments)):
        table[:, column] = np.where(addresses[tensor], addresses[tensor] + 4 * start, 0)
    table[:, spec.COUNT] = place[:, COUNT]
    table[:, spec.FIRST] = place[:, FIRST]
    return table


class _Exchange:
    """One set of tensors on its way."""

    def __init__(self, plane: DataPlane, exchange: ExchangeSpec, tensors: Tensors, factor: float) -> None:
        from hvdlite.compression import codec_cpu  # compiles, or loads, its kernels: only where something is quantised

        self.is_finite = np.ones(len(tensors.sizes), bool)
        self._codec = codec_cpu
        self._plane = plane
        self._spec = exchange.codec
        self._group_bytes = 4 * (self._spec.words_per_group + self._spec.scales_per_group)
        self._tensors = tensors
        self._factor = factor
        self._layout = plan_layout(tensors.sizes, tensors.names, plane.size)
        self._tables = [[table_of(tensors, place) for place in places] for places in self._layout.places]
        self._sent: list[tuple[Transfer, np.ndarray]] = []  # with what is sent, which must live as long

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        for transfer, _ in self._sent:
            transfer.wait()

    # -- messages ---------------------------------------------------------------------------------------------------------

    def _message(self, owner: int, segment: int) -> np.ndarray:
        return np.empty(self._layout.num_groups[owner][segment] * self._group_bytes, np.uint8)

    def _split(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        middle = len(message) // self._group_bytes * 4 * self._spec.words_per_group
        return message[:middle].view(np.uint32), message[middle:].view(np.float32)

    def _encode(self, owner: int, segment: int, incoming: list[np.ndarray], *, is_final: bool = False) -> np.ndarray:
        """Encode this rank's values, added to what is incoming; the final code is decoded here as well."""
        message = self._message(owner, segment)
        words, scales = self._split(message)
        table = self._tables[owner][segment]
        if not is_final:
            table = table.copy()
            table[:, OUT] = 0
        self._codec.encode_pieces(
            self._spec, self._tensors.dtype, table, [self._split(one) for one in incoming], words, scales, self._factor)
        if is_final:
            self._judge(owner, segment, scales)
        return message

    def _decode(self, owner: int, segment: int, message: np.ndarray) -> None:
        words, scales = self._split(message)
        self._codec.decode_pieces(self._spec, self._tensors.dtype, self._tables[owner][segment], words, scales, self._factor)
        self._judge(owner, segment, scales)

    def _judge(self, owner: int, segment: int, scales: np.ndarray) -> None:
        if not np.isfinite(scales).all():
            finite = self._codec.finite_pieces(self._spec, self._tables[owner][segment], scales)
            tensors = self._layout.places[owner][segment][:, TENSOR]
            self.is_finite[tensors[~finite]] = False

    def _send(self, message: np.ndarray, peer: int, tag: int) -> None:
        if len(message):
            self._sent.append((self._plane.send(message, peer, tag), message))

    def _expect(self, owner: int, segment: int, peer: int, tag: int) -> tuple[np.ndarray, Transfer]:
        message = self._message(owner, segment)
        return message, (self._plane.receive(message, peer, tag) if len(message) else _Arrived())

    # -- schedules --------------------------------------------------------------------------------------------------------

    def two_shot(self) -> None:
        """Step s encodes segment s for its owners, adds up segment s - LAG as its owner, and decodes segment s - 2 LAG."""
        rank, last = self._plane.rank, self._layout.num_segments
        peers = [peer for peer in range(self._plane.size) if peer != rank]
        partial = [[self._expect(rank, segment, peer, 2 * segment) for peer in peers] for segment in range(last)]
        final = [[self._expect(peer, segment, peer, 2 * segment + 1) for peer in peers] for segment in range(last)]
        for step in range(last + 2 * LAG):
            if step < last:
                for peer in peers:
                    self._send(self._encode(peer, step, []), peer, 2 * step)
            if 0 <= (segment := step - LAG) < last:
                for _, transfer in partial[segment]:
                    transfer.wait()
                total = self._encode(rank, segment, [message for message, _ in partial[segment]], is_final=True)
                for peer in peers:
                    self._send(total, peer, 2 * segment + 1)
            if 0 <= (segment := step - 2 * LAG) < last:
                for peer, (message, transfer) in zip(peers, final[segment], strict=True):
                    transfer.wait()
                    self._decode(peer, segment, message)

    def ring(self) -> None:
        """Hop h sends on the partial sum of chunk rank - 1 - h; from hop size - 1 on, the final codes, this rank's first."""
        rank, size, segments = self._plane.rank, self._plane.size, range(self._layout.num_segments)
        left, right = (rank - 1) % size, (rank + 1) % size

        def expected(hop: int) -> list[tuple[np.ndarray, Transfer]]:
            chunk = (rank - 2 - hop) % size
            return [self._expect(chunk, segment, left, hop * len(segments) + segment) for segment in segments]

        arriving = [expected(hop) for hop in range(2 * size - 2)]
        for hop in range(size):
            for segment in segments:
                incoming = []
                if hop:
                    message, transfer = arriving[hop - 1][segment]
                    transfer.wait()
                    incoming = [message]
                code = self._encode((rank - 1 - hop) % size, segment, incoming, is_final=hop == size - 1)
                self._send(code, right, hop * len(segments) + segment)
        for hop in range(size - 1, 2 * size - 2):
            for segment in segments:
                message, transfer = arriving[hop][segment]
                transfer.wait()
                if hop < 2 * size - 3:
                    self._send(message, right, (hop + 1) * len(segments) + segment)
                self._decode((rank - 2 - hop) % size, segment, message)


class _Arrived:
    """An empty message."""

    def wait(self) -> None:
        pass
