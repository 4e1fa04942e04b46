"""The process in which ``hvdlite.run`` supervises its job, as hvdrun does in its own.

A process of its own, because supervising needs the main thread's signals and forks, and the caller may be any thread
of a program that has many. Run by path, as ``python -I -S run_supervisor.py CALLER_PID ANSWER_FD``.
*Guarantees*: the job ends when the caller's process, or the thread of it that waits, ends; then nothing is left.
*Wire format*: on standard input one pickle, (Job, StartCommand, directory of the socket, directory of the call); on the
answer's descriptor the pickled Outcome. Nothing arrives there when this process was killed.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys

if not __package__:  # run by path: the standard library stays first, so nothing beside hvdlite can shadow it
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from hvdlite.launch.channel import remove
from hvdlite.launch.process import die_with_parent
from hvdlite.launch.supervisor import run_job


def main() -> None:
    """Run one job and answer how it ended."""
    caller_pid, answer_fd = map(int, sys.argv[1:])
    die_with_parent(signal.SIGTERM, caller_pid)
    job, command, socket_directory, call_directory = pickle.load(sys.stdin.buffer)
    outcome = run_job(job, command, socket_directory)
    if os.getppid() != caller_pid:  # nobody else is left to do it
        remove(socket_directory)
        shutil.rmtree(call_directory, ignore_errors=True)
        return
    with open(answer_fd, "wb") as answer:
        pickle.dump(outcome, answer)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before the job started; afterwards the supervisor has the signals
        sys.exit(130)
