"""Task: what each rank of ``hvdlite.run`` runs: it calls the function and leaves the result, or how it failed.

Run by path, as ``python task.py DIRECTORY``: the paths to import from are the caller's, which ``call`` brings.
*Wire format*: in DIRECTORY, which is open to its owner only, ``call`` holds two pickles, (paths, arguments of the
program) and (function, args, kwargs); a rank leaves ``result.RANK`` or ``failure.RANK``, each complete once it exists.
"""

from __future__ import annotations

import os
import pickle
import sys


def main() -> None:
    """Serve one rank; what the function raises ends the process as it would end a program."""
    directory = sys.argv[1]
    with open(os.path.join(directory, "call"), "rb") as file:
        sys.path[:], sys.argv[:] = pickle.load(file)
        call = file.read()
    _run(directory, call)


def _run(directory: str, call: bytes) -> None:
    from hvdlite.launch.failure import Failure
    from hvdlite.launch.guard import RANK_NAMES

    rank = int(next(os.environ[name] for name in RANK_NAMES if name in os.environ))
    try:
        function, args, kwargs = pickle.loads(call)
        result = _pickled_result(function(*args, **kwargs), rank)
    except BaseException as error:
        _leave(directory, f"failure.{rank}", pickle.dumps(Failure.of(rank, error)))
        raise
    _leave(directory, f"result.{rank}", result)


def _pickled_result(result: object, rank: int) -> bytes:
    import cloudpickle

    from hvdlite.errors import InvalidRequestError

    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as reason:
        raise InvalidRequestError(
            f"run: the result of rank {rank}, a {type(result).__name__}, cannot be pickled: {reason}: "
            "return plain data") from reason


def _leave(directory: str, name: str, data: bytes) -> None:
    path = os.path.join(directory, name)
    with open(f"{path}.part", "wb") as file:
        file.write(data)
    os.replace(f"{path}.part", path)


if __name__ == "__main__":
    main()
