"""What the kernel says of a process, in /proc."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Stat(NamedTuple):
    """Part of proc_pid_stat(5)."""

    state: str
    parent: int
    begin: int  # ticks of a clock, since the boot

    @property
    def alive(self) -> bool:
        """False for a zombie, which has let go of its memory and of what it had open."""
        return self.state not in "ZX"


def stat(pid: int) -> Stat:
    """Of process `pid`. Raises OSError if there is none."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name before may hold anything
    return Stat(fields[0], int(fields[1]), int(fields[19]))
