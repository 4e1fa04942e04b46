"""Python objects from rank to rank. They are pickled: the ranks of a job trust one another, they run the same program."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np

from hvdlite import submission
from hvdlite.message import Collective
from hvdlite.process_set import Members, ProcessSet
from hvdlite.runtime import Runtime, default_runtime
from hvdlite.submission import Submission


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | Members | None = None,
    runtime: Runtime | None = None,
) -> Any:
    """Return global rank ``root_rank``'s object on every rank; what the others pass is ignored.

    Raises: whatever pickling raises, on the root, with nothing submitted; as ``broadcast``.
    """
    runtime = runtime or default_runtime()
    is_root = runtime.topology.rank == root_rank
    payload = _pickled(obj) if is_root else np.empty(0, np.uint8)
    names = ("size", "data") if name is None else (f"{name}.size", f"{name}.data")

    def broadcast(array: np.ndarray, part: str) -> np.ndarray:
        call = Submission(Collective.BROADCAST, array, name=part if name else None, process_set=process_set, runtime=runtime)
        result: np.ndarray = submission.broadcast(call, in_place=True, root_rank=root_rank).wait()
        return result

    size = broadcast(np.array([len(payload)], np.int64), names[0])
    data = broadcast(payload if is_root else np.empty(int(size[0]), np.uint8), names[1])
    return obj if is_root else cloudpickle.loads(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet | Members | None = None, runtime: Runtime | None = None
) -> list[Any]:
    """Return every rank's object, in rank order, on every rank.

    Raises: whatever pickling raises, with nothing submitted; as ``allgather``.
    """
    runtime = runtime or default_runtime()
    payload = _pickled(obj)

    def gather(array: np.ndarray, part: str) -> np.ndarray:
        call = Submission(Collective.ALLGATHER, array, name=f"{name}.{part}" if name else None, process_set=process_set,
                          runtime=runtime)
        result: np.ndarray = submission.allgather(call).wait()
        return result

    ends = np.cumsum(gather(np.array([len(payload)], np.int64), "size"))
    pieces = np.split(gather(payload, "data"), ends[:-1])
    return [cloudpickle.loads(piece.data) for piece in pieces]


def _pickled(obj: Any) -> np.ndarray:
    return np.frombuffer(bytearray(cloudpickle.dumps(obj)), np.uint8)
