"""Processes that tests start: they see signals as a terminal's processes do, and end with the test run, however that ends."""

import ctypes
import os
import signal
import sys
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait

_PR_SET_PDEATHSIG = 1


def as_a_child(command: list[str]) -> list[str]:
    """`command` with Ctrl-C at work also where the test run ignores it (`nohup`, `&`); on Linux it is killed when its parent ends."""
    return [sys.executable, "-I", "-S", __file__, *command]


def end_with_parent() -> None:
    """For the beginning of a `multiprocessing` child: it ends when its parent does, whatever it waits for by then."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execv(sys.argv[1], sys.argv[1:])
