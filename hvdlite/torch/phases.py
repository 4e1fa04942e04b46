"""Where a torch step spends its time, for the timeline: input until the first module is called, forward, backward.

Hooks exist between a step and the next forward only, and only while something is recorded.
"""

from __future__ import annotations

import time
from typing import Any

from torch.nn.modules import module as modules

from hvdlite.timeline.marks import Marks


class StepPhases:
    """The phases of one optimizer's steps. *Threads*: the user's."""

    def __init__(self) -> None:
        self._waiting: Any = None
        self._seen: list[tuple[str, int, int]] = []
        self._forward_end_ns = 0

    def step_ended(self, marks: Marks, owner: str) -> None:
        """Mark the step and watch for the next one's forward."""
        marks.step(owner, self._seen)
        self._seen.clear()
        self._forget()
        if not marks.is_recording:
            return
        ended_ns = time.monotonic_ns()

        def first_call(module: Any, arguments: Any) -> None:
            # Any module's first call after the step is the model's, or of what feeds it.
            self._forget()
            began_ns = time.monotonic_ns()
            self._seen.append(("input", ended_ns, began_ns))

            def returned(module: Any, arguments: Any, result: Any) -> None:
                after.remove()
                self._forward_end_ns = time.monotonic_ns()
                self._seen.append(("forward", began_ns, self._forward_end_ns))

            after = module.register_forward_hook(returned)

        self._waiting = modules.register_module_forward_pre_hook(first_call)

    def backward_ended(self) -> None:
        """All gradients have been computed, and possibly clipped."""
        if self._forward_end_ns:
            self._seen.append(("backward", self._forward_end_ns, time.monotonic_ns()))
        self._forward_end_ns = 0

    def _forget(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
            self._waiting = None
