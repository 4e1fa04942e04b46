"""Recording phases: a ring file per writing thread, or nothing.

*Format*: a 4096-byte header (JSON, padded with spaces), then 64-byte records, little endian: sequence word
(u64), start_ns, end_ns (i64, CLOCK_MONOTONIC), num_bytes (u64), name id (u32), phase, detail (u16), operation, plan,
count, process set (u32), value (f64); some hold other things in num_bytes and value, see ``composite``. Record k (from 0)
lies at slot ``k % capacity`` with sequence word k + 1. An operation's number is the same on every rank; 0 is none. Names lie
beside it in ``<ring>.names``, one JSON value per line: a string is the next name, an object says more about the name whose
number is under "name". Both are appended before first use.
*Guarantees*: bounded; no writer thread; what was written survives SIGKILL of the process. A record is written
as: sequence word 0, payload, sequence word; a reader drops what is torn, and counts it. What lies in a ring's place from
an earlier recording is moved, never overwritten: see ``earlier``.
*Threads*: one writer per ring.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hvdlite.errors import ConfigError
from hvdlite.timeline import earlier
from hvdlite.timeline.phase import Phase

HEADER_BYTES = 4096
RECORD = struct.Struct("<QqqQIHHIIIId")
MAGIC = "hvdlite ring 3"
#: Rings that can be read: the second version is the third without composite records.
READABLE = (MAGIC, "hvdlite ring 2")
_PAYLOAD = struct.Struct("<qqQIHHIIIId")
_COMPOSITE, _FIRST_COMPOSITE = struct.Struct("<qqQIHHIIIIQ"), int(Phase.WHOLE_OPERATION)

#: Lines of a ring's side file of names; what comes later is called OTHER. Chosen: a job that names every call anew must
#: not fill the disk.
MAX_NAMES = 1 << 17
OTHER = "(more names than are kept)"

#: Readings of two clocks of which the best counts. Chosen: they take some us.
NUM_READINGS = 7


#: Phase, name, start_ns, end_ns, num_bytes, detail, count, value, operation, plan, process set; num_bytes and value of a
#: composite record are integers of 64 bits that hold other things.
Record = tuple[int, str, int, int, int, int, int, float, int, int, int]


class Timeline(Protocol):
    """What the runtime records into. ``operation``, ``plan`` and ``process_set`` go into every span and note until they change.

    After a step's computing every line of Python runs from cold caches: the first record then takes ten times as long as those
    right after it. So what happens together is noted, and written together.
    """

    is_recording: bool
    operation: int
    plan: int
    process_set: int

    def span(
        self, phase: Phase, name: str, start_ns: int, end_ns: int, num_bytes: int = 0, detail: int = 0, count: int = 0,
        value: float = 0.0,
    ) -> None:
        """Record an interval that has ended; times from ``time.monotonic_ns``."""

    def note(
        self, phase: Phase, name: str, start_ns: int, end_ns: int, num_bytes: int = 0, detail: int = 0, count: int = 0,
        value: float = 0.0,
    ) -> None:
        """Record it together with what comes next: nothing is written before the next ``span``, ``write`` or ``close``."""

    def write(self, records: Sequence[Record]) -> None:
        """Record what was noted, then these, even where recording has been switched off since."""

    def describe(self, name: str, about: Any) -> None:
        """Say more about a name, once for each object ``about``, a Request."""

    def timed(self, phase: Phase, name: str, num_bytes: int = 0) -> Any:
        """A context manager that notes the time spent inside."""

    def flush(self) -> None:
        """Make what was recorded visible to others; called at each heartbeat."""

    def close(self) -> None:
        """Finish; nothing may be recorded afterwards."""


class NullTimeline:
    """Records nothing, at no cost; also the context manager that ``timed`` hands out."""

    is_recording = False
    operation = plan = process_set = 0

    def span(
        self, phase: Phase, name: str, start_ns: int, end_ns: int, num_bytes: int = 0, detail: int = 0, count: int = 0,
        value: float = 0.0,
    ) -> None:
        pass

    note = span

    def write(self, records: Sequence[Record]) -> None:
        pass

    def describe(self, name: str, about: Any) -> None:
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
    """Records into one memory-mapped ring file. ``is_recording`` may be switched at any time, by any thread."""

    def __init__(
        self, directory: str, rank: int, size: int, ring_bytes: int, thread: str = "background",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Make ``directory/ring-<rank>-<thread>.hvdring``, ``ring_bytes`` long; ``facts`` go into its header.

        Raises: ConfigError when the file cannot be made.
        """
        self.is_recording = True
        self.operation = self.plan = self.process_set = 0
        self.path = Path(directory) / f"ring-{rank:05d}-{thread}.hvdring"
        self._capacity = max(1, (ring_bytes - HEADER_BYTES) // RECORD.size)
        self._count = 0
        self._ids: dict[str, int] = {}
        self._about: dict[str, Any] = {}
        self._num_lines = 0
        self._notes: list[Record] = []
        #: The recording's name, as ``facts`` tell it.
        self.job = str((facts or {}).get("job", ""))
        header = dict(magic=MAGIC, rank=rank, size=size, thread=thread, capacity=self._capacity, pid=os.getpid(),
                      host=socket.gethostname(), clock=clock_identity(), **time_of_day()._asdict(), **(facts or {}))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            earlier.put_aside(self.path)
            self._names = open(f"{self.path}.names", "x", encoding="ascii")
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            # Reserved now: a full disk is an error here and not a SIGBUS later.
            os.posix_fallocate(self._file, 0, HEADER_BYTES + self._capacity * RECORD.size)
            self._memory = mmap.mmap(self._file, 0)
        except OSError as reason:
            raise ConfigError(f"timeline {self.path}: {reason}: name a directory this rank may write to") from reason
        self._words = memoryview(self._memory).cast("Q")
        self._memory[:HEADER_BYTES] = json.dumps(header).encode().ljust(HEADER_BYTES)

    def span(
        self, phase: Phase, name: str, start_ns: int, end_ns: int, num_bytes: int = 0, detail: int = 0, count: int = 0,
        value: float = 0.0,
    ) -> None:
        if self.is_recording:
            self.note(phase, name, start_ns, end_ns, num_bytes, detail, count, value)
            self.write(())

    def note(
        self, phase: Phase, name: str, start_ns: int, end_ns: int, num_bytes: int = 0, detail: int = 0, count: int = 0,
        value: float = 0.0,
    ) -> None:
        if self.is_recording:
            self._notes.append((phase, name, start_ns, end_ns, num_bytes, detail, count, value, self.operation, self.plan,
                                self.process_set))

    def write(self, records: Sequence[Record]) -> None:
        if self._notes:
            records, self._notes = [*self._notes, *records], []
        words, memory, ids, capacity, number = self._words, self._memory, self._ids, self._capacity, self._count
        for phase, name, start_ns, end_ns, num_bytes, detail, count, value, operation, plan, process_set in records:
            name_id = ids.get(name)
            if name_id is None:
                name_id = self._intern(name)
            place = HEADER_BYTES + number % capacity * 64
            number += 1
            words[place >> 3] = 0
            payload = _PAYLOAD if phase < _FIRST_COMPOSITE else _COMPOSITE
            payload.pack_into(memory, place + 8, start_ns, end_ns, num_bytes, name_id, phase, detail, operation, plan, count,
                              process_set, value)
            words[place >> 3] = number
            self._count = number

    def describe(self, name: str, about: Any) -> None:
        if self._about.get(name) is about or not self.is_recording:
            return
        if len(self._about) >= MAX_NAMES:
            self._about.clear()
        self._about[name] = about
        name_id = self._ids.get(name)
        if name_id is None:
            name_id = self._intern(name)
        if self._num_lines < MAX_NAMES:
            self._write_line({"name": name_id, "key": list(about.key), "dtypes": about.dtypes, "shapes": about.shapes,
                              "op": int(about.op), "root": about.root_rank, "device": about.device,
                              "compressor": about.compressor, "names": about.names})

    def timed(self, phase: Phase, name: str, num_bytes: int = 0) -> Timed:
        return Timed(self, phase, name, num_bytes)

    def flush(self) -> None:
        pass  # the page cache has it already

    def close(self) -> None:
        self.is_recording = False
        self.write(())
        self._names.close()
        self._words.release()
        self._memory.close()
        if self._count < self._capacity:  # what was reserved and not needed goes back; by number, for the file may have moved
            os.ftruncate(self._file, HEADER_BYTES + self._count * RECORD.size)
        os.close(self._file)

    def _intern(self, name: str) -> int:
        if len(self._ids) >= MAX_NAMES:
            name = OTHER
            if name in self._ids:
                return self._ids[name]
        name_id = self._ids[name] = len(self._ids)
        self._write_line(name)
        return name_id

    def _write_line(self, value: Any) -> None:
        self._num_lines += 1
        self._names.write(json.dumps(value) + "\n")
        self._names.flush()


class Timed:
    """Notes the time between entering and leaving."""

    __slots__ = ("_name", "_num_bytes", "_phase", "_start_ns", "_timeline")

    def __init__(self, timeline: Timeline, phase: Phase, name: str, num_bytes: int) -> None:
        self._timeline, self._phase, self._name, self._num_bytes = timeline, phase, name, num_bytes

    def __enter__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def __exit__(self, *exception: object) -> None:
        self._timeline.note(self._phase, self._name, self._start_ns, time.monotonic_ns(), self._num_bytes)


class TimeOfDay(NamedTuple):
    """The same moment by CLOCK_MONOTONIC and by the time of day, which lies within ``realtime_error_ns`` of it."""

    monotonic_ns: int
    realtime_ns: int
    realtime_error_ns: int


def time_of_day() -> TimeOfDay:
    """Read both clocks. Of some readings the closest counts: any of them may be interrupted for milliseconds."""
    before, now, after = min(((time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(NUM_READINGS)),
                             key=lambda one: one[2] - one[0])
    return TimeOfDay((before + after) // 2, now, max(1, (after - before + 1) // 2))


def clock_identity() -> str:
    """What processes whose CLOCK_MONOTONIC is one and the same have in common: the kernel's start and the time namespace."""
    parts = []
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/time"))
    except OSError:
        parts.append(socket.gethostname())
    return " ".join(parts)
