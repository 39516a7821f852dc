"""One connection: what a peer that sends without end, or takes nothing, can do with who waits for it."""

import contextlib
import os
import socket
import struct
import threading

import pytest

from interlock.core.errors import KVTransferError
from interlock.kv_transfer.handshake import MAX_MESSAGE_BYTES, Heartbeat, Leases, encode
from interlock.kv_transfer.transports.channel import Channel

LENGTH = struct.Struct("<I")


@contextlib.contextmanager
def fed(head, data, times=None):
    """A channel whose peer sends `head`, then `data` again and again, as fast as it is taken; and an event that some of it was sent."""
    ours, theirs = socket.socketpair()
    begun = threading.Event()

    def feed():
        with contextlib.suppress(OSError):
            theirs.sendall(head)
            count = 0
            while times is None or count < times:
                theirs.sendall(data)
                count += 1
                begun.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    with contextlib.closing(Channel(ours)) as channel:
        yield channel, begun
    feeder.join()
    theirs.close()


ENDLESS = {"signs of life": (b"", LENGTH.pack(0)), "one message": (LENGTH.pack(MAX_MESSAGE_BYTES), b"x")}


@pytest.mark.parametrize("kind", ENDLESS)
class TestAPeerThatSendsWithoutEnd:
    def test_does_not_put_a_deadline_off(self, kind):
        with fed(*ENDLESS[kind]) as (channel, _), pytest.raises(KVTransferError, match="did not answer in time"):
            channel.receive(0.01, lambda: False)

    def test_does_not_put_an_abort_off(self, kind):
        with fed(*ENDLESS[kind]) as (channel, begun), pytest.raises(KVTransferError, match="given up"):
            channel.receive(3600.0, begun.is_set)


def test_an_answer_behind_many_signs_of_life_arrives():
    message = encode(Leases(expiry={}))
    with fed(LENGTH.pack(0) * 50_000 + LENGTH.pack(len(message)) + message, b"", times=0) as (channel, _):
        assert channel.receive(30.0, lambda: False) == Leases(expiry={})


def test_a_peer_that_takes_a_message_slowly_does_not_put_a_deadline_off_and_what_it_got_in_part_breaks_the_connection():
    ours, theirs = socket.socketpair()

    def take():
        while theirs.recv(4096):
            pass

    taker = threading.Thread(target=take)
    taker.start()
    with contextlib.closing(Channel(ours)) as channel:
        assert channel.alive
        with pytest.raises(KVTransferError, match="in time"):
            channel.send(Heartbeat(signatures=["x" * (16 << 20)]), timeout=0.0)
        assert not channel.alive
        with pytest.raises(KVTransferError, match="in part"):
            channel.receive(3600.0, lambda: False)
    taker.join()
    theirs.close()


def test_a_peer_that_floods_us_counts_as_lost_and_is_held_within_bounds():
    with fed(b"", LENGTH.pack(4000) + bytes(4000)) as (channel, _):
        while channel.alive:
            channel.beat()
        for _ in range(10):
            channel.beat()
        assert channel.buffered < MAX_MESSAGE_BYTES + (1 << 17)


def test_a_peer_that_passes_descriptors_with_its_signs_of_life_counts_as_lost_and_they_are_closed():
    ours, theirs = socket.socketpair()
    read_end, write_end = os.pipe()
    with theirs:
        with contextlib.closing(Channel(ours)) as channel:
            while channel.alive:
                socket.send_fds(theirs, [LENGTH.pack(0)], [write_end, write_end])
                channel.beat()
        os.close(write_end)
        assert os.read(read_end, 1) == b""
        os.close(read_end)


@pytest.mark.parametrize(("data", "is_message"), [(b"", False), (bytes(4), False), (bytes(9), False), (b"\x05", True), (bytes(6) + b"\x01", True)])
def test_a_message_that_has_begun_is_told_from_signs_of_life(data, is_message):
    ours, theirs = socket.socketpair()
    with contextlib.closing(Channel(ours)) as channel, theirs:
        theirs.sendall(data)
        assert channel.has_unasked() == is_message
