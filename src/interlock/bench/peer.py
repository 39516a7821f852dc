"""A peer in a process of its own: loaded once, idle between requests, so that its runs can alternate with ours."""

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from interlock.core.errors import InterlockError

PYTHON_VARIABLE = "INTERLOCK_PEERS_PYTHON"
DEFAULT_PYTHON = Path(".venv-peers/bin/python")
REMEDY = f"run 'make bench-peers', or unset {PYTHON_VARIABLE}"
SCRIPT = Path(__file__).with_name("peer_llamacpp.py")


class PeerProcess:
    """llama.cpp with `model` and `threads` threads. `name` and `version` are its own words. Raises InterlockError if it cannot be started or
    has ended."""

    def __init__(self, python: Path, model: str, threads: int) -> None:
        command = [str(python), str(SCRIPT), model, str(threads)]
        # In a group of its own, so that an interrupt from a terminal reaches us alone; it ends when its input closes.
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
        except OSError as error:
            raise InterlockError(f"the peer's Python {str(python)!r} cannot be run ({error.strerror}); {REMEDY}") from None
        hello = self._read()
        self.name: str = hello["name"]
        self.version: str = hello["version"]

    def request(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run one operation and give its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and so has its output
            self._process.stdin.write(json.dumps({"op": operation, **arguments}) + "\n")
            self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise InterlockError(f"the peer process ended with status {self._process.wait()}; its own message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def find_peer_python() -> Path | None:
    """The Python of the peers' environment: `INTERLOCK_PEERS_PYTHON`, or the one that `make bench-peers` makes; None where there is none."""
    configured = os.environ.get(PYTHON_VARIABLE)
    if configured and not Path(configured).exists():
        raise InterlockError(f"{PYTHON_VARIABLE} is {configured!r}, which does not exist; {REMEDY}")
    python = Path(configured) if configured else DEFAULT_PYTHON
    return python if python.exists() else None
