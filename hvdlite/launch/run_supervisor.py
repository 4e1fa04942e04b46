"""The process in which ``hvdlite.run`` supervises its job, as hvdrun does in its own.

A process of its own, because supervising needs the main thread's signals and forks, and the caller may be any thread
of a program that has many. Run by path, as ``python -I -S run_supervisor.py CALLER_PID ANSWER_FD``.
*Guarantees*: the job ends when the caller's process, or the thread of it that waits, ends; then nothing is left.
*Wire format*: on standard input one pickle, (Job, StartCommand, directory of the socket, directory of the call), then its
end once the caller needs neither directory; on the answer's descriptor the pickled Outcome, or nothing when this
process was killed.
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
    """Run one job, answer how it ended, and leave nothing behind."""
    caller_pid, answer_fd = map(int, sys.argv[1:])
    die_with_parent(signal.SIGTERM, caller_pid)
    try:
        job, command, socket_directory, call_directory = pickle.load(sys.stdin.buffer)
    except EOFError:
        return  # the caller thought better of it
    answer = pickle.dumps(run_job(job, command, socket_directory))
    for number in (signal.SIGINT, signal.SIGTERM):  # the latter comes when the caller ends
        signal.signal(number, signal.SIG_IGN)
    try:
        with open(answer_fd, "wb") as file:
            file.write(answer)
    except BrokenPipeError:
        pass  # nobody waits any more
    sys.stdin.buffer.read()  # until the caller has read the results and removed both, or has ended
    remove(socket_directory)
    shutil.rmtree(call_directory, ignore_errors=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before the job started; afterwards the supervisor has the signals
        sys.exit(130)
