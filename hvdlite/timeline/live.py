"""The timeline as Horovod writes it: one JSON array by rank 0, appended while the job runs.

*Format*: each tensor is a "pid" named by metadata; NEGOTIATE_<OP> encloses what was waited, <OP> the execution
with the activities inside.
*Guarantees*: the file under its name is whole, valid JSON at every instant, for readers and after a kill. One
write is not enough for that: a kill may cut a ``write`` between two pages, and a reader may see half of it. So there
are two copies; a batch is appended to the hidden one, then the two change names in one step. The copy that was
hidden so is left alone for `_REST_NS`, for those who opened it before, and catches up with the next batch. Both
only ever grow. Where the file system cannot exchange names, construction says so.
*Threads*: the background thread only.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from hvdlite.errors import ConfigError
from hvdlite.timeline.composite import singles
from hvdlite.timeline.phase import Phase
from hvdlite.timeline.recorder import Record, Timed

_log = logging.getLogger("hvdlite")

_HEAD = b"[\n"
_TAIL = b"\n]\n"

#: Events that are written without a heartbeat. Chosen.
_BATCH = 512
#: How long a reader may take over a file that it opened. Chosen: 30 ms reads some 30 MB, and is not felt.
_REST_NS = 30_000_000


class LiveTimeline:
    """Rank 0's file. Takes the same records as a ring does."""

    is_recording = True
    operation = plan = process_set = 0

    def __init__(self, path: str) -> None:
        """Make the file. Raises: ConfigError when it cannot be made."""
        self._pids: dict[str, int] = {}
        self._start_ns = time.monotonic_ns()
        self._events: list[str] = []
        self._behind = b""
        self._is_broken = False
        self._exchanged_ns = 0
        self._path = os.path.abspath(path)
        directory, name = os.path.split(self._path)
        self._hidden_path = os.path.join(directory, f".{name}.next")
        head = {"name": "process_name", "ph": "M", "pid": 0,
                "args": {"start_time_since_epoch_in_micros": time.time_ns() // 1000}}
        first = _HEAD + json.dumps(head).encode()
        try:
            self._shown, self._hidden = (_Copy(one, first) for one in (self._path, self._hidden_path))
            _exchange(self._path, self._hidden_path)
            self._shown, self._hidden = self._hidden, self._shown
        except OSError as reason:
            raise ConfigError(
                f"timeline {path}: {reason}: name a file that rank 0 may write, on a local file system") from reason

    def span(
        self, phase: Phase, name: str, start_ns: int, end_ns: int, num_bytes: int = 0, detail: int = 0, count: int = 0,
        value: float = 0.0,
    ) -> None:
        """Record one finished phase of tensor ``name``; what Horovod's timelines do not have is left out."""
        if phase > Phase.CYCLE_START:
            return
        if phase == Phase.CYCLE_START:
            self._add({"name": "CYCLE_START", "ph": "i", "pid": 0, "s": "g", "ts": self._micros(start_ns)})
            return
        pid = self._pids.get(name) or self._new_pid(name)
        event: dict[str, Any] = {
            "name": phase.name, "ph": "X", "pid": pid, "ts": self._micros(start_ns), "dur": (end_ns - start_ns) / 1e3}
        if num_bytes:
            event["args"] = {"bytes": num_bytes}
        self._add(event)

    note = span

    def write(self, records: Sequence[Record]) -> None:
        """Record these."""
        for record in records:
            for phase, name, start_ns, end_ns, num_bytes, *_ in singles(record):
                self.span(Phase(phase), name, start_ns, end_ns, num_bytes)

    def describe(self, name: str, about: Any) -> None:
        """Nothing more is said of names here."""

    def timed(self, phase: Phase, name: str, num_bytes: int = 0) -> Any:
        """A context manager that records the time spent inside."""
        return Timed(self, phase, name, num_bytes)

    def flush(self) -> None:
        """Append what was recorded, unless the last time is less than `_REST_NS` ago."""
        if self._is_broken:
            self._events.clear()
        elif self._events and time.monotonic_ns() - self._exchanged_ns >= _REST_NS:
            try:
                self._append()
            except OSError as reason:
                self._give_up(reason)

    def _append(self) -> None:
        added = b",\n" + ",\n".join(self._events).encode()
        self._events.clear()
        self._hidden.append(self._behind + added)
        _exchange(self._path, self._hidden_path)
        self._shown, self._hidden = self._hidden, self._shown
        self._behind = added
        self._exchanged_ns = time.monotonic_ns()

    def close(self) -> None:
        """Append the rest and remove the hidden copy."""
        if self._events:
            time.sleep(max(0, _REST_NS - time.monotonic_ns() + self._exchanged_ns) / 1e9)
            self.flush()
        if self._is_broken:
            return
        self._shown.close()
        self._hidden.close()
        try:
            os.unlink(self._hidden_path)
        except OSError as reason:
            self._give_up(reason)

    def _give_up(self, reason: OSError) -> None:
        """A file that cannot be written any more (no space left, removed) must not end the training."""
        self._is_broken = True
        _log.warning("timeline %s: %s: recording into it has stopped", self._path, reason)

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(json.dumps(event))
        if len(self._events) >= _BATCH:
            self.flush()

    def _new_pid(self, name: str) -> int:
        pid = self._pids[name] = len(self._pids) + 1
        self._add({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        self._add({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
        return pid

    def _micros(self, at_ns: int) -> float:
        return (at_ns - self._start_ns) / 1e3


class _Copy:
    """One of the two files."""

    def __init__(self, path: str, first: bytes) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._size = 0
        self.append(first)

    def append(self, data: bytes) -> None:
        """Replace the closing bracket by ``data`` and a new one."""
        rest = memoryview(data + _TAIL)
        place = self._size
        while rest:
            written = os.pwrite(self._file, rest, place)
            rest, place = rest[written:], place + written
        self._size += len(data)

    def close(self) -> None:
        os.close(self._file)


def _exchange(one: str, other: str) -> None:
    """Let two files change names in one step. Raises: OSError."""
    at_fdcwd, rename_exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), one)
