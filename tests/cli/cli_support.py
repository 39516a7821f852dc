"""Commands in processes of their own, and what is needed to watch them come and go."""

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from children import as_a_child

TIMEOUT = 120.0

_WORKER = "interlock.pd.worker"


class Command:
    """`interlock ARGUMENTS` in a process of its own, whose children are watched. streams: other places than pipes, as for `Popen`."""

    def __init__(self, arguments: list[str], **streams: Any) -> None:
        command = [sys.executable, "-P", "-m", "interlock", *arguments]
        places = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        self.process = subprocess.Popen(as_a_child(command), text=True, **places)

    def read_line(self) -> str:
        """The next line of standard output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def children(self) -> dict[str, int]:
        """The engine processes that are there now, by name."""
        return engine_children(self.process.pid)

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end: exit status, standard output, standard error."""
        out, err = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, out, err


def wait_until_gone(pidfds: list[int]) -> bool:
    """Whether all processes behind `pidfds` end within the time that a test has."""
    for pidfd in pidfds:
        ready, _, _ = select.select([pidfd], [], [], TIMEOUT)
        os.close(pidfd)
        if not ready:
            return False
    return True


def engine_children(parent: int) -> dict[str, int]:
    """The engine processes that process `parent` has now, by name. A child that only just came still has its parent's words, and one
    that ended has none: neither counts."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            words = _words_of_child(entry, parent)
            if _WORKER in words:
                found[words[words.index(_WORKER) + 1]] = int(entry.name)
    return found


def _words_of_child(entry: Path, parent: int) -> list[str]:
    """The command line of the process at `entry`, without words where it is no child of `parent` or is gone by now."""
    try:
        if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) != parent:
            return []
        return (entry / "cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
