"""NIXL by itself, as its own examples use it: what the NIXL transport is measured against."""

import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from interlock.core.buffer import Buffer
from interlock.core.errors import InterlockError

_PROGRESS_SECONDS = 0.005


class RawNixl:
    """One agent with `memory` registered, set up as the transport's agent is (UCX_TLS of the process, no progress thread)."""

    def __init__(self, name: str, memory: Buffer) -> None:
        api: Any = importlib.import_module("nixl_cu12._api")
        self._agent = api.nixl_agent(f"raw-{name}", api.nixl_agent_config(backends=[], enable_prog_thread=False))
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})
        self._agent.register_memory([(memory.address, memory.nbytes, 0, "")], "DRAM")
        self._peer = ""

    @property
    def metadata(self) -> bytes:
        """For the other side's `connect`."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def connect(self, metadata: bytes) -> None:
        """Reach the agent that `metadata` is of."""
        name = self._agent.add_remote_agent(metadata)
        self._peer = name.decode() if isinstance(name, bytes) else name

    def make_progress(self) -> None:
        """For ever: what a side that is only read from owes to its peers, which is answering their first contact."""
        while True:
            self._agent.get_new_notifs()
            time.sleep(_PROGRESS_SECONDS)

    def reader(self, descriptors: npt.NDArray[np.int64]) -> Callable[[], None]:
        """A read of `[n, 3]` (destination address, source address, bytes) that can be made again and again. The lists are prepared here;
        the handle is made with each read, as each list is read once only."""
        agent, peer = self._agent, self._peer
        device = np.zeros(len(descriptors), np.uint64)
        destinations, sources, sizes = descriptors.T.astype(np.uint64)
        ours = agent.get_xfer_descs(np.stack([destinations, sizes, device], axis=1), "DRAM")
        theirs = agent.get_xfer_descs(np.stack([sources, sizes, device], axis=1), "DRAM")

        def read() -> None:
            handle = agent.initialize_xfer("READ", ours, theirs, peer)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            if state != "DONE":
                raise InterlockError(f"raw NIXL ended a read with {state!r}")

        return read
