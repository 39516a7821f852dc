"""What a peer can send, and what it cannot do with it."""

import contextlib
import gc
import mmap
import os
import socket
import struct
import uuid

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_support import kv_cache_config

from interlock.core.errors import KVTransferError, PeerMismatchError
from interlock.graphs.copy import copy_list
from interlock.kv_transfer.clock import MonotonicClock
from interlock.kv_transfer.handshake import PROTOCOL_VERSION, Done, Heartbeat, Hello, Leases, Refused, Welcome, decode, describe_pool, encode
from interlock.kv_transfer.leases import LeaseTable
from interlock.kv_transfer.transports import channel as channel_module
from interlock.kv_transfer.transports.channel import Channel, address, check_same_user, listen
from interlock.kv_transfer.transports.desk import PeerDesk
from interlock.kv_transfer.transports.local import SharedMemoryTransport
from interlock.kv_transfer.transports.peer_client import PeerPool
from interlock.kv_transfer.transports.pool_server import PoolServer, make_welcome
from interlock.kv_transfer.transports.shared_memory import ControlSegment, ReadOnlyMapping, allocate_pool
from interlock.kv_transfer.transports.transport import PeerAddress

CONFIG = kv_cache_config()
POOL = describe_pool(CONFIG)
HELLO = Hello(version=PROTOCOL_VERSION, engine_id="consumer", pool=POOL)


@pytest.fixture(scope="module")
def served():
    """`(engine_id, desk, leases)`"""
    engine_id = f"test-{uuid.uuid4().hex}"
    pool = allocate_pool(CONFIG.layer_bytes * CONFIG.num_layers)
    control = ControlSegment(CONFIG.num_blocks, 5)
    leases = LeaseTable(MonotonicClock(), 30.0)
    offsets = [i * CONFIG.layer_bytes for i in range(CONFIG.num_layers)]
    desk = PeerDesk(make_welcome(engine_id, 5, POOL, pool.buffer.nbytes, offsets), "shared_memory", leases)
    server = PoolServer(listen(engine_id, 0), check_same_user, desk, (pool.fd, control.fd))
    yield engine_id, desk, leases
    server.close()
    control.close()
    pool.close()


def connect(engine_id):
    return Channel.connect(engine_id, 0)


def receive(channel):
    return channel.receive(10.0, lambda: False)


@contextlib.contextmanager
def introduced(engine_id, description=POOL):
    ours = msgspec.structs.replace(HELLO, pool=description)
    transport = SharedMemoryTransport(copy_list)
    with contextlib.closing(transport):
        pool = PeerPool(transport, PeerAddress(engine_id), ours, None, MonotonicClock(), 10.0, lambda: False)
        with contextlib.closing(pool):
            yield pool


def assert_serves(engine_id):
    with introduced(engine_id) as pool:
        assert pool.epoch == 5


@given(st.binary(max_size=64))
@settings(max_examples=50, deadline=None)
def test_bytes_that_are_no_message_cost_the_peer_its_connection_and_nothing_else(served, body):
    engine_id, server, _ = served
    before = server.malformed
    channel = connect(engine_id)
    channel.socket.sendall(struct.pack("<I", len(body)) + body)
    with pytest.raises(KVTransferError, match="lost"):
        receive(channel)
    channel.close()
    assert server.malformed == before + 1
    assert_serves(engine_id)


@pytest.mark.parametrize("message", [Heartbeat(signatures=["x"]), Done(signature="x"), Refused(reason="no"), Leases(expiry={})])
def test_a_message_out_of_turn_is_refused(served, message):
    engine_id, _, _ = served
    channel = connect(engine_id)
    channel.send(message)
    with pytest.raises(KVTransferError, match="lost"):
        receive(channel)
    channel.close()
    assert_serves(engine_id)


def test_a_length_that_no_message_has_is_refused(served):
    engine_id, _, _ = served
    channel = connect(engine_id)
    channel.socket.sendall(struct.pack("<I", 2**31))
    with pytest.raises(KVTransferError, match="lost"):
        receive(channel)
    channel.close()
    assert_serves(engine_id)


def test_descriptors_that_nobody_asked_for_are_closed(served):
    engine_id, _, _ = served
    read_end, write_end = os.pipe()
    channel = connect(engine_id)
    socket.send_fds(channel.socket, [b"\0"], [write_end])
    os.close(write_end)
    with pytest.raises(KVTransferError, match="lost"):
        receive(channel)
    channel.close()
    assert os.read(read_end, 1) == b""
    os.close(read_end)


def test_a_message_may_arrive_in_pieces(served):
    engine_id, _, _ = served
    channel = connect(engine_id)
    body = encode(HELLO)
    data = struct.pack("<I", len(body)) + body
    for i in range(0, len(data), 7):
        channel.socket.sendall(data[i : i + 7])
    assert isinstance(receive(channel), Welcome)
    channel.close()


def test_heartbeats_and_notices_reach_the_leases(served):
    engine_id, _, leases = served
    leases.grant("kept", "a request")
    channel = connect(engine_id)
    channel.send(HELLO)
    receive(channel)
    channel.send(Done(signature="kept"))
    channel.send(Heartbeat(signatures=["kept", "never"]))
    assert receive(channel) == Leases(expiry={})
    assert leases.take_ended() == {"kept"}
    channel.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("identity", "other"),
        ("layout", "other"),
        ("dtype", "float32"),
        ("num_layers", 9),
        ("num_kv_heads", 9),
        ("head_dim", 9),
        ("kernel_fingerprint", "x"),
    ],
)
def test_a_pool_that_differs_is_refused_with_the_two_values(served, field, value):
    engine_id, server, _ = served
    before = server.refused
    theirs = msgspec.structs.replace(POOL, **{field: value})
    with pytest.raises(PeerMismatchError) as error, introduced(engine_id, theirs):
        pass
    assert field in str(error.value)
    assert repr(value) in str(error.value)
    assert repr(getattr(POOL, field)) in str(error.value)
    assert server.refused == before + 1


def test_block_size_and_number_of_blocks_may_differ(served):
    engine_id, _, _ = served
    with introduced(engine_id, msgspec.structs.replace(POOL, block_size=8, num_blocks=3)) as pool:
        assert pool.description == POOL


def test_another_version_is_refused(served):
    engine_id, _, _ = served
    channel = connect(engine_id)
    channel.send(msgspec.structs.replace(HELLO, version=PROTOCOL_VERSION + 1))
    answer = receive(channel)
    assert isinstance(answer, Refused)
    assert f"version {PROTOCOL_VERSION + 1}" in answer.reason
    channel.close()


def test_another_user_is_refused(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        check_same_user(ours)
        uid = os.getuid()
        monkeypatch.setattr(channel_module.os, "getuid", lambda: uid + 1)
        with pytest.raises(KVTransferError, match=f"runs as user {uid}"):
            check_same_user(ours)


def test_an_engine_id_cannot_lead_anywhere_else():
    for engine_id in ("../x", "a/b", "", "a" * 65, "a\0b"):
        with pytest.raises(KVTransferError, match="engine_id"):
            address(engine_id, 0)


@given(st.binary(max_size=200))
def test_decoding_never_raises_anything_but_its_error(data):
    with contextlib.suppress(KVTransferError):
        decode(data)


def test_a_reader_cannot_write_shrink_or_grow_a_segment():
    pool = allocate_pool(8192)
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(pool.fd, 8192, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_SHARED)
    for size in (0, 1 << 20):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(pool.fd, size)
    mapping = ReadOnlyMapping(os.dup(pool.fd), 8192)
    pool.buffer.numpy()[5] = 77
    assert mapping.buffer.numpy()[5] == 77
    pool.close()


def test_a_segment_that_is_shorter_than_announced_is_refused_and_its_descriptor_closed():
    pool = allocate_pool(4096)
    fd = os.dup(pool.fd)
    with pytest.raises(KVTransferError, match="4096 bytes"):
        ReadOnlyMapping(fd, 1 << 20)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)
    pool.close()
    gc.collect()
