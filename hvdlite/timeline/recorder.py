"""Recording phases: a ring file per writing thread, or nothing.

*Format*: a 4096-byte header (JSON, padded with spaces), then 64-byte records, little endian: sequence word
(u64), start_ns, end_ns (i64, CLOCK_MONOTONIC), num_bytes (u64), name id (u32), phase (u16), 26 bytes unused.
Record k (from 0) lies at slot ``k % capacity`` with sequence word k + 1. Names lie beside it in
``<ring>.names``, one JSON string per line, id = line number, appended before first use.
*Guarantees*: bounded; no writer thread; what was written survives SIGKILL of the process. A record is written
as: sequence word 0, payload, sequence word; a reader drops what is torn, and counts it.
*Threads*: one writer per ring.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hvdlite.errors import ConfigError
from hvdlite.timeline.phase import Phase

HEADER_BYTES = 4096
RECORD = struct.Struct("<QqqQIH26x")
MAGIC = "hvdlite ring 1"
_SEQUENCE = struct.Struct("<Q")
_PAYLOAD = struct.Struct("<qqQIH")


class Timeline(Protocol):
    """What the runtime records into."""

    is_recording: bool

    def span(self, phase: Phase, name: str, start_ns: int, end_ns: int, num_bytes: int = 0) -> None:
        """Record an interval that has ended; times from ``time.monotonic_ns``."""

    def timed(self, phase: Phase, name: str, num_bytes: int = 0) -> Any:
        """A context manager that records the time spent inside."""

    def flush(self) -> None:
        """Make what was recorded visible to others; called at each heartbeat."""

    def close(self) -> None:
        """Finish; nothing may be recorded afterwards."""


class NullTimeline:
    """Records nothing, at no cost; also the context manager that ``timed`` hands out."""

    is_recording = False

    def span(self, phase: Phase, name: str, start_ns: int, end_ns: int, num_bytes: int = 0) -> None:
        pass

    def timed(self, phase: Phase, name: str, num_bytes: int = 0) -> NullTimeline:
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class RingTimeline:
    """Records into one memory-mapped ring file."""

    is_recording = True

    def __init__(self, directory: str, rank: int, size: int, ring_bytes: int, thread: str = "background") -> None:
        """Make ``directory/ring-<rank>-<thread>.hvdring``, ``ring_bytes`` long.

        Raises: ConfigError when the file cannot be made.
        """
        self.path = Path(directory) / f"ring-{rank:05d}-{thread}.hvdring"
        self._capacity = max(1, (ring_bytes - HEADER_BYTES) // RECORD.size)
        self._count = 0
        self._ids: dict[str, int] = {}
        header = dict(magic=MAGIC, rank=rank, size=size, thread=thread, capacity=self._capacity, pid=os.getpid(),
                      host=socket.gethostname(), monotonic_ns=time.monotonic_ns(), realtime_ns=time.time_ns())
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._names = open(f"{self.path}.names", "w", encoding="ascii")
            with open(self.path, "w+b") as file:
                # Reserved now: a full disk is an error here and not a SIGBUS later.
                os.posix_fallocate(file.fileno(), 0, HEADER_BYTES + self._capacity * RECORD.size)
                self._memory = mmap.mmap(file.fileno(), 0)
        except OSError as reason:
            raise ConfigError(f"timeline {self.path}: {reason}: name a directory this rank may write to") from reason
        self._memory[:HEADER_BYTES] = json.dumps(header).encode().ljust(HEADER_BYTES)

    def span(self, phase: Phase, name: str, start_ns: int, end_ns: int, num_bytes: int = 0) -> None:
        name_id = self._ids.get(name)
        if name_id is None:
            name_id = self._intern(name)
        place = HEADER_BYTES + (self._count % self._capacity) * RECORD.size
        self._count += 1
        _SEQUENCE.pack_into(self._memory, place, 0)
        _PAYLOAD.pack_into(self._memory, place + 8, start_ns, end_ns, num_bytes, name_id, phase)
        _SEQUENCE.pack_into(self._memory, place, self._count)

    def timed(self, phase: Phase, name: str, num_bytes: int = 0) -> Timed:
        return Timed(self, phase, name, num_bytes)

    def flush(self) -> None:
        pass  # the page cache has it already

    def close(self) -> None:
        self._names.close()
        self._memory.close()

    def _intern(self, name: str) -> int:
        name_id = self._ids[name] = len(self._ids)
        self._names.write(json.dumps(name) + "\n")
        self._names.flush()
        return name_id


class Timed:
    """Records the time between entering and leaving."""

    __slots__ = ("_name", "_num_bytes", "_phase", "_start_ns", "_timeline")

    def __init__(self, timeline: Timeline, phase: Phase, name: str, num_bytes: int) -> None:
        self._timeline, self._phase, self._name, self._num_bytes = timeline, phase, name, num_bytes

    def __enter__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def __exit__(self, *exception: object) -> None:
        self._timeline.span(self._phase, self._name, self._start_ns, time.monotonic_ns(), self._num_bytes)


class TeeTimeline:
    """Records into several timelines."""

    is_recording = True

    def __init__(self, timelines: Sequence[Timeline]) -> None:
        self.timelines = tuple(timelines)

    def span(self, phase: Phase, name: str, start_ns: int, end_ns: int, num_bytes: int = 0) -> None:
        for timeline in self.timelines:
            timeline.span(phase, name, start_ns, end_ns, num_bytes)

    def timed(self, phase: Phase, name: str, num_bytes: int = 0) -> Timed:
        return Timed(self, phase, name, num_bytes)

    def flush(self) -> None:
        for timeline in self.timelines:
            timeline.flush()

    def close(self) -> None:
        for timeline in self.timelines:
            timeline.close()
