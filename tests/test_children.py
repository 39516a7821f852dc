"""The helpers that start processes for tests."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from children import as_a_child

TESTS = str(Path(__file__).parent)

POPEN = """
import subprocess, sys, time
from children import as_a_child
child = subprocess.Popen(as_a_child([sys.executable, "-c", "import time; print('there', flush=True); time.sleep(600)"]), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""

SPAWN = """
import multiprocessing, os, time
from children import end_with_parent
def child(pipe):
    end_with_parent()
    pipe.send(os.getpid())
    time.sleep(600)
if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=child, args=(theirs,)).start()
    print(ours.recv(), flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are watched through pidfds")
@pytest.mark.parametrize("script", [POPEN, SPAWN], ids=["subprocess", "multiprocessing"])
def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path, script: str) -> None:
    file = tmp_path / "parent.py"
    file.write_text(f"import sys\nsys.path.insert(0, {TESTS!r})\n{script}")
    parent = subprocess.Popen(as_a_child([sys.executable, str(file)]), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    ready, _, _ = select.select([child], [], [], 60)
    os.close(child)
    assert ready


def test_an_interrupt_reaches_a_child_of_a_run_that_ignores_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        command = [sys.executable, "-c", "import signal; raise SystemExit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)"]
        assert subprocess.run(as_a_child(command), check=False).returncode == 0
    finally:
        signal.signal(signal.SIGINT, before)
