"""What ``hvdrun doctor`` runs on each host: it tells about the host, then sends and receives as it is told.

Run as ``python -I - `` with this text on standard input, so a host needs no hvdlite to be examined. Standard library only.
*Wire format*: a line of JSON each way on standard output and input: first the facts, then an answer to each order.
"""

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time

_LIBRARIES = ("hvdlite", "mpi4py", "numpy", "numba", "torch")
_PIECE = bytes(1 << 16)


def facts(python):  # type: ignore[no-untyped-def]
    """The host's versions, limits, memory and interfaces."""
    space = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "host": socket.gethostname(), "kernel": os.uname().release, "cpus": len(os.sched_getaffinity(0)),
        "shm_free_bytes": space.f_bavail * space.f_frsize if space else 0,
        "shm_bytes": space.f_blocks * space.f_frsize if space else 0,
        "memlock_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "interfaces": interfaces(), "python": versions(python)}


def versions(python):  # type: ignore[no-untyped-def]
    """What the job's own Python has on this host."""
    code = ("import sys, json\nfrom importlib import metadata\nfound = {'python': sys.version.split()[0]}\n"
            f"for name in {_LIBRARIES!r}:\n    try: found[name] = metadata.version(name)\n    except Exception: pass\n"
            "try:\n    import mpi4py; mpi4py.rc.initialize = False\n    from mpi4py import MPI\n"
            "    found['MPI'] = '%s %s' % (MPI.get_vendor()[0], '.'.join(map(str, MPI.get_vendor()[1])))\n"
            "except Exception: pass\n"
            "print(json.dumps(found))")
    try:
        done = subprocess.run([python, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        return json.loads(done.stdout.decode().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}


def interfaces():  # type: ignore[no-untyped-def]
    """Name and IPv4 address of each interface that is up."""
    import fcntl
    import struct

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def route(address):  # type: ignore[no-untyped-def]
    """The address, and its interface, from which another is reached."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        own = probe.getsockname()[0]
    return next((name for name, one in interfaces().items() if one == own), own)


def serve(listener):  # type: ignore[no-untyped-def]
    """Take what others send, and tell each how much arrived in which time."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_take, args=(connection,), daemon=True).start()


def _take(connection):  # type: ignore[no-untyped-def]
    with connection:
        connection.settimeout(30)
        total, started_s = 0, 0.0
        try:
            while True:
                piece = connection.recv(1 << 20)
                if piece.endswith(b"E"):
                    total += len(piece)
                    break
                if not piece:
                    return
                if not started_s:
                    started_s = time.monotonic()
                    continue  # the first piece starts the clock
                total += len(piece)
            connection.sendall(json.dumps([total, time.monotonic() - started_s]).encode() + b"\n")
        except OSError:
            pass


def send(address, port, seconds):  # type: ignore[no-untyped-def]
    """Send for so long; tell the rate at which it arrived, in bytes per second, or why not."""
    via = route(address)
    started_s = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=3) as peer:
            latency_s = time.monotonic() - started_s
            peer.settimeout(20)
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                peer.sendall(_PIECE)
            peer.sendall(b"E")
            total, taken_s = json.loads(peer.makefile().readline())
    except (OSError, ValueError) as reason:
        return {"error": str(reason) or type(reason).__name__, "via": via}
    return {"bytes_per_s": total / max(taken_s, 1e-9), "latency_s": latency_s, "via": via}


def main():  # type: ignore[no-untyped-def]
    listener = socket.create_server(("", 0), backlog=64)
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    _say(dict(facts(PYTHON), port=listener.getsockname()[1]))  # type: ignore[name-defined]  # noqa: F821  set before this text
    for line in ORDERS:  # type: ignore[name-defined]  # noqa: F821
        order = json.loads(line)
        if order["do"] == "time":
            _say({"time": time.time()})
        else:
            _say(send(order["address"], order["port"], order["seconds"]))


def _say(message):  # type: ignore[no-untyped-def]
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
