"""Start-up of `interlock generate`: time to its first byte of text, and its peak resident memory."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from interlock.bench.measure import Figure, alternate, compare
from interlock.bench.session import OURS, Session
from interlock.core.errors import InterlockError
from interlock.kernels.compile_cache import CACHE_DIR_VARIABLE

_POOL_BYTES = 64 * 2**20
_WARM_SECONDS, _COLD_SECONDS, _RESIDENT_MB = 5.0, 75.0, 600.0


def run(session: Session) -> list[Figure]:
    """With a warm kernel cache (several times) and with an empty one (once: it takes a minute)."""
    resident: list[float] = []

    def warm(number: int) -> float:
        seconds, peak = _first_byte(session, {})
        resident.append((peak - _POOL_BYTES) / 1e6)
        return seconds

    session.say("first token of `interlock generate`, warm kernel cache")
    figures = [
        compare(
            "first token of the command, warm", "s", alternate(session.rounds, {OURS: warm}), bound=_WARM_SECONDS, sense="at most", bound_of="value"
        ),
        compare("peak memory less the KV pool", "MB", {OURS: tuple(resident)}, bound=_RESIDENT_MB, sense="at most", bound_of="value"),
    ]
    session.say("first token of `interlock generate`, empty kernel cache")
    with tempfile.TemporaryDirectory() as directory:
        seconds, _ = _first_byte(session, {CACHE_DIR_VARIABLE: directory})
    figures.append(compare("first token of the command, cold", "s", {OURS: (seconds,)}, bound=_COLD_SECONDS, sense="at most", bound_of="value"))
    return figures


def _first_byte(session: Session, environment: Mapping[str, str]) -> tuple[float, float]:
    """Seconds to the first byte on standard output, and peak resident bytes (those of the largest compiler process, if one is larger)."""
    arguments = ["--threads", str(session.threads), "--kv-cache-memory-bytes", str(_POOL_BYTES), "--max-tokens", "8", "Once upon a time"]
    command = [sys.executable, "-P", "-m", "interlock", "generate", "--model", session.model, "--raw", *arguments]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={**os.environ, **environment})
    assert process.stdout is not None
    first = process.stdout.read(1)
    seconds = time.perf_counter() - begin
    process.stdout.read()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if not first or process.returncode:
        raise InterlockError(f"{' '.join(command)} gave no text and ended with status {process.returncode}; its own message is above")
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
