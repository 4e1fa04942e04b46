"""Stand-in hosts: network namespaces with an address, a name and an ssh server each, joined by a bridge. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def can_make_hosts() -> bool:
    """Whether this machine allows it."""
    if os.geteuid() != 0 or not shutil.which("ip") or not os.path.exists(SSHD):
        return False
    made = subprocess.run(["ip", "netns", "add", f"si-try-{os.getpid()}"], capture_output=True)
    subprocess.run(["ip", "netns", "delete", f"si-try-{os.getpid()}"], capture_output=True)
    return made.returncode == 0


def _sh(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """``h1`` to ``hN``; commands run on ``h1``. A context manager: leaving it removes everything."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._id = os.getpid() % 100_000
        self._subnet = f"10.78.{os.getpid() % 250}"
        self._servers: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="si-"))
        self.ssh_args = (f"-i {self._folder}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "
                         "-o IdentitiesOnly=yes")

    def namespace(self, host: int) -> str:
        return f"si{self._id}h{host}"

    def port(self, host: int) -> str:
        """The bridge's end of a host's link."""
        return f"si{self._id}p{host}"

    def address(self, host: int) -> str:
        return f"{self._subnet}.{host}"

    def __enter__(self) -> Hosts:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _build(self) -> None:
        bridge = f"si{self._id}b"
        _sh("ip", "link", "add", bridge, "type", "bridge")
        _sh("ip", "link", "set", bridge, "up")
        names = "127.0.0.1 localhost\n" + "".join(f"{self.address(host)} h{host}\n" for host in range(1, self.count + 1))
        _sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self._folder}/key")
        for host in range(1, self.count + 1):
            space, port = self.namespace(host), self.port(host)
            hosts_file = Path("/etc/netns") / space / "hosts"  # which ip netns exec shows as /etc/hosts
            hosts_file.parent.mkdir(parents=True, exist_ok=True)
            hosts_file.write_text(names)
            _sh("ip", "netns", "add", space)
            _sh("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _sh("ip", "link", "set", port, "master", bridge, "up")
            for words in (["link", "set", "lo", "up"], ["addr", "add", f"{self.address(host)}/24", "dev", "eth0"],
                          ["link", "set", "eth0", "up"]):
                _sh("ip", "-n", space, *words)
            self._start_server(host)
        self._await_servers()

    def _start_server(self, host: int) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        config = self._folder / f"sshd{host}"
        config.write_text(
            f"ListenAddress {self.address(host)}\nHostKey {self._folder}/key\nAuthorizedKeysFile {self._folder}/key.pub\n"
            "StrictModes no\nPidFile none\nPermitRootLogin yes\nPasswordAuthentication no\nUsePAM no\nMaxStartups 100\n"
            "LogLevel ERROR\n")
        self._servers[host] = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), "unshare", "-u", "sh", "-c",
             f"hostname h{host}; exec {SSHD} -D -e -f {config}"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True)

    def _await_servers(self) -> None:
        deadline_s = time.monotonic() + 20
        for host in range(1, self.count + 1):
            probe = ["ip", "netns", "exec", self.namespace(host), "ssh", *self.ssh_args.split(), "-o", "BatchMode=yes",
                     f"h{host}", "true"]
            while subprocess.run(probe, capture_output=True, stdin=subprocess.DEVNULL).returncode:
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"the ssh server of h{host} does not answer")
                time.sleep(0.1)

    def _remove(self) -> None:
        for server in self._servers.values():
            server.kill()
            server.wait()
        for host in range(1, self.count + 1):
            space = self.namespace(host)
            pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split()
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)
            subprocess.run(["ip", "link", "delete", self.port(host)], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
        subprocess.run(["ip", "link", "delete", f"si{self._id}b"], capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- what goes wrong ---------------------------------------------------------------------------------------

    def shape(self, host: int, rate: str) -> None:
        """Limit a host's link in both directions."""
        shaping = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
        _sh("tc", "qdisc", "replace", "dev", self.port(host), *shaping)
        _sh("tc", "-n", self.namespace(host), "qdisc", "replace", "dev", "eth0", *shaping)

    def unshape(self, host: int) -> None:
        _sh("tc", "qdisc", "delete", "dev", self.port(host), "root")
        _sh("tc", "-n", self.namespace(host), "qdisc", "delete", "dev", "eth0", "root")

    def block(self, sender: int, receiver: int, blocked: bool = True) -> None:
        """Let no packet of one host reach another, as a firewall would."""
        change, target = "add" if blocked else "delete", f"{self.address(receiver)}/32"
        _sh("ip", "-n", self.namespace(sender), "route", change, "unreachable", target)

    def cut(self, host: int, is_cut: bool = True) -> None:
        """Take a host from the network."""
        _sh("ip", "link", "set", self.port(host), "down" if is_cut else "up")

    def pause_server(self, host: int, is_paused: bool = True) -> None:
        """Stop a host's ssh server: connections are accepted by the kernel and never answered."""
        self._servers[host].send_signal(signal.SIGSTOP if is_paused else signal.SIGCONT)

    # -- using them --------------------------------------------------------------------------------------------

    def popen(self, *words: str, **kwargs: object) -> subprocess.Popen[str]:
        """Start a command on ``h1``."""
        argv = ["ip", "netns", "exec", self.namespace(1), "unshare", "-u", "sh", "-c", 'hostname h1; exec "$@"', "sh", *words]
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)

    def run(self, *words: str, timeout_s: float = 60, **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run a command on ``h1`` to its end."""
        with self.popen(*words, **kwargs) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                raise AssertionError(f"not ended after {timeout_s} s:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def left_over(self) -> list[str]:
        """The command lines of what still runs on the hosts, other than their ssh servers."""
        found = []
        for host in range(1, self.count + 1):
            pids = subprocess.run(["ip", "netns", "pids", self.namespace(host)], capture_output=True, text=True).stdout.split()
            for pid in pids:
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if command and "sshd" not in command:
                    found.append(f"h{host}: {command}")
        return found

    def hvdrun(self, *words: object, timeout_s: float = 60, **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run hvdrun on ``h1``."""
        return self.run(*self.hvdrun_argv(*words), timeout_s=timeout_s, **kwargs)

    def hvdrun_argv(self, *words: object) -> list[str]:
        first, *rest = map(str, words)
        own = [first, "--ssh-args", self.ssh_args, *rest] if first == "doctor" else ["--ssh-args", self.ssh_args, first, *rest]
        return [sys.executable, "-m", "hvdlite.launch", *own]
