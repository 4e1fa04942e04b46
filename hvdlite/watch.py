"""What the guard that hvdrun gave this rank asks and tells: where it waits, how far it is, and that a peer has failed.

*Threads*: on the thread of :func:`hvdlite.notes.listen`; the background thread is only told.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from hvdlite import notes
from hvdlite.background import Background
from hvdlite.errors import PeerFailedError

#: How long the background thread may take to notice that a peer failed, before its handles are failed for it: it may be
#: inside an MPI call that never returns. Chosen: far longer than one of its cycles.
_TAKEOVER_S = 0.5
#: What one answer spells out. Chosen: fits a socket's buffer.
_TENSORS_TOLD = 100

_watched: list[Background] = []


def watch(background: Background) -> None:
    """Answer for this loop from now on, instead of an earlier one."""
    first = not _watched
    _watched[:] = [background]
    if first:
        notes.listen(_hear)


def _hear(note: dict[str, Any]) -> None:
    background = _watched[0]
    if note["kind"] == "failed":
        background.abandon(PeerFailedError(note["text"]), _TAKEOVER_S)
    elif note["kind"] in ("stacks", "progress"):
        now_ns = time.monotonic_ns()
        pending = [(entry.request.label, round((now_ns - entry.submitted_ns) / 1e9, 3)) for entry in background.in_flight()]
        notes.leave("waits", completed=background.num_completed, pending=pending[:_TENSORS_TOLD], operation=_operation())


def _operation() -> str:
    """What the main thread waits for, read from its stack."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "wait" and frame.f_globals.get("__name__") == "hvdlite.handle":
            return str(getattr(frame.f_locals.get("self"), "name", ""))
        frame = frame.f_back
    return ""
