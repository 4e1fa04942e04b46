"""run: train, and after a failure start again from the last commit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from hvdlite import api
from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt

_log = logging.getLogger("hvdlite")

#: How often in a row training may fail with no commit in between, before the error is taken for a lasting one. Chosen.
MAX_FAILURES = 3


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``func(state, ...)``, which trains, so that it is started again after a failure.

    Every start synchronises the state from rank 0 first. A HorovodInternalError leads back to the last commit, on
    every rank, because every rank gets it. A HostsUpdatedInterrupt keeps the state as it is. After either the runtime
    is shut down and started anew, and ``state.on_reset()`` runs. Process sets end with the runtime: add them again in
    a reset callback.
    Raises: what ``func`` raises; the HorovodInternalError itself, when a rank's process has ended, or when training has
    failed MAX_FAILURES times in a row with no ``state.commit()`` in between.
    """
    return run_fn(func, _reset)


def run_fn(func: Callable[..., Any], reset: Callable[[], Any]) -> Callable[..., Any]:
    """As ``run``, with ``reset()`` to start the runtime anew."""

    @functools.wraps(func)
    def start_until_done(state: Any, *args: Any, **kwargs: Any) -> Any:
        failures = _Failures(state)
        has_failed = skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                if error.is_final or failures.is_lasting(error):
                    raise
                has_failed, skip_sync = True, False
            except HostsUpdatedInterrupt as interrupt:
                has_failed, skip_sync = False, interrupt.skip_sync
            reset()
            if has_failed:
                state.restore()  # not before the reset, which ends whatever was in flight over the state's tensors
            state.on_reset()

    return start_until_done


class _Failures:
    """Counts failures since the last commit."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._num_commits: Any = None
        self._num_failures = 0

    def is_lasting(self, error: HorovodInternalError) -> bool:
        """Count one more failure; tell whether starting again has no prospect."""
        num_commits = getattr(self._state, "_num_commits", 0)
        if num_commits != self._num_commits:
            self._num_commits, self._num_failures = num_commits, 0
        self._num_failures += 1
        what = f"elastic: {type(error).__name__}: {error}"
        if self._num_failures >= MAX_FAILURES:
            _log.error("%s: failed %d times with no commit in between: giving up", what, self._num_failures)
            return True
        _log.warning("%s: back to the last commit, and again", what)
        return False


def _reset() -> None:
    api.shutdown()
    api.init()
