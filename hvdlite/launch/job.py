"""Job: what the ranks run, where, and how patiently they are ended. Values only; it travels between processes as it is."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class OutputOptions:
    """What becomes of the ranks' output.

    ``prefix``: a template before each line (``{rank} {host} {time}``); None: ``[{rank}] `` on a terminal, else none.
    ``fold``: whether equal lines of several ranks become one; None: where lines have a prefix that tells the rank.
    ``color``: auto, always or never. ``directory``: where each rank's output is kept as well. ``is_raw``: bytes as they come.
    ``holds_tracebacks``: one of a rank that fails is left to the closing box.
    """

    prefix: str | None = None
    fold: bool | None = None
    color: str = "auto"
    directory: str = ""
    is_raw: bool = False
    holds_tracebacks: bool = True


@dataclass(frozen=True)
class Job:
    """One job.

    ``hosts``: the host of each rank; empty: all on this one. ``binds``: each rank gets its part of its host's
    allowed processors; ``sets_threads``: and OMP_NUM_THREADS, by their number; ``gpus``, or those its host has
    (``finds_gpus``): each rank sees one, by local rank.
    ``stdin_rank``: who reads hvdrun's standard input; -1 nobody, -2 every rank.
    *Units*: ``unwind_s`` from the first failure to SIGTERM; ``grace_s`` from there to SIGKILL; ``hang_timeout_s`` without
    progress until the job is ended, 0 never; ``start_timeout_s`` until every rank has started.
    """

    num_ranks: int
    argv: tuple[bytes, ...]
    environment: dict[bytes, bytes]
    directory: bytes
    unwind_s: float = 1.0
    grace_s: float = 5.0
    hosts: tuple[str, ...] = ()
    is_remote: bool = False
    addresses: tuple[str, ...] = ()
    binds: bool = False
    sets_threads: bool = False
    gpus: tuple[str, ...] = ()
    finds_gpus: bool = False
    stdin_rank: int = -1
    start_timeout_s: float = 120.0
    hang_timeout_s: float = 0.0
    output: OutputOptions = field(default_factory=OutputOptions)

    def host(self, rank: int) -> str:
        """The host of a rank, as the user wrote it; empty where all ranks are on this one."""
        return self.hosts[rank] if self.hosts else ""

    def local_rank(self, rank: int) -> int:
        """A rank's place among those of its host."""
        return self.hosts[:rank].count(self.hosts[rank]) if self.hosts else rank

    def local_size(self, rank: int) -> int:
        """How many ranks its host has."""
        return self.hosts.count(self.hosts[rank]) if self.hosts else self.num_ranks
