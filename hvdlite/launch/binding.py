"""Processors and GPUs of a rank: its share of what its host allows this job. Pure but for :func:`find_gpus`."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

#: A rank computes in one thread and communicates in another: on fewer processors than this it is not bound.
MIN_CPUS_TO_BIND = 2


def format_cpus(cpus: Sequence[int]) -> str:
    """Processors as ranges, ``0-3,8``, which stay short on large machines."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_cpus(text: object) -> list[int]:
    """Invert :func:`format_cpus`; what is no such text is no processor."""
    if not isinstance(text, str) or not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
        return []
    bounds = [part.partition("-") for part in text.split(",")]
    return [cpu for first, _, last in bounds for cpu in range(int(first), int(last or first) + 1)]


def share(cpus: Sequence[int], local_size: int, local_rank: int) -> tuple[int, ...]:
    """A rank's processors: an equal part of the allowed ones; none where the parts would be smaller than is worth binding to.

    All allowed processors are used, so that several jobs on a host meet evenly.
    """
    if local_size < 2 or len(cpus) < MIN_CPUS_TO_BIND * local_size:
        return ()
    ordered = sorted(cpus)
    return tuple(ordered[len(ordered) * local_rank // local_size:len(ordered) * (local_rank + 1) // local_size])


def num_threads(num_cpus: int, local_size: int) -> int:
    """How many threads a rank's library calls should use."""
    return max(1, num_cpus // local_size)


def gpu_of(gpus: Sequence[str], local_rank: int) -> str:
    """The GPU of a rank, by its place among the ranks of its host; ranks beyond the last begin again."""
    return gpus[local_rank % len(gpus)] if gpus else ""


def find_gpus(environ: Mapping[bytes, bytes], timeout_s: float = 30.0) -> list[str]:
    """This host's GPUs: those that CUDA_VISIBLE_DEVICES allows already, else all that nvidia-smi knows, by UUID."""
    allowed = environ.get(b"CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [word.strip() for word in allowed.decode(errors="replace").split(",") if word.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()
