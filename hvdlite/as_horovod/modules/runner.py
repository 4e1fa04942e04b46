"""``horovod.runner``: running a function on several ranks."""

from __future__ import annotations

from typing import Any

import hvdlite


def __getattr__(name: str) -> Any:
    if name == "run":
        return hvdlite.run
    raise AttributeError(f"hvdlite, which runs this script in place of Horovod, has no horovod.runner.{name}: it has run")
