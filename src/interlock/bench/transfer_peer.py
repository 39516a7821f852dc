"""The other process of the transfer benchmark: a pool full of random bytes, offered over every transport, over raw NIXL, and as a file.

It is told over a socket what to offer, answers with where everything is, and ends when the socket closes.
"""

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from interlock.bench.raw_nixl import RawNixl
from interlock.core.config import KVCacheConfig
from interlock.core.errors import InterlockError
from interlock.graphs.copy import COPY_LIST, copy_list
from interlock.kernels import native
from interlock.kv_transfer.clock import MonotonicClock
from interlock.kv_transfer.connectors.peer_options import PeerOptions
from interlock.kv_transfer.handshake import describe_pool
from interlock.kv_transfer.leases import LeaseTable
from interlock.kv_transfer.transports.desk import PeerDesk, hello
from interlock.kv_transfer.transports.peer_client import PeerPool
from interlock.kv_transfer.transports.pool_server import make_welcome
from interlock.kv_transfer.transports.shared_memory import ControlSegment, KVPool, ReadOnlyMapping, allocate_pool
from interlock.kv_transfer.transports.transport import PeerAddress, Registration, Transport

RAW_NIXL: Final = "raw nixl"

_EPOCH = 1
_TIMEOUT_SECONDS = 30.0
_MAX_REPLY_BYTES = 1 << 20
_SEED = 7


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool of `num_layers` times `num_blocks` blocks of 6 KiB: eight positions of three heads of 64 in bfloat16, keys and values."""

    num_layers: int = 30
    num_blocks: int = 728

    @property
    def shape(self) -> KVCacheConfig:
        """As an engine would describe it."""
        names = tuple(str(layer) for layer in range(self.num_layers))
        sizes: dict[str, Any] = {"num_layers": self.num_layers, "num_blocks": self.num_blocks, "layer_names": names}
        return KVCacheConfig(block_size=8, num_kv_heads=3, head_dim=64, dtype="bfloat16", identity="bench transfer", **sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.num_layers * self.shape.layer_bytes


class Offer(msgspec.Struct, frozen=True):
    """What the other process is to offer. engine_id: under which it is reached; transports: kinds, and RAW_NIXL."""

    engine_id: str
    size: PoolSize
    transports: list[str]


class Reply(msgspec.Struct, frozen=True):
    """Where it is: the port of each transport (None: found by engine id), and the raw agent's metadata. The pool's descriptor comes with it."""

    ports: dict[str, int | None]
    pool_address: int
    agent: bytes


class Endpoint:
    """One transport of one side, with `pool` registered."""

    def __init__(self, kind: str, engine_id: str, size: PoolSize, pool: KVPool) -> None:
        shape = size.shape
        self._engine_id, self._description = engine_id, describe_pool(shape)
        self._control = ControlSegment(size.num_blocks, _EPOCH)
        options = PeerOptions.parse({"transport": kind})
        self.transport: Transport = options.make_transport(f"{engine_id}-{kind}", shape.block_size, shape.block_bytes, copy_list)
        self.transport.register(Registration(pool.buffer, self._control.buffer, (pool.fd, self._control.fd)), lambda data: None)
        self._opened = contextlib.ExitStack()
        self._opened.callback(self._control.close)
        self._opened.callback(self.transport.close)
        self._offsets = [layer * shape.layer_bytes for layer in range(size.num_layers)]
        self._nbytes = size.nbytes

    def serve(self) -> int | None:
        """Answer peers; the port at which they are answered, if there is one."""
        welcome = make_welcome(self._engine_id, _EPOCH, self._description, self._nbytes, self._offsets)
        welcome = self.transport.describe(welcome)
        desk = PeerDesk(welcome, self.transport.kind, LeaseTable(MonotonicClock(), _TIMEOUT_SECONDS))
        self._opened.callback(self.transport.serve(welcome, 0, desk).close)
        return self.transport.port

    def open(self, engine_id: str, port: int | None) -> PeerPool:
        """The pool of the other side."""
        peer = PeerAddress(engine_id, 0, None if port is None else "127.0.0.1", port)
        ours = hello(self._engine_id, self._description, self.transport.kind)
        pool = PeerPool(self.transport, peer, ours, None, MonotonicClock(), _TIMEOUT_SECONDS, lambda: False)
        self._opened.callback(pool.close)
        return pool

    def close(self) -> None:
        """Give everything back."""
        self._opened.close()


class Peer:
    """The other process, as this one sees it. mapping: its pool, mapped read-only."""

    def __init__(self, engine_id: str, size: PoolSize, transports: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "interlock.bench.transfer_peer", str(theirs.fileno())]
            # In a group of its own, so that an interrupt from a terminal reaches us alone; it ends when its socket closes.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), pass_fds=(theirs.fileno(),), process_group=0
            )
        self._socket = ours
        try:
            ours.sendall(msgspec.json.encode(Offer(engine_id, size, list(transports))) + b"\n")
            data, descriptors, _, _ = socket.recv_fds(ours, _MAX_REPLY_BYTES, 1)
            if not descriptors:
                raise InterlockError(f"the other process ended with status {self._process.wait()}; its own message is above")
            self.reply = msgspec.json.decode(data, type=Reply)
            self.mapping = ReadOnlyMapping(descriptors[0], size.nbytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.wait()


def main() -> None:
    """Serve the parent at the other end of the socket whose descriptor is the first argument."""
    with socket.socket(fileno=int(sys.argv[1])) as parent, contextlib.ExitStack() as opened:
        offer = msgspec.json.decode(parent.makefile("rb").readline(), type=Offer)
        native.load([COPY_LIST])
        pool = allocate_pool(offer.size.nbytes)
        pool.buffer.numpy()[:] = np.random.default_rng(_SEED).integers(0, 256, offer.size.nbytes, np.uint8)
        ports: dict[str, int | None] = {}
        agent = b""
        for kind in offer.transports:
            if kind == RAW_NIXL:
                raw = RawNixl(offer.engine_id, pool.buffer)
                agent = raw.metadata
                threading.Thread(target=raw.make_progress, daemon=True).start()
            else:
                endpoint = opened.enter_context(contextlib.closing(Endpoint(kind, offer.engine_id, offer.size, pool)))
                ports[kind] = endpoint.serve()
        socket.send_fds(parent, [msgspec.json.encode(Reply(ports, pool.buffer.address, agent))], [pool.fd])
        parent.recv(1)


if __name__ == "__main__":
    main()
