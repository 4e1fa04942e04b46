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
        self._waiting, self._returning = _Hook(), _Hook()
        self._seen: list[tuple[str, int, int]] = []
        self._ended_ns = self._began_ns = self._forward_end_ns = 0

    def step_ended(self, marks: Marks, owner: str) -> None:
        """Mark the step and watch for the next one's forward."""
        seen, self._seen = self._seen, []
        marks.step(owner, seen)
        if marks.is_recording:
            self._ended_ns = time.monotonic_ns()
            # Any module's first call after the step is the model's, or of what feeds it.
            self._waiting.set(modules._global_forward_pre_hooks, modules.register_module_forward_pre_hook, self._first_call)
        else:
            self._waiting.remove()

    def backward_ended(self) -> None:
        """All gradients have been computed, and possibly clipped."""
        if self._forward_end_ns:
            self._seen.append(("backward", self._forward_end_ns, time.monotonic_ns()))
        self._forward_end_ns = 0

    def _first_call(self, module: Any, arguments: Any) -> None:
        self._waiting.remove()
        self._began_ns = began_ns = time.monotonic_ns()
        self._seen.append(("input", self._ended_ns, began_ns))
        self._returning.set(module._forward_hooks, module.register_forward_hook, self._returned)

    def _returned(self, module: Any, arguments: Any, result: Any) -> None:
        self._returning.remove()
        self._forward_end_ns = ended_ns = time.monotonic_ns()
        self._seen.append(("forward", self._began_ns, ended_ns))


class _Hook:
    """A hook that comes and goes with every step. torch's ``register`` functions are called once for each place: what they do is
    much for what is left between two steps."""

    def __init__(self) -> None:
        self._place: Any = None
        self._handle: Any = None

    def set(self, place: dict[int, Any], register: Any, hook: Any) -> None:
        """Let ``hook`` be in ``place``, a dictionary of hooks by number, which ``register`` puts it into."""
        if place is self._place:
            place[self._handle.id] = hook
            return
        self.remove()
        self._handle = register(hook)
        self._place = self._handle.hooks_dict_ref()

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
