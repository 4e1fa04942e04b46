"""The quantised allreduce: every element is encoded once by each rank, and decoded alike by all.

Two schedules over messages between two ranks, both with a bucket's tensors cut for their owners (``compression.exchange``) and in
segments, so that encoding, the wire and decoding overlap:

``two_shot``: every rank sends its codes of a piece straight to the piece's owner, who adds them to its own values in the order of
ranks, encodes the sum once, and sends that to all. Two phases, two quantisations on a value's way.
``ring``: to neighbours only; each adds its values to the decoded partial sum it gets and encodes that; the owner, last in the
ring, encodes the total, whose code travels on unchanged. 2 (n - 1) hops, n quantisations.

*Guarantees*: outputs are bitwise equal on all ranks, because the owner decodes its own code too; and do not depend on buckets.
``sum(values + residuals) = result before scaling + sum(new residuals)`` up to rounding, element by element in the rotated domain.
*Not finite*: a group with NaN or infinity on any rank becomes NaN on all; all see all final scales, so all know.
*Source*: F. Seide et al., 1-Bit Stochastic Gradient Descent, 2014 (error feedback at every quantiser).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdlite.buffer import NUMPY_DTYPES
from hvdlite.collectives.scaling import scale
from hvdlite.collectives.workspace import Workspace
from hvdlite.compression import spec
from hvdlite.compression.exchange import COUNT, FIRST, START, TENSOR, ExchangeSpec, plan_layout
from hvdlite.compression.residual import ResidualKey
from hvdlite.compression.spec import GRADIENT, NUM_COLUMNS, OUT, RESIDUAL, SHADOW
from hvdlite.dataplane.base import DataPlane, Transfer
from hvdlite.fusion import Bucket
from hvdlite.message import Key, ReduceOp, Request
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.phase import Phase


def execute(bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace) -> None:
    """Run one bucket; afterwards every segment's output holds the result."""
    request = bucket.request
    factor = request.prescale * request.postscale / (plane.size if request.op == ReduceOp.Average else 1)
    if plane.size == 1:
        for one in bucket.segments:
            entry = entries[one.slot]
            scale_alone(entry.inputs[one.tensor_index].array, entry.outputs[one.tensor_index].array, bucket.dtype, factor)
        return
    with workspace.timeline.timed(Phase.QUANTIZED_ALLREDUCE, bucket.label, bucket.num_bytes):
        _Exchange(bucket, entries, plane, workspace, factor).run()


def scale_alone(source: np.ndarray, target: np.ndarray, dtype: str, factor: float) -> None:
    """The result where there is one rank: nothing is quantised."""
    if factor == 1.0:
        target[:] = source
    elif dtype == "bfloat16":
        widened = (source.astype(np.uint32) << 16).view(np.float32) * np.float32(factor)
        bits = widened.view(np.uint32)
        target[:] = np.where(np.isnan(widened), bits >> 16 | 0x40, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    else:
        scale(source, target, factor, 1)


def tensor_names(request: Request) -> tuple[str, tuple[str, ...]]:
    """Whose the residuals of a request's tensors are, and the tensors' names: an optimizer's label and its gradients' names, or
    a call's own name."""
    name = request.key.name
    if request.names:
        return name.rpartition(".")[0], request.names
    if len(request.shapes) == 1:
        return name, (name,)
    return name, tuple(f"{name}.{index}" for index in range(len(request.shapes)))


def has_residuals(request: Request) -> bool:
    """Whether the call can have residuals: two unnamed calls have nothing to do with one another."""
    return not request.key.name.startswith(f"{request.key.collective}.noname.")


class _Exchange:
    """One bucket on its way."""

    def __init__(
        self, bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane, workspace: Workspace, factor: float
    ) -> None:
        from hvdlite.compression import codec_cpu  # compiles, or loads, its kernels: only where something is quantised

        self._codec = codec_cpu
        self._plane = plane
        self._dtype = bucket.dtype
        self._factor = factor
        self._begun: set[Key] = set()
        exchange = ExchangeSpec.parse(bucket.request.compressor)
        self._spec = exchange.codec
        self._group_bytes = 4 * (self._spec.words_per_group + self._spec.scales_per_group)
        self._schedule = {"ring": self._ring, "two_shot": self._two_shot, "auto": self._two_shot}[exchange.schedule]
        self._residuals = workspace.residuals
        self._prepare(bucket, entries)

    def _prepare(self, bucket: Bucket, entries: Mapping[int, TensorEntry]) -> None:
        """Find the addresses of all tensors and residuals, and the table of every message."""
        segments = bucket.segments
        sizes = tuple(one.num_elements for one in segments)
        self._keys: list[ResidualKey] = []  # of every tensor; those that can have a residual are in _kept
        self._kept: set[ResidualKey] = set()
        names, found = [], []
        for one, size in zip(segments, sizes, strict=True):
            entry = entries[one.slot]
            owner, of_tensors = tensor_names(entry.request)
            key = (entry.request.key.process_set_id, owner, of_tensors[one.tensor_index])
            self._keys.append(key)
            names.append(key[2])
            found.append((entry.inputs[one.tensor_index].address, entry.outputs[one.tensor_index].address,
                          *self._find_residual(entry.request, key, size)))
        item_bytes = NUMPY_DTYPES[bucket.dtype].itemsize
        sources, targets, kept, made = np.array(found, np.int64).T
        self._layout = plan_layout(sizes, tuple(names), self._plane.size)
        self._tables = []
        for places in self._layout.places:
            tables = []
            for place in places:
                tensor, start = place[:, TENSOR], place[:, START]
                table = np.zeros((len(place), NUM_COLUMNS), np.int64)
                table[:, GRADIENT] = sources[tensor] + start * item_bytes
                table[:, spec.COUNT] = place[:, COUNT]
                table[:, RESIDUAL] = np.where(kept[tensor], kept[tensor] + 4 * start, 0)
                table[:, SHADOW] = np.where(made[tensor], made[tensor] + 4 * start, 0)
                table[:, OUT] = targets[tensor] + start * item_bytes
                table[:, spec.FIRST] = place[:, FIRST]
                tables.append(table)
            self._tables.append(tables)
        self._is_finite = np.ones(len(segments), bool)

    def _find_residual(self, request: Request, key: ResidualKey, size: int) -> tuple[int, int]:
        """The addresses of a tensor's residual and of the one to come; 0 where it has none."""
        if not size or not has_residuals(request):
            return 0, 0
        if request.key not in self._begun:
            self._begun.add(request.key)
            self._residuals.begin(key[0], key[1], request.key.name)
        current, shadow = self._residuals.arrays(key, self._spec.padded(size), self._spec.scale == "rotated")
        self._kept.add(key)
        return current.ctypes.data, shadow.ctypes.data

    def run(self) -> None:
        """Exchange, then tell the residuals which tensors came out finite."""
        self._sent: list[Transfer] = []
        self._schedule()
        for transfer in self._sent:
            transfer.wait()
        self._residuals.end({key: bool(is_finite) for key, is_finite in zip(self._keys, self._is_finite, strict=True)
                             if key in self._kept})

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
            self._spec, self._dtype, table, [self._split(one) for one in incoming], words, scales, self._factor)
        if is_final:
            self._judge(owner, segment, scales)
        return message

    def _decode(self, owner: int, segment: int, message: np.ndarray) -> None:
        words, scales = self._split(message)
        self._codec.decode_pieces(self._spec, self._dtype, self._tables[owner][segment], words, scales, self._factor)
        self._judge(owner, segment, scales)

    def _judge(self, owner: int, segment: int, scales: np.ndarray) -> None:
        if np.isfinite(scales).all():
            return
        finite = self._codec.finite_pieces(self._spec, self._tables[owner][segment], scales)
        tensors = self._layout.places[owner][segment][:, TENSOR]
        self._is_finite[tensors[~finite]] = False

    def _send(self, message: np.ndarray, peer: int, tag: int) -> None:
        if len(message):
            self._sent.append(_Kept(self._plane.send(message, peer, tag), message))

    def _expect(self, owner: int, segment: int, peer: int, tag: int) -> tuple[np.ndarray, Transfer]:
        message = self._message(owner, segment)
        return message, (self._plane.receive(message, peer, tag) if len(message) else _Arrived())

    # -- schedules --------------------------------------------------------------------------------------------------------

    def _two_shot(self) -> None:
        rank, last = self._plane.rank, self._layout.num_segments
        peers = [peer for peer in range(self._plane.size) if peer != rank]
        partial = [[self._expect(rank, segment, peer, 2 * segment) for peer in peers] for segment in range(last)]
        final = [[self._expect(peer, segment, peer, 2 * segment + 1) for peer in peers] for segment in range(last)]
        for step in range(last + 2):
            if step < last:
                for peer in peers:
                    self._send(self._encode(peer, step, []), peer, 2 * step)
            if 0 <= step - 1 < last:
                segment = step - 1
                for _, transfer in partial[segment]:
                    transfer.wait()
                total = self._encode(rank, segment, [message for message, _ in partial[segment]], is_final=True)
                for peer in peers:
                    self._send(total, peer, 2 * segment + 1)
            if 0 <= step - 2 < last:
                for peer, (message, transfer) in zip(peers, final[step - 2], strict=True):
                    transfer.wait()
                    self._decode(peer, step - 2, message)

    def _ring(self) -> None:
        rank, size, segments = self._plane.rank, self._plane.size, range(self._layout.num_segments)
        left, right = (rank - 1) % size, (rank + 1) % size

        def expected(hop: int, chunk: int) -> list[tuple[np.ndarray, Transfer]]:
            return [self._expect(chunk % size, segment, left, hop * len(segments) + segment) for segment in segments]

        # Hop h brings the partial sum of chunk rank - 2 - h, later the final code of chunk rank - 1 - (h - size + 1).
        partial = [expected(hop, rank - 2 - hop) for hop in range(size - 1)]
        final = [expected(size - 1 + hop, rank - 1 - hop) for hop in range(size - 1)]
        for hop in range(size):
            for segment in segments:
                incoming = []
                if hop:
                    message, transfer = partial[hop - 1][segment]
                    transfer.wait()
                    incoming = [message]
                chunk = (rank - 1 - hop) % size
                code = self._encode(chunk, segment, incoming, is_final=hop == size - 1)
                self._send(code, right, hop * len(segments) + segment)
        for hop in range(size - 1):
            for segment in segments:
                message, transfer = final[hop][segment]
                transfer.wait()
                if hop < size - 2:
                    self._send(message, right, (size + hop) * len(segments) + segment)
                self._decode((rank - 1 - hop) % size, segment, message)


class _Kept:
    """A transfer that keeps what it sends."""

    def __init__(self, transfer: Transfer, message: np.ndarray) -> None:
        self._transfer, self._message = transfer, message

    def wait(self) -> None:
        self._transfer.wait()


class _Arrived:
    """An empty message."""

    def wait(self) -> None:
        pass
