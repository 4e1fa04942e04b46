"""The quantised exchange of GPU tensors: the schedules of ``quantized``, with CUDA kernels and messages over NCCL.

One message for each owner, whatever its length: groups are encoded one by one, so neither that nor the kernels change a bit, and
the results are those of the exchange on hosts. Everything is enqueued on the device's stream, one after the other, and nothing
waits: kernels and wire of one exchange do not overlap, those of a later bucket neither.

*Not finite*: every tensor has a verdict on the device, and a copy of it on the host for who asks when the stream has passed.
*Never run on a GPU so far*: tests run it in Numba's simulator, on stand-ins for streams and NCCL.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvdlite.compression import spec
from hvdlite.compression.codec_cuda import CudaCodec, Message
from hvdlite.compression.exchange import TENSOR, ExchangeSpec, plan_layout
from hvdlite.dataplane.device import DeviceArray
from hvdlite.dataplane.nccl import NcclPlane
from hvdlite.dataplane.quantized import Tensors, table_of

#: More groups than any message has: they are not cut.
_ALL_GROUPS = 1 << 40


def allreduce(plane: NcclPlane, exchange: ExchangeSpec, tensors: Tensors, factor: float) -> Callable[[], np.ndarray]:
    """As ``quantized.allreduce``, in the order of the device's stream. ``tensors`` has addresses of the device.

    Returns what waits for that and tells of each tensor whether all its final scales are finite.
    """
    made = _Exchange(plane, exchange, tensors, factor)
    {"ring": made.ring, "two_shot": made.two_shot}[exchange.schedule]()
    return made.verdicts()


class _Exchange:
    """One set of tensors on its way."""

    def __init__(self, plane: NcclPlane, exchange: ExchangeSpec, tensors: Tensors, factor: float) -> None:
        self._plane, self._device = plane, plane.device
        self._codec = CudaCodec(plane.device)
        self._spec, self._tensors, self._factor = exchange.codec, tensors, factor
        self._layout = plan_layout(tensors.sizes, tensors.names, plane.size, _ALL_GROUPS)
        self._tables = [table_of(tensors, places[0]) for places in self._layout.places]
        self._group_bytes = 4 * (self._spec.words_per_group + self._spec.scales_per_group)
        self._finite = self._device.upload(np.ones(len(tensors.sizes), np.int32))
        self._used: list[DeviceArray] = []

    def verdicts(self) -> Callable[[], np.ndarray]:
        """After all else; also sees to it that what was used is kept."""
        device, here = self._device, self._device.pinned(4 * len(self._tensors.sizes))
        device.copy(here.ctypes.data, self._finite, here.nbytes)
        done = device.record()
        device.keep(self._used, here)

        def known() -> np.ndarray:
            done.synchronize()
            return here.view(np.int32) != 0

        return known

    def _message(self, owner: int) -> DeviceArray:
        made = self._device.allocate(self._layout.num_groups[owner][0] * self._group_bytes)
        self._used.append(made)
        return made

    def _split(self, message: DeviceArray) -> Message:
        """The addresses of its words and its scales."""
        return message.address, message.address + len(message) // self._group_bytes * 4 * self._spec.words_per_group

    def _places(self, owner: int) -> np.ndarray:
        """Of each piece the address of its tensor's verdict."""
        verdicts: np.ndarray = self._finite + 4 * self._layout.places[owner][0][:, TENSOR]
        return verdicts

    def _encode(self, owner: int, incoming: list[DeviceArray], *, is_final: bool = False) -> DeviceArray:
        """Encode this rank's values, added to what is incoming; the final code is decoded here as well."""
        message, table = self._message(owner), self._tables[owner]
        if not is_final:
            table = table.copy()
            table[:, spec.OUT] = 0
        self._codec.encode_pieces(
            self._spec, self._tensors.dtype, table, [self._split(one) for one in incoming], self._split(message), self._factor,
            self._places(owner) if is_final else None)
        return message

    def _decode(self, owner: int, message: DeviceArray) -> None:
        self._codec.decode_pieces(
            self._spec, self._tensors.dtype, self._tables[owner], self._split(message), self._factor, self._places(owner))

    def two_shot(self) -> None:
        """Codes of every piece straight to its owner; then the owner's code of the sum to all."""
        rank, plane = self._plane.rank, self._plane
        peers = [peer for peer in range(plane.size) if peer != rank]
        codes = [self._encode(peer, []) for peer in peers]
        partial = [self._message(rank) for _ in peers]
        for peer, code, arriving in zip(peers, codes, partial, strict=True):
            plane.send(code, peer, 0)
            plane.receive(arriving, peer, 0)
        plane.flush()
        total = self._encode(rank, partial, is_final=True)
        final = [self._message(peer) for peer in peers]
        for peer, arriving in zip(peers, final, strict=True):
            plane.send(total, peer, 0)
            plane.receive(arriving, peer, 0)
        plane.flush()
        for peer, message in zip(peers, final, strict=True):
            self._decode(peer, message)

    def ring(self) -> None:
        """Hop h sends on the partial sum of chunk rank - 1 - h; from hop size - 1 on, the final codes, this rank's first."""
        rank, size, plane = self._plane.rank, self._plane.size, self._plane
        left, right = (rank - 1) % size, (rank + 1) % size
        arrived: list[DeviceArray] = []
        for hop in range(2 * size - 2):
            is_encoded, chunk = hop < size, (rank - 1 - hop) % size
            code = self._encode(chunk, arrived[-1:], is_final=hop == size - 1) if is_encoded else arrived[-1]
            arrived.append(self._message((rank - 2 - hop) % size))
            plane.send(code, right, 0)
            plane.receive(arrived[-1], left, 0)
            plane.flush()
        for hop in range(size - 1, 2 * size - 2):
            self._decode((rank - 2 - hop) % size, arrived[hop])
