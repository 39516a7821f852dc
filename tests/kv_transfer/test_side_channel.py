"""The side channel over TCP: what strangers can send, and what it gets them."""

import contextlib
import itertools
import secrets
import socket
import struct
import threading
import uuid

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_support import kv_cache_config
from peer_support import LOOPBACK_6
from push_support import wait_for

from interlock.core.errors import ConfigError, KVTransferError, PeerMismatchError
from interlock.kv_transfer.clock import MonotonicClock
from interlock.kv_transfer.handshake import (
    MAX_MESSAGE_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Announced,
    Cancel,
    Challenge,
    Done,
    Heartbeat,
    Hello,
    Leases,
    Proof,
    Pushed,
    Refused,
    Welcome,
    decode,
    describe_pool,
    encode,
    prove,
)
from interlock.kv_transfer.leases import LeaseTable
from interlock.kv_transfer.transports import channel as channel_module
from interlock.kv_transfer.transports import pool_server
from interlock.kv_transfer.transports.desk import PeerDesk, introduce
from interlock.kv_transfer.transports.peer_client import PeerPools
from interlock.kv_transfer.transports.pool_server import _STRANGER_BYTES, PoolServer, make_welcome
from interlock.kv_transfer.transports.tcp_link import LOOPBACK, admit_from, connect, listen
from interlock.kv_transfer.transports.transport import PeerAddress, PeerGoneError

POOL = describe_pool(kv_cache_config())
SECRET = b"between us"


class Side:
    """A served side channel, and ways to reach it."""

    def __init__(self, secret=None, allowed=LOOPBACK, host="127.0.0.1"):
        self.engine_id = f"test-{uuid.uuid4().hex}"
        self.leases = LeaseTable(MonotonicClock(), 30.0)
        self.desk = PeerDesk(make_welcome(self.engine_id, 5, POOL, 1 << 20, [0, 1, 2]), "nixl", self.leases, secret=secret)
        self.listener = listen(host, 0)
        self.port = self.listener.getsockname()[1]
        self.server = PoolServer(self.listener, admit_from(allowed), self.desk)
        self.address = PeerAddress(self.engine_id, 0, host, self.port)
        self.connections = []

    def connect(self, address=None, allowed=LOOPBACK):
        self.connections.append(connect(address or self.address, allowed, 10.0, lambda: False))
        return self.connections[-1]

    def introduce(self, secret=None, pool=POOL, engine_id=None):
        connection = self.connect()
        hello = Hello(version=PROTOCOL_VERSION, engine_id="consumer", pool=pool, transport="nixl")
        welcome = introduce(connection.send, lambda: connection.receive(10.0, lambda: False), engine_id or self.engine_id, hello, secret)
        return welcome, connection

    def raw(self):
        """A socket that sends whatever the test likes."""
        self.connections.append(socket.create_connection((self.address.host, self.port)))
        self.connections[-1].settimeout(10.0)
        return self.connections[-1]

    def assert_serves(self):
        assert self.introduce()[0].engine_id == self.engine_id

    def close(self):
        for connection in self.connections:
            connection.close()
        self.server.close()
        self.server.close()


@pytest.fixture
def side():
    made = Side()
    yield made
    made.close()


@pytest.fixture
def guarded():
    made = Side(secret=SECRET)
    yield made
    made.close()


HELLO = Hello(version=PROTOCOL_VERSION, engine_id="x", pool=POOL, transport="nixl")


def framed(data):
    return struct.pack("<I", len(data)) + data


def take(raw, count):
    data = b""
    while len(data) < count:
        more = raw.recv(count - len(data))
        assert more
        data += more
    return data


def ask(raw, data):
    raw.sendall(framed(data))
    return decode(take(raw, struct.unpack("<I", take(raw, 4))[0]))


def is_dropped(raw):
    """Whether the other side closes the connection without another word."""
    try:
        return raw.recv(1) == b""
    except ConnectionResetError:
        return True


@given(body=st.binary(max_size=64))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_that_are_no_message_cost_the_peer_its_connection_and_nothing_else(side, body):
    before = side.desk.malformed
    raw = side.raw()
    raw.sendall(framed(body))
    assert is_dropped(raw)
    raw.close()
    assert side.desk.malformed == before + 1
    side.assert_serves()


@pytest.mark.parametrize("message", [Heartbeat(signatures=["x"]), Done(signature="x"), Leases(expiry={}), Cancel(transfer_id="t", nonce=1)])
def test_a_message_before_the_introduction_is_refused(side, message):
    raw = side.raw()
    raw.sendall(framed(encode(message)))
    assert is_dropped(raw)
    assert side.desk.malformed == 1
    side.assert_serves()


def test_a_message_for_another_mode_is_refused_and_costs_the_connection(side):
    _, connection = side.introduce()
    connection.send(Pushed(transfer_id="t", nonce=1, layer=0, start=0, stop=4))
    with pytest.raises(KVTransferError, match="lost"):
        connection.receive(10.0, lambda: False)
    assert side.desk.malformed == 1
    side.assert_serves()


def test_a_message_beyond_the_limit_costs_the_peer_its_connection(side):
    raw = side.raw()
    assert isinstance(ask(raw, encode(HELLO)), Welcome)
    raw.sendall(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
    assert is_dropped(raw)
    side.assert_serves()


def test_a_stranger_may_send_only_what_an_introduction_takes(guarded):
    raw = guarded.raw()
    raw.sendall(struct.pack("<I", _STRANGER_BYTES + 1))
    assert is_dropped(raw)


def flood(raw, stop):
    """Frames of a megabyte that belong to a message without an end, as long as anybody takes them; how many bytes were taken."""
    sent = 0
    frame = struct.pack("<I", MAX_MESSAGE_BYTES) + bytes(MAX_MESSAGE_BYTES - 1)
    with contextlib.suppress(OSError):
        for piece in itertools.repeat(frame):
            if stop.is_set():
                break
            sent += raw.send(piece)
    return sent


@pytest.mark.parametrize("allowed", [("192.0.2.1",), LOOPBACK], ids=["from elsewhere", "without the secret"])
def test_a_flood_by_a_stranger_is_not_held_and_keeps_nobody_waiting(allowed):
    side = Side(secret=SECRET, allowed=allowed)
    held = []
    attend = side.server._attend

    def watched(session, events):
        attend(session, events)
        held.append(sum(other.channel.buffered for other in side.server._sessions))

    side.server._attend = watched
    stop = threading.Event()
    try:
        floods = [threading.Thread(target=flood, args=(side.raw(), stop)) for _ in range(4)]
        for thread in floods:
            thread.start()
        if allowed is LOOPBACK:
            assert side.introduce(SECRET)[0].engine_id == side.engine_id
        for thread in floods:
            thread.join(60)  # each is cut off
            assert not thread.is_alive()
        assert max(held, default=0) < 4 * (_STRANGER_BYTES + 65536)
        assert (side.desk.foreign, side.desk.malformed) == ((0, 4) if allowed is LOOPBACK else (4, 0))
    finally:
        stop.set()
        side.close()


def test_who_is_introduced_may_hold_unfinished_messages_only_within_bounds_and_the_longest_goes_first(side, monkeypatch):
    monkeypatch.setattr(pool_server, "_MAX_BUFFERED_BYTES", 3 * 65536)
    raws = [side.raw() for _ in range(3)]
    for raw, count in zip(raws, (65536, 2 * 65536, 65536), strict=True):
        assert isinstance(ask(raw, encode(HELLO)), Welcome)
        raw.sendall(struct.pack("<I", MAX_MESSAGE_BYTES) + bytes(count - 4))
    assert is_dropped(raws[1])
    assert {session.channel.socket.getpeername() for session in side.server._sessions} == {raws[0].getsockname(), raws[2].getsockname()}


def test_many_strangers_turn_out_each_other_and_nobody_else(side, monkeypatch):
    monkeypatch.setattr(pool_server, "_MAX_STRANGERS", 3)
    _, connection = side.introduce()
    raws = [side.raw() for _ in range(5)]
    assert is_dropped(raws[0])
    assert is_dropped(raws[1])
    connection.send(Heartbeat(signatures=["x"]))
    assert connection.receive(10.0, lambda: False) == Leases(expiry={})
    assert isinstance(ask(raws[4], encode(HELLO)), Welcome)


@pytest.mark.parametrize("frame", [encode(Heartbeat(signatures=[])), b"", encode(HELLO)], ids=["heartbeats", "signs of life", "introductions"])
def test_answers_that_a_peer_does_not_take_cost_it_its_connection_and_delay_nobody(side, monkeypatch, frame):
    monkeypatch.setattr(pool_server, "_MAX_UNSENT_BYTES", 1 << 16)
    raw = side.raw()
    assert isinstance(ask(raw, encode(HELLO)), Welcome)
    with contextlib.suppress(OSError):  # it is cut off
        for _ in range(1 << 20):
            raw.sendall(framed(frame) * 1000)
    assert side.desk.malformed == 1
    side.assert_serves()


def test_a_peer_that_gives_no_sign_of_life_is_missed(side, monkeypatch):
    monkeypatch.setattr(channel_module, "_SILENT_SECONDS", 0.2)
    stands_still, goes_on = threading.Event(), threading.Event()
    attend = side.server._attend

    def held(session, events):
        stands_still.set()
        goes_on.wait()
        attend(session, events)

    _, connection = side.introduce()
    connection.beat()
    while connection._asked is not None:
        connection.beat()
    assert connection.alive
    side.server._attend = held
    while connection.alive:
        connection.beat()
    assert stands_still.is_set()
    with pytest.raises(KVTransferError, match="no sign of life"):
        connection.receive(30.0, lambda: False)
    goes_on.set()


def test_signs_of_life_do_not_disturb_an_exchange(side):
    side.leases.grant("kept", "a request")
    _, connection = side.introduce()
    for _ in range(50):
        connection._next_ping = 0.0
        connection.beat()
        connection.send(Heartbeat(signatures=["kept"]))
        connection._next_ping = 0.0
        connection.beat()
        assert set(connection.receive(10.0, lambda: False).expiry) == {"kept"}


class MappedNothing:
    def close(self):
        pass


class Loopback:
    """As much of a transport as the side channel takes."""

    host = "127.0.0.1"

    def connect(self, peer, timeout, aborted):
        return connect(peer, LOOPBACK, timeout, aborted)

    def open(self, connection, welcome):
        return MappedNothing()


class TestAnswers:
    @pytest.fixture
    def pools(self, side):
        hello = Hello(version=PROTOCOL_VERSION, engine_id="consumer", pool=POOL, transport="nixl")
        made = PeerPools(Loopback(), hello, None, MonotonicClock(), 30.0, 3600.0)
        yield made
        made.close()

    def ask(self, side, pools, name):
        return set(pools.ask(side.address, Heartbeat(signatures=[name]), lambda: False).expiry)

    def assert_sound(self, side, pools):
        for name in ("first", "second"):
            side.leases.grant(name, name)
            assert self.ask(side, pools, name) == {name}

    @pytest.mark.parametrize("surplus", [Leases(expiry={}), Announced()])
    def test_one_too_many_costs_the_connection_and_shifts_no_other(self, side, pools, surplus):
        answer = side.desk.answer

        def twice(session, body):
            message = answer(session, body)
            if isinstance(message, Leases):
                session.socket.send(framed(encode(message)))
                return surplus
            return message

        side.desk.answer = twice
        pool = pools.get(side.address, lambda: False)
        self.ask(side, pools, "first")
        side.desk.answer = answer
        with pool.lock:
            wait_for(pool.connection.has_unasked)
        with pytest.raises(KVTransferError, match="unasked, expected Leases"):
            self.ask(side, pools, "second")
        assert not pool.alive
        self.assert_sound(side, pools)

    def test_one_of_another_type_costs_the_connection(self, side, pools):
        answer = side.desk.answer
        side.desk.answer = lambda session, body: Announced() if isinstance(message := answer(session, body), Leases) else message
        pool = pools.get(side.address, lambda: False)
        with pytest.raises(KVTransferError, match="answered Heartbeat with Announced, expected Leases"):
            self.ask(side, pools, "first")
        assert not pool.alive
        assert not pools.is_silent(side.address)
        side.desk.answer = answer
        self.assert_sound(side, pools)


def test_it_works_over_ipv6():
    side = Side(host=LOOPBACK_6)
    try:
        side.assert_serves()
    finally:
        side.close()


def test_heartbeats_and_notices_reach_the_leases(side):
    side.leases.grant("kept", "a request")
    _, connection = side.introduce()
    connection.send(Heartbeat(signatures=["kept", "never"]))
    answer = connection.receive(10.0, lambda: False)
    assert set(answer.expiry) == {"kept"}
    connection.send(Done(signature="kept"))
    connection.send(Heartbeat(signatures=["kept"]))
    assert connection.receive(10.0, lambda: False) == Leases(expiry={})


def test_hosts_that_are_not_allowed_are_not_heard(caplog):
    side = Side(allowed=("192.0.2.1",))
    try:
        for _ in range(3):
            assert is_dropped(side.raw())
        assert side.desk.foreign == 3
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    finally:
        side.close()


def test_hosts_that_are_not_allowed_are_not_called(side):
    with pytest.raises(KVTransferError, match="allowed_hosts"):
        side.connect(PeerAddress(side.engine_id, 0, "192.0.2.1", 4000))
    with pytest.raises(KVTransferError, match="remote_host and remote_port"):
        side.connect(PeerAddress(side.engine_id))


def test_it_listens_on_loopback_only(side):
    assert side.listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["..", "a" * 70])
class TestWhatCannotBeAHostsName:
    def test_is_named_where_we_listen(self, host):
        with pytest.raises(ConfigError, match="host") as error:
            listen(host, 0)
        assert repr(host) in str(error.value)

    def test_is_named_among_the_allowed_ones(self, side, host):
        with pytest.raises(ConfigError, match="allowed_hosts") as error:
            admit_from(["127.0.0.1", host])
        assert repr(host) in str(error.value)
        with pytest.raises(KVTransferError, match="allowed_hosts") as error:
            side.connect(allowed=[host])
        assert repr(host) in str(error.value)

    def test_is_no_place_to_call(self, side, host):
        with pytest.raises(KVTransferError, match="cannot be reached"):
            side.connect(PeerAddress(side.engine_id, 0, host, 4000), allowed=[host])


def test_a_port_in_use_is_a_config_error(side):
    with pytest.raises(ConfigError, match="another 'port'"):
        listen("127.0.0.1", side.port)


def test_nobody_there_is_noticed_at_once(side):
    with pytest.raises(PeerGoneError, match="cannot be reached"):
        side.connect(PeerAddress(side.engine_id, 0, "127.0.0.1", 1))


def test_a_peer_that_ends_is_noticed(side):
    _, connection = side.introduce()
    assert connection.alive
    side.server.close()
    with pytest.raises(KVTransferError, match="lost"):
        connection.receive(30.0, lambda: False)
    assert not connection.alive


class TestSecret:
    def test_both_know_it(self, guarded):
        assert guarded.introduce(SECRET)[0].engine_id == guarded.engine_id

    @pytest.mark.parametrize("ours", [None, b"another"])
    def test_who_does_not_know_it_is_refused(self, guarded, ours):
        with pytest.raises(PeerMismatchError, match="secret"):
            guarded.introduce(ours)

    def test_who_asks_for_no_proof_is_refused(self, side):
        with pytest.raises(PeerMismatchError, match="asks for no proof"):
            side.introduce(SECRET)

    def test_a_recorded_proof_fits_no_other_challenge(self, guarded):
        nonce = secrets.token_bytes(NONCE_BYTES)
        hello = encode(Hello(version=PROTOCOL_VERSION, engine_id="x", pool=POOL, transport="nixl", nonce=nonce))
        raw = guarded.raw()
        first = ask(raw, hello)
        assert isinstance(first, Challenge)
        proof = Proof(proof=prove(SECRET, "client", first.nonce, nonce, "x"))
        assert isinstance(ask(raw, encode(proof)), Welcome)
        again = guarded.raw()
        assert ask(again, hello).nonce != first.nonce
        assert isinstance(ask(again, encode(proof)), Refused)

    def test_our_own_proof_sent_back_is_refused(self, guarded):
        nonce = secrets.token_bytes(NONCE_BYTES)
        raw = guarded.raw()
        challenge = ask(raw, encode(Hello(version=PROTOCOL_VERSION, engine_id="x", pool=POOL, transport="nixl", nonce=nonce)))
        assert isinstance(ask(raw, encode(Proof(proof=challenge.proof))), Refused)

    def test_a_proof_that_nobody_asked_for_is_refused(self, guarded):
        raw = guarded.raw()
        raw.sendall(framed(encode(Proof(proof=b"x"))))
        assert is_dropped(raw)
        assert guarded.desk.malformed == 1


def test_another_transport_is_refused_with_both_names(side):
    raw = side.raw()
    answer = ask(raw, encode(Hello(version=PROTOCOL_VERSION, engine_id="x", pool=POOL)))
    assert "'nixl'" in answer.reason
    assert "'shared_memory'" in answer.reason


def test_a_pool_that_differs_is_refused_with_both_values(side):
    with pytest.raises(PeerMismatchError) as error:
        side.introduce(pool=msgspec.structs.replace(POOL, dtype="float32"))
    assert "'float32'" in str(error.value)
    assert "'bfloat16'" in str(error.value)


def test_an_answer_by_another_engine_is_refused(side):
    with pytest.raises(PeerMismatchError, match="was expected"):
        side.introduce(engine_id="another")


def test_many_sessions_are_forgotten_the_longest_silent_first(side, monkeypatch):
    monkeypatch.setattr(pool_server, "_MAX_CONNECTIONS", 3)
    connections = [side.introduce()[1] for _ in range(5)]
    assert len(side.desk._introduced) == 3
    for connection in connections[:2]:
        with pytest.raises(KVTransferError, match="lost"):
            connection.receive(10.0, lambda: False)


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


@pytest.mark.parametrize("connect", [socket.socketpair, tcp_pair], ids=["unix", "tcp"])
def test_a_peer_that_has_closed_is_gone_although_words_of_it_are_unread(connect):
    ours, theirs = connect()
    with contextlib.closing(channel_module.Channel(ours)) as channel, theirs:
        theirs.send(b"unread")
        assert channel.alive
        theirs.close()
        assert not channel.alive
        channel.close()
        assert not channel.alive
