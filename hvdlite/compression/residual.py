"""Residuals: what each quantiser has not sent yet, one float32 array for each process set and tensor name.

In the codec's rotated domain, in units of the sum over the ranks. They belong to names, so they outlive any change of buckets.

*Commit*: an exchange writes new residuals beside the old ones (shadows). They count once every tensor exchanged in the same
round is known to be finite; otherwise all of the round's are dropped, because the whole step will be. A free-standing tensor is a
round of its own; an optimizer's round is one step, and ends when one of its buckets comes round again or when somebody asks.
All ranks see the same scales in the same order, so all decide alike.

*GPUs*: an exchange on a GPU takes a residual to the device's memory; whoever looks at it brings it back, until the next one.

*Threads*: any; the exchange itself runs on the background thread, and who reads or changes residuals does so between steps.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdlite.dataplane.device import Device

_log = logging.getLogger("hvdlite")

#: Process set, owner (an optimizer's label, or a free-standing tensor's name), tensor.
ResidualKey = tuple[int, str, str]


@dataclass
class _Residual:
    current: Any
    shadow: Any
    is_rotated: bool
    has_new: bool = False
    on: Device | None = None  # whose memory they are DeviceArrays of

    def to_host(self) -> None:
        """Wait for the device's stream, if they are there."""
        if self.on is not None:
            self.current, self.shadow = (
                self.on.download(one.address, one.nbytes).view(np.float32) for one in (self.current, self.shadow))
            self.on = None

    def to_device(self, device: Device) -> None:
        """In the order of the device's stream."""
        if self.on is None:
            made = device.allocate(2 * self.current.nbytes).as_dtype("float32")
            length = len(self.current)
            pinned = device.pinned(made.nbytes).view(np.float32)
            pinned[:length], pinned[length:] = self.current, self.shadow
            device.copy(made.address, pinned.ctypes.data, made.nbytes)
            device.keep(pinned)
            self.current, self.shadow, self.on = made[:length], made[length:], device


@dataclass
class _Round:
    """One step of one owner, as far as it has been exchanged."""

    seen: set[str] = field(default_factory=set)
    is_finite: bool = True
    #: What tells it later, where that has still to come from a GPU.
    awaited: list[Callable[[], bool]] = field(default_factory=list)
    touched: list[_Residual] = field(default_factory=list)


class ResidualStore:
    """All residuals of one rank."""

    def __init__(self) -> None:
        self._residuals: dict[ResidualKey, _Residual] = {}
        self._rounds: dict[tuple[int, str], _Round] = {}
        self._loss_scale = 1.0
        self._synchronized: set[tuple[int, str]] = set()
        self._doomed: deque[tuple[int, str]] = deque()
        # Guards the tables, not the arrays' contents.
        self._lock = threading.Lock()

    def begin(self, process_set_id: int, owner: str, bucket: str) -> None:
        """A bucket of an owner is about to be exchanged; if its round had it already, that round is over."""
        with self._lock:
            self._drop_doomed()
            self._synchronized.discard((process_set_id, owner))
            made = self._rounds.setdefault((process_set_id, owner), _Round())
            if bucket in made.seen:
                self._settle((process_set_id, owner))
                made = self._rounds[process_set_id, owner] = _Round()
            made.seen.add(bucket)

    def arrays(self, key: ResidualKey, length: int, is_rotated: bool, device: Device | None = None) -> tuple[Any, Any]:
        """The residual of a tensor, zeros at first, and the array for the new one; DeviceArrays on ``device``, else NumPy's.

        *Shapes*: both (length,), float32.
        """
        with self._lock:
            found = self._residuals.get(key)
            if found is None or len(found.current) != length or found.is_rotated != is_rotated:
                if found is not None:
                    _log.warning("%s: its residual is dropped, because the tensor's size or scale has changed", key[2])
                found = self._residuals[key] = _Residual(np.zeros(length, np.float32), np.zeros(length, np.float32), is_rotated)
            if device is None:
                found.to_host()
            else:
                found.to_device(device)
            return found.current, found.shadow

    def end(self, finite: Mapping[ResidualKey, bool | Callable[[], bool]]) -> None:
        """The exchange is over; ``finite`` tells of each tensor whether all of its final scales are, or will be asked."""
        with self._lock:
            for key, is_finite in finite.items():
                made = self._rounds[key[:2]]
                if isinstance(is_finite, bool):
                    made.is_finite &= is_finite
                else:
                    made.awaited.append(is_finite)
                found = self._residuals[key]
                found.has_new = True
                made.touched.append(found)

    def settle(self, process_set_id: int, owner: str) -> None:
        """End the round of an owner whose step is complete."""
        with self._lock:
            self._settle((process_set_id, owner))

    def forget_round(self, process_set_id: int, owner: str) -> None:
        """Keep the residuals from before a step that failed."""
        with self._lock:
            if (process_set_id, owner) in self._rounds:
                self._rounds[process_set_id, owner].is_finite = False
                self._settle((process_set_id, owner))

    def drop(self, process_set_id: int, owner: str | None = None) -> None:
        """Give up the residuals of an owner, or of a process set."""
        with self._lock:
            self._drop(process_set_id, owner)

    def drop_later(self, process_set_id: int, owner: str) -> None:
        """As ``drop``, at the next chance; may be called by the garbage collector, whatever it interrupts."""
        self._doomed.append((process_set_id, owner))

    def take(self, key: ResidualKey) -> np.ndarray | None:
        """Remove a tensor's residual and return it; None where there is none."""
        with self._lock:
            found = self._residuals.pop(key, None)
            if found is not None:
                found.to_host()
            return None if found is None else found.current

    def items(self, process_set_id: int, owner: str) -> Iterator[tuple[str, np.ndarray, bool]]:
        """Name, residual and whether it is of the rotated domain, of an owner's tensors in order of names; ends its round."""
        with self._lock:
            self._settle((process_set_id, owner))
            found = sorted((key[2], one) for key, one in self._residuals.items() if key[:2] == (process_set_id, owner))
            for _, one in found:
                one.to_host()
        for name, one in found:
            yield name, one.current, one.is_rotated

    def owners(self) -> list[tuple[int, str]]:
        """Who has residuals here, in order."""
        with self._lock:
            self._drop_doomed()
            return sorted({key[:2] for key in self._residuals})

    def note_synchronized(self, process_set_id: int, owner: str) -> None:
        """Say that all ranks hold the same residuals of an owner; until its next exchange."""
        with self._lock:
            self._synchronized.add((process_set_id, owner))

    def is_synchronized(self, process_set_id: int, owner: str) -> bool:
        """Whether all ranks hold the same residuals of an owner."""
        with self._lock:
            return (process_set_id, owner) in self._synchronized

    def put(self, key: ResidualKey, values: np.ndarray, is_rotated: bool) -> None:
        """Set a residual; ``values`` are copied."""
        with self._lock:
            self._residuals[key] = _Residual(np.array(values, np.float32), np.zeros(len(values), np.float32), is_rotated)

    def set_loss_scale(self, scale: float) -> None:
        """Multiply all residuals by ``scale`` over what it was."""
        factor, self._loss_scale = np.float32(scale / self._loss_scale), scale
        for place in self.owners() if factor != 1 else ():
            for _, values, _ in self.items(*place):
                values *= factor

    @property
    def is_empty(self) -> bool:
        return not self._residuals

    def has(self, key: ResidualKey) -> bool:
        """Whether a tensor has a residual."""
        return key in self._residuals

    @property
    def num_bytes(self) -> int:
        """What residuals and shadows take."""
        with self._lock:
            return sum(one.current.nbytes + one.shadow.nbytes for one in self._residuals.values())

    def _drop_doomed(self) -> None:
        while self._doomed:
            self._drop(*self._doomed.popleft())

    def _drop(self, process_set_id: int, owner: str | None) -> None:
        for key in [key for key in self._residuals if key[0] == process_set_id and owner in (None, key[1])]:
            del self._residuals[key]
        for place in [place for place in self._rounds if place[0] == process_set_id and owner in (None, place[1])]:
            del self._rounds[place]

    def _settle(self, owner: tuple[int, str]) -> None:
        made = self._rounds.pop(owner, None)
        if made is not None:
            made.is_finite &= all([one() for one in made.awaited])
        for one in made.touched if made else ():
            if made is not None and made.is_finite and one.has_new:
                one.current, one.shadow = one.shadow, one.current
            one.has_new = False
