"""hvdrun doctor: examines hosts and the network between them before a job does, and says how to mend what is wrong.

Each host is asked over ssh for its facts; then each sends to each other, one pair after another, so that nothing disturbs
what is measured. Every wait has a name and a deadline.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdlite.errors import ConfigError
from hvdlite.launch import doctor_probe, options
from hvdlite.launch.hosts import Host, parse_hostfile, parse_hosts
from hvdlite.launch.network import SshOptions, is_this_host, resolve

#: Shared memory below which MPI's segments may not fit. Chosen: 64 MB is Docker's default and known to be too little.
MIN_SHM_BYTES = 256 << 20
MIN_OPEN_FILES = 1024
#: Clocks that differ by more make logs and timelines hard to compare. Chosen.
MAX_CLOCK_OFFSET_S = 1.0
#: A pair this much slower than the fastest is marked. Chosen.
SLOW_SHARE = 0.5
_MUST_MATCH = ("python", "hvdlite", "mpi4py", "MPI", "numpy")
_TRANSFER_TIMEOUT_S = 25.0


@dataclass
class Patient:
    """A host under examination. ``error``: why it could not be asked."""

    host: Host
    address: str
    process: subprocess.Popen[bytes] | None = None
    answers: queue.Queue[dict[str, Any] | None] = field(default_factory=queue.Queue)
    facts: dict[str, Any] = field(default_factory=dict)
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0
    error: str = ""

    def order(self, **what: Any) -> None:
        """Tell it to do something."""
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Its next answer; None when there is none in time."""
        try:
            return self.answers.get(timeout=timeout_s)
        except queue.Empty:
            return None


def main(argv: Sequence[str]) -> int:
    """Run ``hvdrun doctor``; 0 when all is well, else 1."""
    parser = argparse.ArgumentParser(prog="hvdrun doctor", description="Examine hosts and the network between them.")
    parser.add_argument("-H", "--hosts", default="", help="h1,user@h2,[fd00::1],n[01-03]")
    parser.add_argument("-hostfile", "--hostfile", default="", metavar="FILE")
    parser.add_argument("-p", "--ssh-port", type=options.count, default=None)
    parser.add_argument("-i", "--ssh-identity-file", default="")
    parser.add_argument("--ssh-args", default="")
    parser.add_argument("--timeout", type=options.seconds, default=30.0, metavar="S", help="for each host to answer (default 30)")
    parser.add_argument("--seconds", type=options.seconds, default=0.5, metavar="S", help="of each transfer (default 0.5)")
    parser.add_argument("--json", action="store_true", help="what was found as JSON")
    arguments = parser.parse_args(options.joined(parser, argv))
    if arguments.hostfile:
        try:
            with open(arguments.hostfile, encoding="utf-8") as file:
                hosts = parse_hostfile(file.read(), arguments.hostfile)
        except OSError as reason:
            raise ConfigError(f"{arguments.hostfile}: cannot be read: {reason.strerror}") from None
    else:
        hosts = parse_hosts(arguments.hosts or "localhost")
    ssh = SshOptions(arguments.ssh_port, arguments.ssh_identity_file, arguments.ssh_args, arguments.timeout)
    patients = _admit(hosts, ssh)
    try:
        _ask_facts(patients, arguments.timeout)
        pairs = _transfers(patients, arguments.seconds)
    finally:
        for patient in patients:
            if patient.process is not None:
                patient.process.kill()
                patient.process.wait()
    findings = find(patients, pairs)
    if arguments.json:
        print(json.dumps({
            "hosts": [{"host": one.host.name, "error": one.error, "clock_offset_s": one.clock_offset_s, **one.facts}
                      for one in patients],
            "pairs": [{"from": a, "to": b, **result} for (a, b), result in pairs.items()], "findings": findings}, indent=2))
    else:
        print(report(patients, pairs, findings, _paints()))
    return 1 if findings else 0


def _admit(hosts: Sequence[Host], ssh: SshOptions) -> list[Patient]:
    others = [host for host in hosts if not is_this_host(host.name)]
    addresses = resolve(others, ssh, lambda text: None)
    with open(doctor_probe.__file__, encoding="utf-8") as file:
        source = file.read()
    patients = []
    for host in hosts:
        patient = Patient(host, addresses.get(host) or host.name)
        # The probe's text comes first on standard input, its length before it; what follows are orders.
        loader = ("import sys; f = sys.stdin; n = int(f.readline()); text = f.read(n); "
                  "exec(compile(text, 'probe', 'exec'), globals()); ORDERS = iter(f.readline, ''); main()")
        text = f"{source}\nPYTHON = {sys.executable!r}\n"
        if is_this_host(host.name):
            argv = [sys.executable, "-I", "-c", loader]
        else:
            # Whatever Python the host has can run the probe; that the job's own is missing is a finding, not the end.
            remote = f"P={_quoted(sys.executable)}; [ -x \"$P\" ] || P=python3; exec \"$P\" -I -c {_quoted(loader)}"
            argv = [*ssh.argv(), host.target, remote]
        try:
            patient.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as reason:
            patient.error = f"{argv[0]} cannot be run: {reason.strerror}"
            patients.append(patient)
            continue
        assert patient.process.stdin is not None
        try:
            patient.process.stdin.write(f"{len(text)}\n{text}".encode())
            patient.process.stdin.flush()
        except OSError:
            pass  # its end says why
        threading.Thread(target=_read, args=(patient,), daemon=True).start()
        patients.append(patient)
    return patients


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)


def _read(patient: Patient) -> None:
    assert patient.process is not None and patient.process.stdout is not None
    for line in patient.process.stdout:
        try:
            patient.answers.put(json.loads(line))
        except ValueError:
            continue  # what a login script printed
    patient.answers.put(None)


def _ask_facts(patients: Sequence[Patient], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    for patient in patients:
        if patient.error:
            continue
        started_s = time.monotonic()
        answer = patient.answer(max(0.1, deadline_s - started_s))
        if answer is None:
            patient.error = _why_silent(patient, timeout_s)
            continue
        patient.facts = answer
        _compare_clock(patient)


def _compare_clock(patient: Patient) -> None:
    """Of several questions the one that was answered fastest tells the offset best."""
    best = float("inf")
    for _ in range(3):
        asked = time.time()
        patient.order(do="time")
        answer = patient.answer(5.0)
        answered = time.time()
        if answer is not None and answered - asked < best:
            best = answered - asked
            patient.clock_offset_s, patient.clock_error_s = answer["time"] - (asked + answered) / 2, best / 2


def _why_silent(patient: Patient, timeout_s: float) -> str:
    process = patient.process
    assert process is not None and process.stderr is not None
    if process.poll() is None:
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            return f"waiting for {patient.host.name}: ssh gave up after {timeout_s:g} s"
    text = process.stderr.read().decode(errors="replace").strip().splitlines()
    return f"ssh: exit code {process.returncode}: {text[-1] if text else 'no word'}"


def _transfers(patients: Sequence[Patient], seconds: float) -> dict[tuple[str, str], dict[str, Any]]:
    """Each host to each other, one after another; no time is lost on hosts that did not answer."""
    pairs = {}
    present = [one for one in patients if not one.error]
    for sender in present:
        for receiver in present:
            if sender is receiver:
                continue
            try:
                sender.order(do="send", address=receiver.address, port=receiver.facts["port"], seconds=seconds)
                answer = sender.answer(_TRANSFER_TIMEOUT_S + seconds)
            except OSError:
                answer = None
            pairs[sender.host.name, receiver.host.name] = answer or {"error": "no answer", "via": ""}
    return pairs


def find(patients: Sequence[Patient], pairs: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """What is wrong, each with its remedy. Pure."""
    findings = [f"{one.host.name}: {one.error}: try ssh {one.host.target} true; keys: ssh-copy-id {one.host.target}"
                for one in patients if one.error]
    present = [one for one in patients if not one.error]
    findings += [text for one in present for text in _of_host(one)]
    for name in _MUST_MATCH:
        seen: dict[str, list[str]] = {}
        for one in present:
            if one.facts["python"]:
                seen.setdefault(one.facts["python"].get(name, "none"), []).append(one.host.name)
        if len(seen) > 1 or ("none" in seen and name != "numpy"):
            told = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in seen.items())
            findings.append(f"{name}: {told}: install the same environment on all hosts, at the same path")
    rates = [result["bytes_per_s"] for result in pairs.values() if "bytes_per_s" in result]
    for (sender, receiver), result in pairs.items():
        if "error" in result:
            via = f"from interface {result['via']}" if result["via"] else "(no route)"
            findings.append(f"{sender} -> {receiver}: cannot connect {via}: {result['error']}: "
                            f"open the firewall between them, or name another interface: --network-interfaces")
        elif result["bytes_per_s"] < SLOW_SHARE * max(rates):
            findings.append(f"{sender} -> {receiver}: {_rate(result['bytes_per_s'])} over {result['via']}, the fastest pair has "
                            f"{_rate(max(rates))}: look at that link: ethtool, cables, another interface")
    return findings


def _of_host(one: Patient) -> list[str]:
    name, facts, found = one.host.name, one.facts, []
    if not facts["python"]:
        found.append(f"{name}: {sys.executable} is not there or does not run: install the same environment at the same path")
    if facts["shm_bytes"] < MIN_SHM_BYTES:
        found.append(f"{name}: /dev/shm has {facts['shm_bytes'] >> 20} MiB: MPI needs more: docker run --shm-size=1g, or "
                     "mount -o remount,size=1g /dev/shm")
    elif facts["shm_free_bytes"] < MIN_SHM_BYTES:
        found.append(f"{name}: /dev/shm has {facts['shm_free_bytes'] >> 20} MiB left of {facts['shm_bytes'] >> 20}: "
                     "remove what dead jobs left there: ls -l /dev/shm")
    if 0 <= facts["nofile"] < MIN_OPEN_FILES:
        found.append(f"{name}: {facts['nofile']} open files are allowed: ulimit -n {MIN_OPEN_FILES}")
    if abs(one.clock_offset_s) > MAX_CLOCK_OFFSET_S + one.clock_error_s:
        found.append(f"{name}: its clock differs by {one.clock_offset_s:+.1f} s: start chronyd or ntpd there")
    return found


def report(patients: Sequence[Patient], pairs: dict[tuple[str, str], dict[str, Any]], findings: Sequence[str],
           paints: bool = False) -> str:
    """The page for people: hosts, the matrix of pairs, what to mend. Pure."""
    red, plain = ("\x1b[31m", "\x1b[0m") if paints else ("", "")
    rows = [["host", "python", "hvdlite", "MPI", "cores", "/dev/shm free", "clock", "interfaces"]]
    for one in patients:
        if one.error:
            rows.append([one.host.name, f"{red}{one.error}{plain}"])
            continue
        facts, versions = one.facts, one.facts["python"]
        rows.append([
            one.host.name, versions.get("python", "MISSING"), versions.get("hvdlite", "MISSING"), versions.get("MPI", "MISSING"),
            str(facts["cpus"]), f"{facts['shm_free_bytes'] >> 20} MiB", f"{1e3 * one.clock_offset_s:+.1f} ms",
            ",".join(name for name in facts["interfaces"] if name != "lo") or "-"])
    widths = [max(len(row[column]) for row in rows if len(row) > column and len(row) == len(rows[0]))
              for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    names = [one.host.name for one in patients if not one.error]
    if len(names) > 1:
        rates = [result["bytes_per_s"] for result in pairs.values() if "bytes_per_s" in result]
        width = max(10, *map(len, names))
        lines += ["", "bandwidth from the row's host to the column's",
                  " ".join(["".ljust(width), *(name.rjust(width) for name in names)])]
        for sender in names:
            cells = []
            for receiver in names:
                result = pairs.get((sender, receiver))
                if result is None:
                    cells.append("-".rjust(width))
                elif "error" in result:
                    cells.append(f"{red}{'BLOCKED'.rjust(width)}{plain}")
                else:
                    text = _rate(result["bytes_per_s"]).rjust(width)
                    cells.append(f"{red}{text}{plain}" if result["bytes_per_s"] < SLOW_SHARE * max(rates) else text)
            lines.append(" ".join([sender.ljust(width), *cells]))
    return "\n".join([*lines, "", *(f"{red}x{plain} {text}" for text in findings)] if findings else [*lines, "", "all is well"])


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"


def _paints() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
