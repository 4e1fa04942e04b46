"""Notes between a rank and the guard that hvdrun gave it: whose fault its end is, what a peer's end was, where it hangs.

The guard passes two descriptors: a socket for lines of JSON both ways, and a pipe that ``faulthandler`` writes stacks to.
Where a thread of :func:`listen` can run it writes them, holding the interpreter's lock, so that no frame changes meanwhile.
Else a signal of the guard has them written from C, whatever holds the lock; neither needs ptrace.
*Threads*: :func:`listen` starts one; until then the rank has no thread of ours.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

#: Holds the two descriptors, as in ``5,7``.
VARIABLE = "HVDLITE_NOTES_FD"
#: The note of a rank that ends because of a peer.
VICTIM = "victim"
#: The note of a rank that answers questions by itself.
LISTENS = "listens"
#: What asks Python for its stacks. Chosen: nobody uses the last real-time signals, and the guard sends it only to a
#: process that said it listens.
STACKS_SIGNAL = signal.SIGRTMAX - 3

_claimed: list[socket.socket] = []
_owner_pid, _stacks_fd = 0, -1


def claim() -> bool:
    """Take the guard's descriptors, once in a rank's first Python; children find none. Tell whether they are taken."""
    global _owner_pid, _stacks_fd
    if _claimed:
        return os.getpid() == _owner_pid
    text = os.environ.pop(VARIABLE, "")
    try:
        notes_fd, stacks_fd = map(int, text.split(","))
        os.set_inheritable(notes_fd, False)
        os.set_inheritable(stacks_fd, False)
        connection = socket.socket(fileno=notes_fd)
    except (ValueError, OSError):
        return False  # started otherwise, or a parent has them
    _claimed.append(connection)
    _owner_pid, _stacks_fd = os.getpid(), stacks_fd
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True, chain=False)
    leave("python", pid=_owner_pid)
    return True


def leave(kind: str, **facts: Any) -> None:
    """Write a note; nothing happens where no hvdrun reads it, and in a forked child."""
    if not claim():
        return
    try:
        _claimed[0].sendall(json.dumps({"kind": kind, **facts}).encode("ascii") + b"\n")
    except OSError:
        pass  # the guard is gone


def listen(hear: Callable[[dict[str, Any]], None]) -> None:
    """Call ``hear`` with each of the guard's notes, on a thread of its own. Once."""
    if claim():
        leave(LISTENS)
        threading.Thread(target=_serve, args=(hear,), name="hvdlite-notes", daemon=True).start()


def _serve(hear: Callable[[dict[str, Any]], None]) -> None:
    unread = b""
    while True:
        try:
            data = _claimed[0].recv(1 << 16)
        except OSError:
            return
        if not data:
            return
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            note = json.loads(line)
            if note["kind"] == "stacks":
                faulthandler.dump_traceback(_stacks_fd, all_threads=True)
            hear(note)
