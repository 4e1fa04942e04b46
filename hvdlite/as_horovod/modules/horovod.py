"""``horovod`` itself."""

from __future__ import annotations

from typing import Any

import hvdlite

#: The version whose interface hvdlite follows: scripts compare it.
__version__ = "0.28.1"


def __getattr__(name: str) -> Any:
    if name == "run":
        return hvdlite.run
    raise AttributeError(
        f"hvdlite, which runs this script in place of Horovod, has no horovod.{name}: it has horovod.torch and run")
