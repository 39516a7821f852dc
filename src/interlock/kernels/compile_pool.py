"""Compiling many functions at once, in worker processes (Numba holds a lock while it compiles)."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Sequence

from interlock.core import interrupts
from interlock.core.errors import CompileError
from interlock.kernels.native import NativeFunction

Finished = Callable[[NativeFunction, str, bytes], None]

MAX_WORKERS = 4
END_SECONDS = 10.0  # how long a worker that was told to end may take


def compile_in_workers(functions: Sequence[NativeFunction], num_workers: int, finished: Finished) -> None:
    """Compile `functions` in `num_workers` processes; `finished(function, symbol, object file)` is called here as each one is done.

    Raises CompileError for the first that fails; those that are being compiled then are still finished. No worker outlives the call.
    """
    with interrupts.deferred():
        _compile_in_workers(functions, num_workers, finished)


def _compile_in_workers(functions: Sequence[NativeFunction], num_workers: int, finished: Finished) -> None:
    pending = list(reversed(functions))
    failure: CompileError | None = None
    workers: list[_Worker] = []
    try:
        with selectors.DefaultSelector() as selector:
            for _ in range(min(num_workers, len(functions))):
                workers.append(_Worker())
                workers[-1].send(pending.pop())
                selector.register(workers[-1].answers, selectors.EVENT_READ, workers[-1])
            while selector.get_map():
                interrupts.deliver()
                for key, _ in selector.select(interrupts.SLICE_SECONDS):
                    worker: _Worker = key.data
                    try:
                        finished(*worker.receive())
                        if pending and failure is None:
                            worker.send(pending.pop())
                            continue
                    except CompileError as error:
                        failure = failure or error
                    selector.unregister(worker.answers)
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    finally:
        for worker in workers:
            worker.close()
    if failure is not None:
        raise failure


class _Worker:
    """A process that compiles: one JSON line in, one JSON line and the object file out. In a process group of its own, since a Ctrl-C is
    the parent's to handle; it ends when its input closes, or when its parent is gone."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "interlock.kernels.compile_worker", str(os.getpid())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self.answers = self._process.stdin, self._process.stdout
        self._function: NativeFunction | None = None

    def send(self, function: NativeFunction) -> None:
        """Ask for one function. Raises CompileError if the process is gone."""
        self._function = function
        request = json.dumps([function.name, function.signature, function.source, function.arguments]).encode() + b"\n"
        try:
            self._requests.write(request)
            self._requests.flush()
        except BrokenPipeError:
            raise self._ended(function) from None

    def receive(self) -> tuple[NativeFunction, str, bytes]:
        """Wait for the answer: (function, symbol, object file). Raises CompileError with the worker's message."""
        function = self._function
        assert function is not None
        header = self.answers.readline()
        if not header:
            raise self._ended(function)
        reply = json.loads(header)
        if "error" in reply:
            raise CompileError(reply["error"])
        code = self.answers.read(reply["size"])
        if len(code) != reply["size"]:
            raise self._ended(function)
        return function, reply["symbol"], code

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()

    def close(self) -> None:
        """Tell the process to end, and wait for it."""
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._requests.close()
        self.answers.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ended(self, function: NativeFunction) -> CompileError:
        return CompileError(
            f"the compiler process for kernel {function.name} ended with status {self._process.wait()} before it answered; "
            "its output above may say why (a negative status is a signal: -9 is often the lack of memory)"
        )
