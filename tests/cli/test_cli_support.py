"""The helpers that watch the processes of a command."""

import os
import subprocess
import sys

import pytest
from cli_support import engine_children

from children import as_a_child

WORKER = "interlock.pd.worker"
WAIT = "import sys; print('there', flush=True); sys.stdin.read()"


@pytest.mark.skipif(sys.platform != "linux", reason="processes are watched through /proc")
def test_only_children_that_run_an_engine_count() -> None:
    engine = _start([sys.executable, "-c", WAIT, WORKER, "prefill", "7"])
    same_words_as_the_parent = _start([sys.executable, "-c", WAIT, "interlock", "pd"])
    ended = _start([sys.executable, "-c", "print('there')", WORKER, "decode", "8"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # not reaped: it has no command line any more
    try:
        assert engine_children(os.getpid()) == {"prefill": engine.pid}
    finally:
        for process in (engine, same_words_as_the_parent, ended):
            process.communicate()


def _start(command: list[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(as_a_child(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process
