"""Whether the kernel killed something of this control group for want of memory."""

from __future__ import annotations

import os


def num_oom_kills(root: str = "/sys/fs/cgroup", of: str = "/proc/self/cgroup") -> int:
    """How many processes of this process's control group the kernel has killed for want of memory; 0 where nobody counts."""
    try:
        with open(of, encoding="utf-8") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return 0
    total = 0
    for _, controllers, path in filter(lambda group: len(group) == 3, groups):
        if controllers == "":
            total += _count(os.path.join(root, path.lstrip("/"), "memory.events"))
        elif "memory" in controllers.split(","):
            total += _count(os.path.join(root, "memory", path.lstrip("/"), "memory.oom_control"))
    return total


def _count(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except (OSError, ValueError, IndexError):
        return 0
