"""Failure: how a rank of ``hvdlite.run`` failed, in a form that always reaches the caller, and back as an exception."""

from __future__ import annotations

import pickle
import time
import traceback
from dataclasses import dataclass

from hvdlite.errors import JobFailedError, PeerFailedError


class RemoteTraceback(Exception):
    """The cause of an exception that a rank raised: the rank, and its traceback as text."""


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank. *Units*: ``raised_ns`` is CLOCK_MONOTONIC.

    ``pickled`` is empty where the exception cannot be pickled, and for what is no Exception, as SystemExit: raised
    again it would end the caller. ``is_victim``: another rank was the reason.
    """

    rank: int
    kind: str
    message: str
    traceback: str
    raised_ns: int
    is_victim: bool
    pickled: bytes

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Describe an exception that is being handled; its traceback begins below the caller of this."""
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        return cls(
            rank, type(error).__qualname__, str(error), "".join(traceback.format_exception(type(error), error, trace)),
            time.monotonic_ns(), isinstance(error, PeerFailedError), _pickled(error))

    def exception(self) -> Exception:
        """The exception to raise in the caller: the rank's own, or a JobFailedError that tells of it."""
        error = _unpickled(self.pickled)
        if error is None:
            error = JobFailedError(f"rank {self.rank} raised {self.kind}: {self.message}")
        elif hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"raised by rank {self.rank}")
        error.__cause__ = RemoteTraceback(f"rank {self.rank} raised:\n\n{self.traceback}")
        return error


def _pickled(error: BaseException) -> bytes:
    import cloudpickle

    if not isinstance(error, Exception):
        return b""
    try:
        data = bytes(cloudpickle.dumps(error))
    except Exception:
        return b""
    return data if _unpickled(data) is not None else b""


def _unpickled(data: bytes) -> Exception | None:
    # Many exceptions are pickled without complaint and cannot be made from what that gives.
    try:
        error = pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, Exception) else None
