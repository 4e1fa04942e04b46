"""Notes that a rank leaves for the hvdrun that started it: whose fault its end is."""

from __future__ import annotations

import os

#: Names the descriptor of a pipe to the rank's guard.
VARIABLE = "HVDLITE_NOTES_FD"
#: The note of a rank that ends because of a peer.
VICTIM = b"victim\n"


def leave(note: bytes) -> None:
    """Write a note; nothing happens where no hvdrun reads it."""
    try:
        os.write(int(os.environ[VARIABLE]), note)
    except (KeyError, ValueError, OSError):
        pass  # started otherwise, or nobody listens
