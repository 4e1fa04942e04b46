"""``horovod.runner.util.threads``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any


def in_thread(
    target: Callable[..., Any], args: tuple[Any, ...] = (), name: str | None = None, daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls ``target(*args)``; ``silent`` drops what it raises.

    Raises: ValueError where ``args`` is no tuple.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"args is a {type(args).__name__}: pass a tuple, (x,) for one argument")

    def run() -> None:
        with contextlib.suppress(BaseException) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread
