"""Run by the first Python of every rank, because hvdrun puts this directory first in PYTHONPATH.

It answers the guard's questions about stacks, and sees to it that an uncaught exception ends the process: with mpi4py
imported it would hang in MPI's Finalize, and its peers in their collective. It leaves no other trace: the directory leaves
``sys.path`` and PYTHONPATH again, and the ``sitecustomize`` that it hid is run.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder


def _withdraw() -> None:
    """Take this directory out of the paths, of this process and of its children."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    entries = [entry for entry in entries if entry != here]
    if entries and entries != [""]:
        os.environ["PYTHONPATH"] = os.pathsep.join(entries)
    else:
        os.environ.pop("PYTHONPATH", None)


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that would have been found without this one."""
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _mpi_is_active() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    try:
        return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    except Exception:
        return False


def _end_by_exception(kind, error, trace):  # type: ignore[no-untyped-def]
    sys.__excepthook__(kind, error, trace)
    end = sys.modules.get("hvdlite.process_end")
    if end is not None and end.is_installed():
        return  # whose hook called this one, and has more to tell
    if os.getpid() == _pid and _mpi_is_active():
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass  # closed, or nobody reads it any more
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)


_withdraw()
_pid = os.getpid()
try:
    # By path: the rank's Python need not have hvdlite.
    _path = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "notes.py")
    _spec = importlib.util.spec_from_file_location("hvdlite.notes", _path)
    if "HVDLITE_NOTES_FD" in os.environ and _spec is not None and _spec.loader is not None:
        _notes = importlib.util.module_from_spec(_spec)
        sys.modules["hvdlite.notes"] = _notes  # the one that hvdlite will find
        _spec.loader.exec_module(_notes)
        if _notes.claim():
            sys.excepthook = _end_by_exception
except Exception:
    pass  # what is optional must not keep a rank from starting
_run_hidden()
