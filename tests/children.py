"""Processes that tests start: they see signals as a terminal's processes do, and end with the test run, however that ends."""

import ctypes
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import wait

_PR_SET_PDEATHSIG = 1
_PATIENCE = 60  # seconds after which a forked child is given up


def as_a_child(command: list[str]) -> list[str]:
    """`command` with Ctrl-C at work also where the test run ignores it (`nohup`, `&`); on Linux it is killed when its parent ends."""
    return [sys.executable, "-I", "-S", __file__, *command]


def end_with_parent() -> None:
    """For the beginning of a `multiprocessing` child: it ends when its parent does, whatever it waits for by then."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def in_forked_child(function: Callable[[], object]) -> str:
    """What `function` returns in a child that this thread forks, as a text; of what it raises, the kind and the text."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons tell of threads that the child will not have
        pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_PATIENCE)
            try:
                answer = str(function())
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(writer, answer.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child waits for something that never comes"
    return answer


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
