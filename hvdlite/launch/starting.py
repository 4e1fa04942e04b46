"""Starting: how hvdrun starts the MPI's starter, hears signals meanwhile, and words that a rank could not be started."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hvdlite.launch.channel import unpack
from hvdlite.launch.command import StartCommand
from hvdlite.launch.job import Job
from hvdlite.launch.process import die_with_parent

#: Signals to hvdrun that end the job, and those that only pass. SIGQUIT asks where the ranks are.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSING = (signal.SIGUSR1, signal.SIGUSR2)
_NOT_FOUND = frozenset((2, 20))  # ENOENT, ENOTDIR


def start(command: StartCommand) -> subprocess.Popen[bytes]:
    """Start the starter; what it says itself comes on its ``stdout``. Raises: OSError."""
    environment = {os.fsencode(name): os.fsencode(value) for name, value in command.environment.items()}
    own = {os.fsencode(name): os.fsencode(value) for name, value in command.own_environment.items()}
    hvdrun_pid = os.getpid()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        die_with_parent(signal.SIGTERM, hvdrun_pid)

    # Each guard is a connection here; the ranks get the limit that the user has.
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    process = subprocess.Popen(
        command.argv, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**own, **environment, **command.caller, **own},  # its own first: Hydra 5.0 does not hand the last one on
        stdin=subprocess.DEVNULL,  # a starter reads it for rank 0, and so eats the input of a surrounding shell loop
        start_new_session=True,  # a terminal's Ctrl-C reaches hvdrun only, which passes it on in order
        preexec_fn=prepare)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process


def not_started(message: dict[str, Any], job: Job) -> tuple[str, int]:
    """Word the error, and choose the code, that a shell gives when it cannot run a command."""
    program, what = os.fsdecode(job.argv[0]), unpack(message["what"])
    if what == job.directory and what != job.argv[0]:
        return f"directory {os.fsdecode(what)!r} cannot be entered: {message['text']}: start hvdrun elsewhere", 126
    if isinstance(message["errno"], int) and message["errno"] in _NOT_FOUND:
        return f"command {program!r} not found: no such program on the PATH: check its spelling or give its path", 127
    return f"command {program!r} cannot be run: {message['text']}: is it an executable file, with a #! line?", 126


@contextmanager
def signals_on_pipe() -> Iterator[int]:
    """Signals of this process as bytes on a pipe; a signal that was ignored (nohup) stays so."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    old_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    caught = (signal.SIGCHLD, *ENDING, *PASSING, signal.SIGQUIT)
    numbers = [n for n in caught if n == signal.SIGCHLD or signal.getsignal(n) != signal.SIG_IGN]
    old = {number: signal.signal(number, _note) for number in numbers}
    try:
        yield read_fd
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_fd)
        os.close(read_fd)
        os.close(write_fd)


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: that a handler exists makes Python write the number to the pipe."""
