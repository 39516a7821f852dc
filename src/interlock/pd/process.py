"""An engine in a process of its own, as its parent sees it: spawned (never forked), driven over a socket, and never outliving the parent.

The child leads a process group, so that whatever it starts (compilers, on a cold start) goes with it, and so that a terminal's Ctrl-C
reaches the parent alone, which decides. The child ends itself when its socket closes, whatever became of the parent.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from interlock.core.errors import ConfigError, InterlockError
from interlock.pd.messages import Channel, Fatal, FromEngine, Start, Stop

STOP_SECONDS = 5.0  # how long an orderly shutdown may take before the process group is killed
STALL_SECONDS = 15.0  # without a word from a process at work, which beats several times a second

_STANDARD_ERROR = 2  # the descriptor, whatever `sys.stderr` is by now


class EngineProcessError(InterlockError, RuntimeError):
    """An engine process ended, reported a fault that it cannot go on from, or does nothing any more."""


class EngineProcess:
    """One engine process, called `name`. `engine` holds engine options by name, as plain JSON values. Raises ConfigError for what is none."""

    def __init__(self, name: str, engine: Mapping[str, Any]) -> None:
        self.name = name
        self.alive = True
        start = Start(dict(engine))
        try:
            msgspec.msgpack.encode(start)
        except (OverflowError, TypeError, ValueError) as error:
            raise ConfigError(f"the engine options {dict(engine)!r:.500} cannot be told to another process: {error}") from error
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "interlock.pd.worker", name, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=_STANDARD_ERROR,  # standard output belongs to the parent's results
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        finally:
            theirs.close()
        self._channel = Channel(ours, FromEngine)
        self.send(start)

    @property
    def pid(self) -> int:
        """The process id, which is also its group's."""
        return self._process.pid

    def fileno(self) -> int:
        """The channel's descriptor, for select."""
        return self._channel.fileno()

    def send(self, message: msgspec.Struct, timeout: float = STALL_SECONDS) -> None:
        """Send a message. Raises EngineProcessError when the process has ended, or takes nothing in for `timeout` seconds."""
        try:
            self._channel.send(message, timeout)
        except TimeoutError:
            raise self.stalled(timeout) from None
        except OSError:
            raise self._ended() from None

    def receive(self, timeout: float = STALL_SECONDS) -> Any:
        """The next message from the process. Raises EngineProcessError when it has ended, says that it must, or has said nothing for
        `timeout` seconds."""
        try:
            if not wait_readable([self], timeout):
                raise TimeoutError
            message = self._channel.receive(timeout)
        except TimeoutError:
            raise self.stalled(timeout) from None
        except EOFError:
            raise self._ended() from None
        if isinstance(message, Fatal):
            self._reap()
            if message.user_error:
                raise InterlockError(message.error)
            raise EngineProcessError(f"the {self.name} process failed: {message.error}")
        return message

    def stalled(self, seconds: float) -> EngineProcessError:
        """The error for a process that has said nothing for `seconds`; it is ended, stopped or not."""
        self._reap()
        return EngineProcessError(
            f"the {self.name} process (pid {self.pid}) said nothing for {seconds:g} s, so it was taken for stalled and ended; "
            "was it stopped (SIGSTOP), or is the machine out of memory?"
        )

    def stop(self) -> None:
        """End the process: in order if it answers, by force if not. Nothing of its group is left."""
        if self.alive:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._channel.send(Stop(), STOP_SECONDS)
                self._process.wait(STOP_SECONDS)
            self._reap()

    def kill(self) -> None:
        """End the process and its group at once."""
        if self.alive:
            self._reap()

    def _reap(self) -> None:
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()

    def _ended(self) -> EngineProcessError:
        """What the end of the process looked like; its group is reaped."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # its socket closes a moment before it can be waited for
        status = self._process.poll()
        self._reap()
        if status is None:
            how = "closed its channel without ending"
        elif status < 0:
            how = f"was ended by signal {-status} ({signal.Signals(-status).name})"
        else:
            how = f"ended with status {status}"
        return EngineProcessError(f"the {self.name} process (pid {self.pid}) {how}")


def wait_readable(processes: Sequence[EngineProcess], timeout: float) -> list[EngineProcess]:
    """Wait until at least one of `processes` has a message or has ended; those that do, in the given order. None after `timeout` seconds."""
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process, selectors.EVENT_READ)
        events = selector.select(timeout) or selector.select(0)  # time in which we were stopped ourselves is nobody's silence
        ready = {id(key.fileobj) for key, _ in events}
    return [process for process in processes if id(process) in ready]
