"""The timeline as Horovod writes it: one JSON array by rank 0, appended while the job runs.

*Format*: each tensor is a "pid" named by metadata; NEGOTIATE_<OP> encloses what was waited, <OP> the execution
with the activities inside.
*Guarantees*: the file is valid JSON at every instant. A batch of events is written by one ``pwrite`` that starts
at the old closing bracket and ends with the new one, and the kernel never lets a reader (nor a kill) see the
file shorter than before; Linux does ordinary writes under the inode's lock.
*Threads*: the background thread only.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from hvdlite.errors import ConfigError
from hvdlite.timeline.phase import Phase

_HEAD = b"[\n"
_TAIL = b"\n]\n"

#: Events held back at most, however rarely the heartbeat comes. Chosen.
_BATCH = 512



class LiveTimeline:
    """Rank 0's file. Takes the same records as a ring does."""

    is_recording = True

    def __init__(self, path: str) -> None:
        """Make the file. Raises: ConfigError when it cannot be made."""
        self._pids: dict[str, int] = {}
        self._start_ns = time.monotonic_ns()
        self._events: list[str] = []
        self._size = 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as reason:
            raise ConfigError(f"timeline {path}: {reason}: name a file that rank 0 may write") from reason
        head = {"name": "process_name", "ph": "M", "pid": 0,
                "args": {"start_time_since_epoch_in_micros": time.time_ns() // 1000}}
        first = _HEAD + json.dumps(head).encode()
        os.pwrite(self._file, first + _TAIL, 0)
        self._size = len(first)

    def span(self, phase: Phase, name: str, start_ns: int, end_ns: int, num_bytes: int = 0) -> None:
        """Record one finished phase of tensor ``name``."""
        if phase == Phase.CYCLE_START:
            self._add({"name": "CYCLE_START", "ph": "i", "pid": 0, "s": "g", "ts": self._micros(start_ns)})
            return
        pid = self._pids.get(name) or self._new_pid(name)
        event: dict[str, Any] = {
            "name": phase.name, "ph": "X", "pid": pid, "ts": self._micros(start_ns), "dur": (end_ns - start_ns) / 1e3}
        if num_bytes:
            event["args"] = {"bytes": num_bytes}
        self._add(event)

    def timed(self, phase: Phase, name: str, num_bytes: int = 0) -> Any:
        """A context manager that records the time spent inside."""
        from hvdlite.timeline.recorder import Timed

        return Timed(self, phase, name, num_bytes)

    def flush(self) -> None:
        """Append what was recorded."""
        if self._events:
            added = b",\n" + ",\n".join(self._events).encode()
            self._events.clear()
            os.pwrite(self._file, added + _TAIL, self._size)
            self._size += len(added)

    def close(self) -> None:
        """Append the rest and close the file."""
        self.flush()
        os.close(self._file)

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
