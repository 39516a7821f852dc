"""Signs of life: one thread asks the peers of all connections for them, so that a peer that stands still is noticed, and not only a dead one."""

import threading

from interlock.kv_transfer.transports.channel import Channel

_BEAT_SECONDS = 0.25


class Pulse:
    """The thread starts with the first connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, channel: Channel) -> None:
        """Ask the peer of an introduced connection for signs of life, until the connection is lost or closed."""
        with self._lock:
            self._channels.add(channel)
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="interlock-kv-pulse", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop the thread. May be called twice."""
        self._stop.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            with self._lock:
                channels = list(self._channels)
            for channel in channels:
                channel.beat()
                if not channel.alive:
                    with self._lock:
                        self._channels.discard(channel)
