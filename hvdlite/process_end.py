"""The end of a rank's process: peers are told why, and nobody hangs in MPI's Finalize.

A rank that raises tells its peers through the status bits, then leaves by ``os._exit`` after flushing: Finalize
would wait for ranks that never come. A rank that ends in good order finalises MPI, if all ranks did.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from hvdlite import notes
from hvdlite.errors import PeerFailedError

#: Seconds a dying rank gives its peers to hear the reason. Chosen: several heartbeats.
_FAREWELL_S = 2.0


#: Seconds by which a rank that fails because of a peer ends later, so that whoever looks sees the cause first.
_VICTIM_DELAY_S = 0.3


class _State:
    """What was installed in this process."""

    installed = False
    owns_finalize = False
    process_id = 0


def take_over_finalize(mpi4py: Any) -> None:
    """Keep mpi4py from finalising MPI at exit by itself; only possible before ``mpi4py.MPI`` is imported."""
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.finalize = False
        _State.owns_finalize = True


def give_back_finalize() -> None:
    """After an ``init()`` that failed: a process that is alone in its MPI finalises it at exit, which waits for nobody. Else its
    shared memory would stay."""
    if _State.owns_finalize and not _State.installed:
        atexit.register(_finalize_alone)


def _finalize_alone() -> None:
    MPI = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if not _State.installed and MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized() and (
            MPI.COMM_WORLD.Get_size() == 1):
        MPI.Finalize()


def is_installed() -> bool:
    """Whether an uncaught exception ends this process by what :func:`install` put in place."""
    return _State.installed


def install(leave: Callable[[], bool], fail: Callable[[str, float], None], *, uses_mpi: bool) -> None:
    """Arrange for ``leave`` at a normal end and ``fail`` on an uncaught exception, once per process."""
    if _State.installed:
        return
    _State.installed = True
    _State.process_id = os.getpid()
    previous = sys.excepthook

    def end_by_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if uses_mpi and os.getpid() == _State.process_id:
            fail(f"{kind.__name__}: {error}", _FAREWELL_S)
            if issubclass(kind, PeerFailedError):
                notes.leave(notes.VICTIM)
                time.sleep(_VICTIM_DELAY_S)
            _exit_now(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def end_normally() -> None:
        if os.getpid() != _State.process_id:
            return
        is_clean = leave()
        if uses_mpi:
            _finalize(is_clean)

    sys.excepthook = end_by_exception
    atexit.register(end_normally)


def _finalize(is_clean: bool) -> None:
    from mpi4py import MPI

    if is_clean and _State.owns_finalize and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
    elif not is_clean and not _State.owns_finalize:
        # mpi4py would finalise, and wait for ranks that have gone.
        logging.getLogger("hvdlite").error("the job ended in disorder: leaving without MPI's Finalize")
        _exit_now(1)


def _exit_now(code: int) -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # closed, or nobody reads it any more
    os._exit(code)
