"""Workspace: what executing a bucket needs beside its tensors."""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hvdlite.compression.residual import ResidualStore
from hvdlite.dataplane.device import Device
from hvdlite.fusion import Bucket
from hvdlite.timeline.phase import Phase
from hvdlite.timeline.recorder import NullTimeline, Timeline

#: A bucket's way: the phase of its exchange, then the moments at which it began, was packed, was combined and ended. One that is
#: combined where it lies has 0 for the two in the middle. A plain tuple: it is made in every step, recorded or not.
Passage = tuple[Phase, int, int, int, int]


class Workspace:
    """A fusion buffer that grows to the largest bucket seen, the residuals of quantised exchanges, and the timeline.

    *Threads*: the background thread only.
    """

    def __init__(self, timeline: Timeline, hierarchical: str = "auto") -> None:
        """``hierarchical``: on, off or auto, whether hosts of several ranks sum densely inside before they quantise."""
        self.timeline = timeline
        #: The way of the bucket that was executed last, for one record of all of it; None where its phases were noted singly.
        self.passage: Passage | None = None
        self.residuals = ResidualStore()
        #: What Compression.auto has measured and decided, by process set.
        self.autos: dict[int, Any] = {}
        self.hierarchical = hierarchical
        #: How each quantised exchange travels, by plane.
        self.routes: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
        self._fusion_buffer = np.zeros(0, np.uint8)
        self._pinned = np.zeros(0, np.uint8)

    def note_passage(self, bucket: Bucket) -> None:
        """Note the phases of a bucket, if its way is known, singly: for what is part of something else."""
        if self.passage is not None and self.timeline.is_recording:
            note_phases(self.timeline, bucket, self.passage)
        self.passage = None

    def unrecorded(self) -> Workspace:
        """The same, residuals and all, but for the timeline: what is only tried is no part of a job's history."""
        other = copy.copy(self)
        other.timeline = NullTimeline()
        return other

    def fusion_buffer(self, num_bytes: int) -> np.ndarray:
        """At least ``num_bytes`` of scratch memory, overwritten by the next bucket. *Shapes*: (num_bytes,), uint8."""
        if len(self._fusion_buffer) < num_bytes:
            self._fusion_buffer = np.zeros(num_bytes, np.uint8)
        return self._fusion_buffer[:num_bytes]

    def pinned(self, device: Device, num_bytes: int) -> np.ndarray:
        """At least ``num_bytes`` of pinned scratch memory, which copies of the bucket before may still read in the order of the
        device's stream. *Shapes*: (num_bytes,), uint8."""
        if len(self._pinned) < num_bytes:
            device.keep(self._pinned)
            self._pinned = device.pinned(num_bytes)
        return self._pinned[:num_bytes]


def note_phases(timeline: Timeline, bucket: Bucket, passage: Passage) -> None:
    """Note a bucket's phases singly."""
    exchange, began_ns, packed_ns, combined_ns, ended_ns = passage
    name, num_bytes = bucket.label, bucket.num_bytes
    if not packed_ns:
        timeline.note(exchange, name, began_ns, ended_ns, num_bytes)
        return
    timeline.note(Phase.MEMCPY_IN_FUSION_BUFFER, name, began_ns, packed_ns, num_bytes)
    timeline.note(exchange, name, packed_ns, combined_ns, num_bytes)
    timeline.note(Phase.MEMCPY_OUT_FUSION_BUFFER, name, combined_ns, ended_ns, num_bytes)
