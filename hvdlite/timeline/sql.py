"""A recorded job as tables of SQLite, for questions that no report answers."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from hvdlite.timeline.blame import find_arrivals, find_blame
from hvdlite.timeline.job import Job
from hvdlite.timeline.phase import LANES, REASONS, Phase, lane
from hvdlite.timeline.ring import TimelineError
from hvdlite.timeline.steps import PARTS, find_steps

#: Times in ns from the job's first record, on rank 0's clock.
SCHEMA = f"""\
create table ranks (rank integer primary key, host text, pid integer, clock_error_ns integer, lost integer, torn integer);
create table spans (rank integer, thread text, lane text, phase text, name text, start_ns integer, end_ns integer, dur_ns integer,
  bytes integer, operation integer, plan integer, count integer, process_set integer, reason text, value real);
create table steps (step integer, rank integer, start_ns integer, end_ns integer,
  {', '.join(f'{one}_ns integer' for one in PARTS)}, caused_ns integer);
"""


def as_database(job: Job, path: str = ":memory:") -> sqlite3.Connection:
    """Fill a new database. Raises: TimelineError where ``path`` holds one already or cannot be written."""
    try:
        database = sqlite3.connect(path)
        database.executescript(SCHEMA)
    except sqlite3.Error as error:
        raise TimelineError(f"{path}: {error}: name a file that does not exist yet") from error
    database.executemany("insert into ranks values (?, ?, ?, ?, ?, ?)", [
        (one.rank, one.host, one.header["pid"], round(one.error_ns), one.lost, one.torn) for one in job.ranks])
    phases = {int(one): (LANES[lane(one)], one.name) for one in Phase}
    for rank in job.ranks:
        fields = rank.records[["phase", "name", "start_ns", "end_ns", "num_bytes", "operation", "plan", "count", "process_set",
                               "detail", "value"]]
        database.executemany(f"insert into spans values ({', '.join('?' * 15)})", (
            (rank.rank, rank.threads[thread], *phases[phase], _text(job.names[name]), start, end, end - start, size, *numbers,
             REASONS[detail] if phase == Phase.BUCKET and detail < len(REASONS) else None, value)
            for thread, (phase, name, start, end, size, *numbers, detail, value) in zip(
                rank.thread.tolist(), fields.tolist(), strict=True)))
    try:
        steps = find_steps(job)
    except TimelineError:
        steps = None  # nothing tells of steps: their table stays empty
    if steps is not None:
        cost = find_blame(job, steps, find_arrivals(job)).cost
        database.executemany(f"insert into steps values ({', '.join('?' * (5 + len(PARTS)))})", [
            (int(number), rank.rank, int(steps.starts[row, k]), int(steps.ends[row, k]),
             *(int(steps.parts[one][row, k]) for one in PARTS), round(float(cost[k, row])))
            for k, number in enumerate(steps.numbers) for row, rank in enumerate(job.ranks)])
    database.commit()
    return database


def answer(database: sqlite3.Connection, query: str) -> tuple[list[str], list[Sequence[Any]]]:
    """Names of the columns, and rows. Raises: TimelineError for what SQLite does not understand."""
    try:
        cursor = database.execute(query)
        return [one[0] for one in cursor.description or ()], cursor.fetchall()
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise TimelineError(f"sql: {error}: the tables are\n{SCHEMA}") from error


def _text(name: str) -> str:
    """Names come from programs: what is no character is replaced."""
    return name.encode("utf-8", "replace").decode()
