"""What dead jobs leave behind: shared memory of their MPI, and directories of sockets; found by claims.

Each guard keeps a claim, ``/dev/shm/hvdlite-JOB-RANK``: the segments that it saw its rank map. A claim whose job has no living
process on this host is void: its segments go, unless something else maps them, and then the claim itself.
"""

from __future__ import annotations

import os
import re
import tempfile

SHARED_MEMORY = "/dev/shm"
_CLAIM = re.compile(r"hvdlite-([0-9a-f]+)-.+")
#: Segments of the MPIs: MPICH's, Open MPI's, UCX's. Nothing else that a rank maps is ever removed.
_SEGMENT = re.compile(r"(mpich_shm_|sm_segment\.|vader_segment\.|ucx_shm_|hvdlite-).+")
OWNER = "owner"
_DIRECTORY = "hvdrun-"


def claim_path(job: str, rank: int, directory: str = SHARED_MEMORY) -> str:
    """Where a rank's guard keeps its claim."""
    return os.path.join(directory, f"hvdlite-{job}-{rank}")


def mapped_segments(pid: int | str, directory: str = SHARED_MEMORY) -> set[str]:
    """Names of the MPIs' segments that a process maps."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            text = file.read()
    except OSError:
        return set()
    found = re.findall(rb" " + re.escape(os.fsencode(directory)) + rb"/([^/\n]+?)(?: \(deleted\))?$", text, re.MULTILINE)
    return {name for name in map(os.fsdecode, found) if _SEGMENT.fullmatch(name)}


def update_claim(path: str, segments: set[str]) -> None:
    """Write a claim whole."""
    part = f"{path}.part"
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write("".join(f"{name}\n" for name in sorted(segments)))
        os.replace(part, path)
    except OSError:
        pass  # a full or missing /dev/shm: then there is no segment either


def release_claim(path: str, directory: str = SHARED_MEMORY) -> None:
    """Remove a claim, and the segments in it that no process maps any more: an orderly MPI has removed them itself."""
    try:
        with open(path, encoding="utf-8") as file:
            names = {line.rstrip("\n") for line in file}
    except (OSError, UnicodeDecodeError):
        names = set()
    present = {name for name in names if _SEGMENT.fullmatch(name) and "/" not in name and os.path.exists(
        os.path.join(directory, name))}
    if present:
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            present -= mapped_segments(pid, directory)
            if not present:
                break
    for name in present:
        _unlink(os.path.join(directory, name))
    _unlink(path)


def sweep_shared_memory(directory: str = SHARED_MEMORY, temporary: str | None = None) -> None:
    """Remove what dead jobs of this user left on this host."""
    try:
        names = os.listdir(directory)
    except OSError:
        names = []
    claims = {name: match[1] for name in names if (match := _CLAIM.fullmatch(name)) and _is_own(os.path.join(directory, name))}
    if claims:
        alive = living_jobs()
        for name, job in claims.items():
            if job not in alive:
                release_claim(os.path.join(directory, name), directory)
    _sweep_directories(temporary or tempfile.gettempdir())


def living_jobs() -> set[str]:
    """The jobs that some process on this host belongs to."""
    found: set[str] = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                found.update(match.decode() for match in re.findall(rb"(?:^|\0)HVDLITE_JOB=([0-9a-f]+)", file.read()))
        except OSError:
            continue  # another user's, or ended meanwhile
    return found


def own(directory: str) -> None:
    """Note in a private directory whose it is."""
    with open(os.path.join(directory, OWNER), "w", encoding="ascii") as file:
        file.write(f"{os.getpid()} {_start_time(os.getpid())}")


def _sweep_directories(temporary: str) -> None:
    from hvdlite.launch.channel import remove

    try:
        names = [name for name in os.listdir(temporary) if name.startswith(_DIRECTORY)]
    except OSError:
        return
    for name in names:
        path = os.path.join(temporary, name)
        try:
            with open(os.path.join(path, OWNER), encoding="ascii") as file:
                pid, started = file.read().split()
        except (OSError, ValueError):
            continue  # not one of ours, or being made
        if _is_own(path) and _start_time(int(pid)) != started:
            remove(path)


def _start_time(pid: int) -> str:
    """Ticks since boot at which a process started; with the number it is never the same twice."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[19].decode()
    except (OSError, IndexError):
        return ""


def _is_own(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
