"""Gpus: a rank's GPU, and over which plane its tensors travel: NCCL, or MPI through host memory.

The ranks of a process set agree on it when the first bucket of GPU tensors comes to them, and stay with it: NCCL, if every rank
has CuPy, numba-cuda, NCCL of one version and a GPU of its own. Nothing is imported before the first GPU tensor.

*Between hosts* it is NCCL too. Where it cannot join them, because its versions differ from host to host or it does not connect,
and where that is asked for, dense allreduces go over NCCL within hosts and over the host's plane between them (``Way.by_hosts``),
if hosts hold equally many ranks, more than one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.backoff import LONGEST_TRANSFER_SLEEP_S, sleep_s
from hvdlite.dataplane.base import DataPlane
from hvdlite.dataplane.device import Device, DeviceArray, Event
from hvdlite.dataplane.nccl import NcclPlane
from hvdlite.errors import InvalidRequestError, TransportError, UnavailableError, format_ranks

_log = logging.getLogger("hvdlite")

#: How much a rank has, as it tells the others.
_NOTHING, _DEVICE, _NCCL = range(3)


def open_cuda(index: int) -> Device:
    """The Device of a real GPU, counted round where there are fewer: a local rank may see only one. Raises: UnavailableError."""
    from hvdlite.dataplane.cuda import CudaDevice, num_gpus

    return CudaDevice(index % max(1, num_gpus()))


def load_nccl() -> tuple[Any, Callable[[], str]]:
    """CuPy's NCCL, and what tells of its last failure. Raises: UnavailableError."""
    from hvdlite.dataplane import cuda

    return cuda.load_nccl()


@dataclass(frozen=True)
class Way:
    """How a process set's GPU tensors travel: over ``nccl``, else over the host's plane.

    ``in_segments``: whether every rank copies through pinned memory, so that they may do it piece by piece. ``by_hosts``: NCCL's
    plane of this rank's host, and the host's plane of the ranks of its place in all hosts, where dense allreduces take that way.
    """

    nccl: NcclPlane | None
    in_segments: bool
    host: DataPlane
    by_hosts: tuple[NcclPlane, DataPlane] | None = None


class Gpus:
    """*Threads*: ``device`` from any, the rest from the background thread only; ``abort`` also from one that takes over."""

    def __init__(
        self, setting: str = "auto", default_index: int = 0, open_device: Callable[[int], Device] = open_cuda,
        load: Callable[[], tuple[Any, Callable[[], str]]] = load_nccl, *, hierarchical: bool = False,
    ) -> None:
        """``setting``: auto, nccl or mpi. ``default_index``: the GPU of a rank that never had a tensor of its own on one.
        ``hierarchical``: whether dense allreduces shall go over MPI between hosts though NCCL joins them."""
        self._setting, self._default_index, self._hierarchical = setting, default_index, hierarchical
        self._open, self._load = open_device, load
        self._lock = threading.Lock()  # guards the next two
        self._device: Device | None = None
        self._why_none = ""
        self._ways: dict[int, Way] = {}
        self._levels: dict[int, tuple[NcclPlane, NcclPlane] | None] = {}
        self._loaded: tuple[Any, Callable[[], str]] | None = None
        self._scratch: DeviceArray | None = None
        self._said: set[str] = set()

    def require(self) -> None:
        """Hold an explicit choice of NCCL to what is here. Raises: UnavailableError."""
        if self._setting == "nccl":
            try:
                self._load()
                self._open(self._default_index)  # not kept: the first tensor says which GPU it is to be
            except UnavailableError as reason:
                raise UnavailableError(
                    f"NCCL was asked for (HVDLITE_GPU_PLANE=nccl) and cannot be had: {reason}: install the extra, "
                    "pip install hvdlite[gpu], on a machine with a GPU, or leave the setting at auto") from reason

    def device(self, index: int) -> Device | None:
        """This rank's GPU, which is the first one that it has a tensor on; None where its framework has to copy.

        Raises: InvalidRequestError for another GPU.
        """
        device = self._opened(index)
        if device is not None and device.index != index:
            raise InvalidRequestError(
                f"a tensor is on GPU {index}, but this rank works on GPU {device.index}: use one GPU in each process")
        return device

    def _opened(self, index: int) -> Device | None:
        with self._lock:
            if self._device is None and not self._why_none:
                try:
                    self._device = self._open(index)
                except UnavailableError as reason:
                    self._why_none = str(reason)
            return self._device

    @property
    def opened(self) -> Device | None:
        """The device, if there has been need of it."""
        return self._device

    def way(self, process_set_id: int, host: DataPlane) -> Way:
        """How the set's GPU tensors travel. Collective over ``host``, the set's plane for host memory, when it is new.

        Raises: TransportError, where NCCL was asked for and cannot be had.
        """
        known = self._ways.get(process_set_id)
        if known is None:
            known = self._ways[process_set_id] = self._agree(host)
        return known

    def _agree(self, host: DataPlane) -> Way:
        self._opened(self._default_index)
        nccl: Any = None
        last_error: Callable[[], str] = str
        level, version, reason = _NOTHING, 0, self._why_none
        if self._device is not None:
            level, reason = _DEVICE, ""
            try:
                if self._setting != "mpi":
                    nccl, last_error = self._load()
                    level, version = _NCCL, int(nccl.get_version())
            except (UnavailableError, RuntimeError) as error:
                reason = str(error)
        identity = 0 if self._device is None else self._device.identity
        everyone = host.exchange_sizes(
            [level, version, identity, self._setting == "nccl", self._setting == "mpi", self._hierarchical])
        levels, versions, identities, wanted, refused, hierarchical = everyone.T.tolist()
        why = "" if min(levels) == _NCCL else "it is switched off" if any(refused) else _worded(levels, reason, host.rank)
        doubles = [rank for rank, one in enumerate(identities) if identities.count(one) > 1]
        if not why and doubles and not any(wanted):  # asked for, NCCL itself shall say whether it can
            why = f"{format_ranks(doubles)} of the set share a GPU"
        plane, parts, apart = None, None, ""
        if not why:
            self._loaded = nccl, last_error
            parts = self._parts(host, version)
            may_fail = parts is not None and not any(wanted)
            if len(set(versions)) > 1:
                apart = f"versions differ: {', '.join(f'rank {rank} has {one}' for rank, one in enumerate(versions))}"
            else:
                try:
                    plane = self._connect(host, host)
                except TransportError as error:
                    if not may_fail:
                        raise
                    apart = str(error)
            why = "" if may_fail else apart
        if any(hierarchical) and parts is None and host.size > 1:
            self._say(host.rank, logging.WARNING,
                      f"{host.size} ranks' allreduces of GPU tensors are not hierarchical, which was asked for: "
                      + (why or "it takes several hosts with equally many ranks, more than one, and one NCCL in each"))
        if why and any(wanted):
            raise TransportError(f"NCCL was asked for and cannot be had: {why}: pip install hvdlite[gpu] on every rank's "
                                 "machine, or set HVDLITE_GPU_PLANE=auto")
        if why:
            self._say(host.rank, logging.WARNING if not any(refused) else logging.INFO,
                      f"GPU tensors go through host memory and MPI, not over NCCL: {why}")
            return Way(None, min(levels) >= _DEVICE, host)
        by_hosts = (self._connect(host, parts[0]), parts[1]) if parts is not None and (apart or any(hierarchical)) else None
        if apart:
            self._say(host.rank, logging.WARNING, "allreduces of GPU tensors go over NCCL within hosts and MPI between them, all "
                                                  f"else through host memory: NCCL does not join the hosts: {apart}")
        else:
            self._say(host.rank, logging.INFO, f"GPU tensors go over NCCL {version}, {host.size} ranks"
                      + (", dense allreduces over MPI between hosts" if by_hosts else ""))
        return Way(plane, True, host, by_hosts)

    def _parts(self, host: DataPlane, version: int) -> tuple[DataPlane, DataPlane] | None:
        """As ``DataPlane.levels``; None also where NCCL is not the same throughout each host, or combines other dtypes elsewhere.

        Collective, and the same decision on every rank.
        """
        parts = host.levels()
        if parts is None:
            return None
        assert self._loaded is not None
        versions = parts[0].exchange_sizes([version])
        is_alike, combines = host.exchange_sizes([len(np.unique(versions)) == 1, hasattr(self._loaded[0], "NCCL_BFLOAT16")]).T
        return parts if is_alike.all() and len(np.unique(combines)) == 1 else None

    def _connect(self, host: DataPlane, ranks: DataPlane) -> NcclPlane:
        """NCCL's plane of ``ranks``, some or all of ``host``. Collective over ``host``.

        Raises: TransportError, on every rank, where some do not connect.
        """
        assert self._loaded is not None and self._device is not None
        nccl, last_error = self._loaded
        plane, failure = None, None
        try:
            plane = NcclPlane(nccl, ranks, self._device, last_error=last_error)
        except TransportError as error:
            failure = error
        failed = np.flatnonzero(host.exchange_sizes([plane is None])[:, 0]).tolist()
        if plane is not None and not failed:
            return plane
        if plane is not None:
            plane.abort("others could not connect")
        raise failure or TransportError(f"NCCL does not connect {format_ranks(failed)} of the set: they tell why")

    def levels(self, process_set_id: int) -> tuple[NcclPlane, NcclPlane] | None:
        """NCCL's planes within this rank's host and between hosts, for a set that goes over NCCL; None as in ``DataPlane``.

        Collective over the set when they are new.
        """
        if process_set_id not in self._levels:
            way = self._ways[process_set_id]
            parts = way.host.levels()
            self._levels[process_set_id] = None if parts is None else (
                self._connect(way.host, parts[0]) if way.by_hosts is None else way.by_hosts[0],
                self._connect(way.host, parts[1]))
        return self._levels[process_set_id]

    def _say(self, rank: int, level: int, text: str) -> None:
        """Once in a job, and by one rank."""
        if rank == 0 and text not in self._said:
            self._said.add(text)
            _log.log(level, "%s", text)

    def note(self, host: DataPlane, text: str) -> None:
        """Tell once what is not done on the GPU."""
        self._say(host.rank, logging.INFO, text)

    def scratch(self, num_bytes: int) -> DeviceArray:
        """Memory of the device, overwritten by the next bucket; in the order of its stream."""
        assert self._device is not None
        if self._scratch is None or len(self._scratch) < num_bytes:
            self._device.keep(self._scratch)
            self._scratch = self._device.allocate(num_bytes)
        return self._scratch[:num_bytes]

    def wait(self, event: Event) -> None:
        """Block until the stream has come to an event, which it may never do where NCCL fails: it is asked meanwhile.

        Raises: TransportError, where it has failed or another thread has aborted it, which lets the stream go on as well.
        """
        planes, began_s, is_done = self._planes(), time.monotonic(), False
        while not is_done:
            is_done = event.is_done()
            for plane in planes:
                plane.require()
            if not is_done:
                time.sleep(sleep_s(time.monotonic() - began_s, LONGEST_TRANSFER_SLEEP_S))

    def poll(self) -> None:
        """Ask all communicators for errors, and let go of what the stream has passed. Raises: TransportError."""
        if self._device is None:
            return  # asked in every cycle, mostly where there are no GPUs
        for plane in self._planes():
            plane.poll()
        self._device.poll()

    def close(self, process_set_id: int | None = None) -> None:
        """Give up the planes of a set, or of all; every rank of the set does so in the same cycle."""
        for plane in self._planes(process_set_id):
            plane.close()
        for known in [process_set_id] if process_set_id is not None else list(self._ways):
            self._ways.pop(known, None)
            self._levels.pop(known, None)

    def abort(self, reason: str) -> None:
        """End what waits on the stream."""
        for plane in self._planes():
            plane.abort(reason)

    def _planes(self, process_set_id: int | None = None) -> list[NcclPlane]:
        """Of a set, or of all."""
        ways, levels = list(self._ways.items()), list(self._levels.items())  # single steps: another thread may abort
        found = [(known, one) for known, way in ways for one in (way.nccl, way.by_hosts and way.by_hosts[0])]
        found += [(known, one) for known, two in levels for one in two or ()]
        return list(dict.fromkeys(one for known, one in found if one is not None and process_set_id in (None, known)))


def _worded(levels: list[int], reason: str, rank: int) -> str:
    """Whom NCCL lacks, and what this rank lacks."""
    lacking = [other for other, level in enumerate(levels) if level < _NCCL]
    own = f": {reason}" if rank in lacking and reason else ""
    return f"{format_ranks(lacking)} of the set cannot use it{own}"
