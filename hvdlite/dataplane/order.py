"""The order of a GPU's streams around an operation, all of it here: no host waits.

At the call the producer's stream is marked (``mark_ready``). Before the operation the runtime's stream waits for that mark
(``begin``). After it the runtime's stream is marked, and what the operation works on is kept until the stream has passed
(``finish``); whoever waits for the handle lets its own stream wait for that mark. Memory that is made on the background thread
belongs to the stream of the call, so the runtime's stream first waits for what that has still to do with it (``order_after``).
"""

from __future__ import annotations

from collections.abc import Callable

from hvdlite.buffer import Buffer
from hvdlite.dataplane.device import Device, Event
from hvdlite.tensor_queue import TensorEntry


def mark_ready(buffer: Buffer) -> Event:
    """After all that the calling thread's stream has still to do for a call's tensors, of which this is one."""
    assert buffer.current_stream is not None
    event: Event = buffer.on.record(buffer.current_stream())
    return event


def begin(device: Device, entry: TensorEntry) -> None:
    """Let the runtime's stream wait for a call's tensors; once for each call."""
    if entry.ready is not None and not entry.is_begun:
        entry.is_begun = True
        device.wait_for(entry.ready)


def order_after(device: Device, stream: int) -> None:
    """Let the runtime's stream wait for what another one has to do now."""
    device.wait_for(device.record(stream))


def finish(entry: TensorEntry) -> Callable[[], None]:
    """After the last operation of a call: what a thread that waits for the handle is to call."""
    device, current_stream = entry.inputs[0].on, entry.inputs[0].current_stream
    done = device.record()
    device.keep(entry.inputs, entry.outputs, entry.moments, entry.ready)
    return lambda: device.wait_for(done, current_stream())
