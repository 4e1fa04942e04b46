"""Remote shell: what starters take for ssh; runs ssh as the user's options say, and tells hvdrun how far it came.

Run by path, as ``python -I -S remote.py DIRECTORY [options] HOST COMMAND ...``. The directory is hvdrun's private one: it
holds ``hosts.json`` (what each name stands for), and gets ``stage.HOST`` and, where ssh ends too soon, ``failed.HOST``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

if not __package__:  # run by path: the standard library stays first, so nothing beside hvdlite can shadow it
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from hvdlite.launch.process import die_with_parent

HOSTS = "hosts.json"
#: What ssh says of itself when it is asked to, and the stage that begins there.
_STAGES = (
    (re.compile(rb"debug1: Connecting to"), "connecting to its ssh server"),
    (re.compile(rb"debug1: Connection established"), "ssh handshake"),
    (re.compile(rb"debug1: Authenticating to"), "ssh authentication"),
    (re.compile(rb"Authenticated to|debug1: Authentication succeeded"), "ssh session"),
    (re.compile(rb"debug1: Sending command"), "starting the starter's daemon"),
)
#: More that ssh says only because it is asked to.
_CHATTER = re.compile(
    rb"debug\d: |OpenSSH_|Authenticated to |Transferred: |Bytes per second: |Authenticating to |Warning: Permanently added")


def main() -> int:
    """Run ssh to its end; its exit code is this one's."""
    directory, *words = sys.argv[1:]
    options = []
    while words and words[0].startswith("-"):
        options.append(words.pop(0))
    name, command = words[0], words[1:]
    with open(os.path.join(directory, HOSTS), encoding="utf-8") as file:
        hosts: dict[str, Any] = json.load(file)
    host = hosts.get(name, {"target": name, "name": name, "argv": ["ssh"]})
    argv = [*host["argv"], "-v", *options, host["target"], *command]
    parent_pid, pid = os.getppid(), os.getpid()
    die_with_parent(signal.SIGTERM, parent_pid)
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, preexec_fn=lambda: die_with_parent(signal.SIGKILL, pid))
    assert process.stderr is not None
    stage, said = "starting ssh", b""
    for line in process.stderr:
        for pattern, words_of_stage in _STAGES:
            if pattern.match(line):
                stage = words_of_stage
                _note(directory, f"stage.{host['name']}", stage)
        if not _CHATTER.match(line):
            said = line
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
    code = process.wait()
    if code:
        text = said.decode(errors="replace").strip()
        _note(directory, f"failed.{host['name']}", f"{stage} failed (exit code {code}){': ' + text if text else ''}")
    return code if code >= 0 else 128 - code


def _note(directory: str, name: str, text: str) -> None:
    path = os.path.join(directory, name.replace("/", "_"))
    try:
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{path}.part", path)
    except OSError:
        pass  # hvdrun has gone


def read_note(directory: str, kind: str, host: str) -> str:
    """What was noted of a host: its ``stage``, or how it ``failed``; empty for nothing."""
    try:
        with open(os.path.join(directory, f"{kind}.{host}".replace("/", "_")), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
