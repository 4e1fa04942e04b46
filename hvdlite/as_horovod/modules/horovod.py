"""``horovod`` itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hvdlite

#: The version whose interface hvdlite follows: scripts compare it.
__version__ = "0.28.1"
#: Arguments of Horovod's ``run`` that change nothing here.
_HARMLESS = frozenset(("start_timeout", "disable_cache", "verbose", "use_mpi", "cooldown_range", "reset_limit"))


def run(
    func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, num_proc: int | None = None,
    np: int | None = None, env: Mapping[str, str] | None = None, **others: Any,
) -> list[Any]:
    """``hvdlite.run`` under the names that Horovod's takes.

    Raises: ValueError for arguments that concern other hosts or controllers, which it does not take.
    """
    unknown = {name: value for name, value in others.items() if value not in (None, False, 0) and name not in _HARMLESS}
    if unknown:
        raise ValueError(f"horovod.run: {', '.join(sorted(unknown))}: hvdlite.run starts ranks on this host and takes no such "
                         "argument: use hvdrun")
    return hvdlite.run(func, args, kwargs, num_proc or np or 1, env=env)


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"hvdlite, which runs this script in place of Horovod, has no horovod.{name}: it has horovod.torch and run")
