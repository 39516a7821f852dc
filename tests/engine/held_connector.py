"""A connector whose reads cannot be stopped: it reports to the ledger, and the last layer of a load is written when the test says so."""

import signal
import threading
from typing import Any

from shelf_connector import POISON, ShelfConnector

from interlock.core.forward_context import ForwardContext


class Far:
    """The far side. may_land: the last layer of a load is written from then on. reached: a reader waits for it.
    interrupts: a reader that has come so far interrupts the main thread, as Ctrl-C does."""

    def __init__(self) -> None:
        self.may_land = threading.Event()
        self.reached = threading.Event()
        self.interrupts = False
        self.readers: list[threading.Thread] = []

    def land_all(self) -> None:
        self.may_land.set()
        for reader in self.readers:
            reader.join()


FAR: list[Far] = []


class HeldConnector(ShelfConnector):
    """What lands late is poison. The load is named when its reader has ended, as an asynchronous one is."""

    supports_timelines = True

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for req_id, (block_ids, start, stop) in self._get_connector_metadata().loads.items():
            transfers = [kwargs["ledger"].begin_transfer(forward_context.step, req_id, layer, start, stop) for layer in range(len(self.layers))]
            reader = threading.Thread(target=self._read, args=(req_id, kwargs["ledger"], transfers, block_ids, start, stop), daemon=True)
            FAR[-1].readers.append(reader)
            reader.start()

    def _read(self, req_id: str, ledger: Any, transfers: list[int], block_ids: list[int], start: int, stop: int) -> None:
        far = FAR[-1]
        for transfer in transfers[:-1]:
            ledger.end_transfer(transfer)
        if far.interrupts:
            far.interrupts = False
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        far.reached.set()
        far.may_land.wait()
        for block_id in block_ids[start // self.block_size : -(-stop // self.block_size)]:
            self.layers[-1][block_id] = POISON
        ledger.end_transfer(transfers[-1])
        self.loaded.add(req_id)
