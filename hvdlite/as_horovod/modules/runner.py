"""``horovod.runner``: running a function on several ranks."""

from __future__ import annotations

from typing import Any

from hvdlite.as_horovod.modules.horovod import run as run


def __getattr__(name: str) -> Any:
    raise AttributeError(f"hvdlite, which runs this script in place of Horovod, has no horovod.runner.{name}: it has run")
