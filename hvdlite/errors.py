"""The tree of errors, one family per answer to "whose move is it?".

::

    HvdliteError
    |-- InvalidRequestError (ValueError)        you called it wrongly; nothing was submitted; correct and retry
    |   |-- DuplicateNameError                  this name is still in flight
    |   |-- NotAMemberError                     this rank is outside the process set
    |   `-- UnsupportedOpError (HorovodInternalError)   the collective has no such op
    |-- ConfigError (ValueError)                a setting cannot be used
    |-- UnavailableError (ImportError)          a package, extra or MPI is missing
    |-- WaitTimeoutError (TimeoutError)         Handle.wait(timeout_s) ran out; the operation goes on
    |-- HorovodInternalError (RuntimeError)     it failed while running; every rank of the set gets it
    |   |-- MismatchError                       the ranks disagree about one tensor
    |   |-- TransportError                      MPI or NCCL reported a failure
    |   |-- StalledError                        a rank did not submit in time
    |   |-- ProcessSetRemovedError              the process set was removed meanwhile
    |   |-- PeerFailedError                     another rank raised, died or left
    |   `-- NotInitializedError (ValueError)    before init(), after shutdown(), or after all ranks left
    |-- JobFailedError (RuntimeError)           a job started by hvdlite.run failed without an exception to raise here
    |-- HostsUpdatedInterrupt (RuntimeError)    the set of hosts changed (elastic)
    `-- InternalError (RuntimeError)            a defect of hvdlite; please report it

Messages read *what: facts: what to do* and name the tensor and the ranks. ``HorovodInternalError``,
``HostsUpdatedInterrupt`` and the ValueErrors keep the types that users of Horovod catch.
"""

from __future__ import annotations

from collections.abc import Iterable


class HvdliteError(Exception):
    """Base of everything hvdlite raises on purpose."""


class InvalidRequestError(HvdliteError, ValueError):
    """The call itself is wrong; raised at the call, on the rank that made it, with nothing submitted."""


class DuplicateNameError(InvalidRequestError):
    """A tensor of this name is still in flight on this rank."""


class NotAMemberError(InvalidRequestError):
    """This rank is not in the process set it used."""


class HorovodInternalError(HvdliteError, RuntimeError):
    """A collective failed while it ran; every rank of its process set gets the same error.

    ``is_final``: a process of the job has ended, so the same ranks cannot start anew.
    """

    is_final = False


class UnsupportedOpError(InvalidRequestError, HorovodInternalError):
    """The collective does not know this reduction op; raised at the call, and caught as either kind."""


class ConfigError(HvdliteError, ValueError):
    """A setting has a value that cannot be used, or settings contradict one another."""


class UnavailableError(HvdliteError, ImportError):
    """Something optional was asked for and is not installed; the message names what to install."""


class WaitTimeoutError(HvdliteError, TimeoutError):
    """``Handle.wait(timeout_s)`` ran out of time; the operation is still in flight."""


class MismatchError(HorovodInternalError):
    """The ranks submitted one name with different arguments; only that tensor failed."""


class TransportError(HorovodInternalError):
    """MPI or NCCL reported a failure."""


class StalledError(HorovodInternalError):
    """A tensor waited for some ranks longer than the stall limit."""


class ProcessSetRemovedError(HorovodInternalError):
    """The operation's process set was removed while it was in flight."""


class PeerFailedError(HorovodInternalError):
    """Another rank raised, died or left while this one still waited for it."""


class NotInitializedError(HorovodInternalError, ValueError):
    """The runtime is not running: before ``init()``, after ``shutdown()``, or after the job ended."""


class JobFailedError(HvdliteError, RuntimeError):
    """A job that this process started failed, and no exception of a rank can be raised here in its place."""


class HostsUpdatedInterrupt(HvdliteError, RuntimeError):
    """The set of hosts changed; ``skip_sync`` says whether state need not be synchronised again."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts changed: commit, re-initialise and go on")
        self.skip_sync = skip_sync


class InternalError(HvdliteError, RuntimeError):
    """A defect of hvdlite itself."""


def format_ranks(ranks: Iterable[int]) -> str:
    """Word a set of ranks for a message: ``rank 3``, ``ranks 0-2, 5``; empty is ``no rank``."""
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(words)}"
