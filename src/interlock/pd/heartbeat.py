"""The sign of life of an engine process while it works, also in the middle of a long step."""

import threading
import time
from typing import Final

from interlock.pd.messages import Channel, Heartbeat

BEAT_SECONDS: Final = 0.5
LONGEST_STEP_SECONDS: Final = 600.0  # a step that takes longer does not end any more: the heart stops, and the parent acts


class Heart:
    """Beats from a thread of its own between `note(working=True)` and `note(working=False)`, as long as steps end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._working = threading.Event()
        self._last_note = time.monotonic()
        threading.Thread(target=self._beat, daemon=True, name="heart").start()

    def note(self, *, working: bool) -> None:
        """Called between two steps: whether there is a request to work on."""
        self._last_note = time.monotonic()
        if working != self._working.is_set():
            self._working.set() if working else self._working.clear()

    def _beat(self) -> None:
        while True:
            self._working.wait()
            if time.monotonic() - self._last_note < LONGEST_STEP_SECONDS:
                try:
                    self._channel.send(Heartbeat())
                except OSError:
                    return  # the parent is gone; the thread that reads ends the process
            time.sleep(BEAT_SECONDS)
