"""The quantised exchange of GPU tensors: the schedules of ``quantized``, with CUDA kernels.

Code words travel over NCCL, or through pinned memory over the host's plane (``StagedMessages``). Groups are encoded one by one,
so neither the kernels nor the length of messages change a bit: the results are those of the exchange on hosts. Over NCCL there
is one message for each owner, everything is enqueued on the device's stream and nothing waits; kernels and wire follow one
another. Through the host messages are cut, and kernels, copies and wire of different ones overlap.

*Not finite*: every tensor has a verdict on the device, and a copy of it on the host for who asks when the stream has passed.
*Never run on a GPU so far*: tests run it in Numba's simulator, on stand-ins for streams and NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from hvdlite.compression import spec
from hvdlite.compression.codec_cuda import CudaCodec, Message
from hvdlite.compression.exchange import TENSOR, ExchangeSpec, plan_layout
from hvdlite.dataplane.base import DataPlane, Transfer
from hvdlite.dataplane.device import Device, DeviceArray, Event
from hvdlite.dataplane.quantized import LAG, Tensors, table_of

#: More groups than any message has: they are not cut.
ALL_GROUPS = 1 << 40
#: Groups of a message through the host, 512 KiB of signs. Chosen: to be measured on a card.
STAGED_GROUPS = 8192


class Messages(Protocol):
    """What brings code words from rank to rank: a part of ``DataPlane``, on device memory. NcclPlane is one.

    ``wait`` of a transfer returns when what follows on the device's stream finds it done.
    """

    rank: int
    size: int

    def send(self, array: DeviceArray, peer: int, tag: int) -> Transfer: ...

    def receive(self, array: DeviceArray, peer: int, tag: int) -> Transfer: ...


class StagedMessages:
    """Messages through pinned memory. The host waits for copies from the device and for what arrives."""

    def __init__(self, host: DataPlane, device: Device) -> None:
        self.rank, self.size = host.rank, host.size
        self._host, self._device = host, device
        self._copied: list[tuple[Event, np.ndarray, int, int]] = []
        self._sent: list[tuple[Transfer, np.ndarray]] = []

    def send(self, array: DeviceArray, peer: int, tag: int) -> Transfer:
        device, here = self._device, self._device.pinned(len(array))
        device.wait_for(device.record(), device.wire)  # for this message only: what is encoded next overlaps with the copy
        device.copy(here.ctypes.data, array.address, len(array), device.wire)
        self._copied.append((device.record(device.wire), here, peer, tag))
        return _Leaving(self)

    def receive(self, array: DeviceArray, peer: int, tag: int) -> Transfer:
        here = self._device.pinned(len(array))
        return _Arriving(self, self._host.receive(here, peer, tag), here, array)

    def post(self) -> None:
        """Hand what has been copied to the host's plane."""
        copied, self._copied = self._copied, []
        for event, here, peer, tag in copied:
            event.synchronize()
            self._sent.append((self._host.send(here, peer, tag), here))

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        self.post()
        for transfer, _ in self._sent:
            transfer.wait()
        self._sent = []

    def bring(self, here: np.ndarray, array: DeviceArray) -> None:
        """Copy what has arrived to the device."""
        self._device.copy(array.address, here.ctypes.data, len(array))
        self._device.keep(here)


class _Leaving:
    def __init__(self, messages: StagedMessages) -> None:
        self._messages = messages

    def wait(self) -> None:
        self._messages.post()


class _Arriving:
    def __init__(self, messages: StagedMessages, transfer: Transfer, here: np.ndarray, array: DeviceArray) -> None:
        self._messages, self._transfer, self._here, self._array = messages, transfer, here, array

    def wait(self) -> None:
        self._messages.post()  # first what a peer may wait for
        self._transfer.wait()
        self._messages.bring(self._here, self._array)


def allreduce(
    messages: Messages, device: Device, exchange: ExchangeSpec, tensors: Tensors, factor: float,
    segment_groups: int = ALL_GROUPS, lag: int = 0, agree: Callable[[DeviceArray], None] = lambda finite: None,
) -> Callable[[], np.ndarray]:
    """As ``quantized.allreduce``, in the order of the device's stream. ``tensors`` has addresses of the device; ``lag``: segments
    between two stages of one; ``agree``: what makes of the verdicts, an int32 each, what the caller is to be told.

    Returns what waits for that and tells of each tensor whether all its final scales are finite.
    """
    made = _Exchange(messages, device, exchange, tensors, factor, segment_groups)
    if exchange.schedule == "ring":
        made.ring()
    else:
        made.two_shot(lag)
    agree(DeviceArray(made.finite, len(tensors.sizes), "int32"))
    return made.verdicts()


def allreduce_through_host(
    host: DataPlane, device: Device, exchange: ExchangeSpec, tensors: Tensors, factor: float,
    agree: Callable[[DeviceArray], None] = lambda finite: None,
) -> Callable[[], np.ndarray]:
    """The same with code words in pinned memory, over the host's plane."""
    messages = StagedMessages(host, device)
    known = allreduce(messages, device, exchange, tensors, factor, STAGED_GROUPS, LAG, agree)
    messages.finish()
    return known


class _Exchange:
    """One set of tensors on its way."""

    def __init__(
        self, messages: Messages, device: Device, exchange: ExchangeSpec, tensors: Tensors, factor: float, segment_groups: int,
    ) -> None:
        self._messages, self._device, self._codec = messages, device, CudaCodec(device)
        self._spec, self._tensors, self._factor = exchange.codec, tensors, factor
        self._layout = plan_layout(tensors.sizes, tensors.names, messages.size, segment_groups)
        self._group_bytes = 4 * (self._spec.words_per_group + self._spec.scales_per_group)
        self.finite = device.upload(np.ones(len(tensors.sizes), np.int32))
        self._used: list[Any] = []

    def verdicts(self) -> Callable[[], np.ndarray]:
        """After all else; also sees to it that what was used is kept."""
        device, here = self._device, self._device.pinned(4 * len(self._tensors.sizes))
        device.copy(here.ctypes.data, self.finite, here.nbytes)
        done = device.record()
        device.keep(self._used, here)

        def known() -> np.ndarray:
            done.synchronize()
            return here.view(np.int32) != 0

        return known

    # -- messages ---------------------------------------------------------------------------------------------------------

    def _message(self, owner: int, segment: int) -> DeviceArray:
        made = self._device.allocate(self._layout.num_groups[owner][segment] * self._group_bytes)
        self._used.append(made)
        return made

    def _split(self, message: DeviceArray) -> Message:
        """The addresses of its words and its scales."""
        return message.address, message.address + len(message) // self._group_bytes * 4 * self._spec.words_per_group

    def _places(self, owner: int, segment: int) -> np.ndarray:
        """Of each piece the address of its tensor's verdict."""
        verdicts: np.ndarray = self.finite + 4 * self._layout.places[owner][segment][:, TENSOR]
        return verdicts

    def _encode(self, owner: int, segment: int, incoming: list[DeviceArray], *, is_final: bool = False) -> DeviceArray:
        """Encode this rank's values, added to what is incoming; the final code is decoded here as well."""
        message, table = self._message(owner, segment), table_of(self._tensors, self._layout.places[owner][segment])
        if not is_final:
            table[:, spec.OUT] = 0
        self._codec.encode_pieces(
            self._spec, self._tensors.dtype, table, [self._split(one) for one in incoming], self._split(message), self._factor,
            self._places(owner, segment) if is_final else None)
        return message

    def _decode(self, owner: int, segment: int, message: DeviceArray) -> None:
        table = table_of(self._tensors, self._layout.places[owner][segment])
        self._codec.decode_pieces(
            self._spec, self._tensors.dtype, table, self._split(message), self._factor, self._places(owner, segment))

    def _send(self, message: DeviceArray, peer: int, tag: int) -> None:
        if len(message):
            self._messages.send(message, peer, tag)

    def _expect(self, owner: int, segment: int, peer: int, tag: int) -> tuple[DeviceArray, Transfer | None]:
        message = self._message(owner, segment)
        return message, (self._messages.receive(message, peer, tag) if len(message) else None)

    # -- schedules --------------------------------------------------------------------------------------------------------

    def two_shot(self, lag: int) -> None:
        """Step s encodes segment s for its owners, adds up segment s - lag as its owner, and decodes segment s - 2 lag."""
        rank, last = self._messages.rank, self._layout.num_segments
        peers = [peer for peer in range(self._messages.size) if peer != rank]
        partial: dict[int, list[tuple[DeviceArray, Transfer | None]]] = {}
        final: dict[int, list[tuple[DeviceArray, Transfer | None]]] = {}
        for step in range(last + 2 * lag):
            if step < last:
                for peer in peers:
                    self._send(self._encode(peer, step, []), peer, 2 * step)
                partial[step] = [self._expect(rank, step, peer, 2 * step) for peer in peers]
            if 0 <= (segment := step - lag) < last:
                total = self._encode(rank, segment, _arrived(partial.pop(segment)), is_final=True)
                for peer in peers:
                    self._send(total, peer, 2 * segment + 1)
                final[segment] = [self._expect(peer, segment, peer, 2 * segment + 1) for peer in peers]
            if 0 <= (segment := step - 2 * lag) < last:
                for peer, message in zip(peers, _arrived(final.pop(segment)), strict=True):
                    self._decode(peer, segment, message)

    def ring(self) -> None:
        """Hop h sends on the partial sum of chunk rank - 1 - h; from hop size - 1 on, the final codes, this rank's first."""
        rank, size, segments = self._messages.rank, self._messages.size, range(self._layout.num_segments)
        left, right = (rank - 1) % size, (rank + 1) % size
        arriving: list[tuple[DeviceArray, Transfer | None]] = []
        for hop in range(2 * size - 1):
            chunk, before, arriving = (rank - 1 - hop) % size, arriving, []
            for segment in segments:
                incoming = _arrived(before[segment : segment + 1])
                if hop < size:
                    code = self._encode(chunk, segment, incoming, is_final=hop == size - 1)
                else:
                    (code,) = incoming
                    self._decode(chunk, segment, code)
                if hop < 2 * size - 2:
                    tag = hop * len(segments) + segment
                    self._send(code, right, tag)
                    arriving.append(self._expect((rank - 2 - hop) % size, segment, left, tag))


def _arrived(expected: list[tuple[DeviceArray, Transfer | None]]) -> list[DeviceArray]:
    """The messages, once they are there."""
    for _, transfer in expected:
        if transfer is not None:
            transfer.wait()
    return [message for message, _ in expected]
