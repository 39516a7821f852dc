"""The pushing threads: who is told what, and when, whatever is withdrawn, cancelled, ended or fails in between."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
from kv_support import Point, makes, run_in_thread
from push_support import wait_for

from interlock.core.errors import KVTransferError
from interlock.graphs import NATIVE_FUNCTIONS
from interlock.graphs.timeline import Timelines
from interlock.kernels import native
from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.connectors import push_sender
from interlock.kv_transfer.connectors.peer_messages import PushChunk
from interlock.kv_transfer.connectors.push_sender import PushSender
from interlock.kv_transfer.handshake import Announce, Cancel, Pushed, decode
from interlock.kv_transfer.references import TransferName
from interlock.kv_transfer.transports.copy_worker import PoolShape
from interlock.kv_transfer.transports.transport import PeerGoneError

SIZE = 4
LAYER_BYTES = 1 << 12
LAYERS = range(3)
BLOCK_BYTES = 2 * SIZE
NUM_BLOCKS = 16
TOKENS = 8  # of each prompt, in two blocks
BLOCKS = {"a": (1, 2), "b": (3, 4), "first": (5, 6)}  # ours and the consumer's, by transfer


class Consumers:
    """Consumers whose transfers end when they are waited for. log: what happened, as (what, transfer or consumer, ...); hooks: what is
    done at such a point, once."""

    def __init__(self, writes):
        self.writes = writes
        self.log, self.hooks = [], {}
        self.names = {}  # of transfers, by nonce

    def happen(self, *what):
        self.log.append(what)
        self.hooks.pop(what, lambda: None)()

    def get(self, peer, aborted):
        return Pool(self)

    def tell(self, peer, message):
        self.say(message)

    def say(self, message):
        name = self.names[message.nonce]
        if isinstance(message, Pushed):
            self.happen("pushed", name, message.layer, message.start, message.stop)
        else:
            self.happen("ended", name, message.reason)


class Pool:
    def __init__(self, consumers):
        self._consumers = consumers
        self.description = SimpleNamespace(block_size=SIZE)
        self.memory = self

    def layer_address(self, layer):
        return layer * LAYER_BYTES

    def check_epoch(self, epoch): ...

    def check_blocks(self, block_ids):
        if max(block_ids) >= NUM_BLOCKS:
            raise KVTransferError(f"block {max(block_ids)} is beyond the pool")

    def post(self, operation, descriptors, abort):
        layer, offset = divmod(int(descriptors[0, 0]), LAYER_BYTES)
        name = next((name for name, blocks in BLOCKS.items() if offset // BLOCK_BYTES in blocks), "nobody")
        return Transfer(self._consumers, name, layer)

    def tell(self, data):
        self._consumers.say(decode(data))


class Transfer:
    def __init__(self, consumers, name, layer):
        self._consumers, self._name, self._layer = consumers, name, layer

    def wait(self, aborted):
        self._consumers.happen("write", self._name, self._layer)
        if aborted():
            raise KVTransferError("the write was stopped")
        self._consumers.happen("written", self._name, self._layer)


class Sender:
    """Nonces are given to announcements from 1 on. waited: by layer, set when a push has come to its wait for the layer."""

    def __init__(self, writes=True):
        native.load(NATIVE_FUNCTIONS)
        self.consumers = Consumers(writes)
        self.written = Timelines(len(LAYERS))
        self.waited = [threading.Event() for _ in LAYERS]
        shape = PoolShape([layer * LAYER_BYTES for layer in LAYERS], SIZE, 1, 1)
        self.sender = PushSender(self.consumers, self.consumers, self, shape)
        self.points = []

    def hold(self, *what):
        point = self.consumers.hooks[what] = Point()
        self.points.append(point)
        return point

    def fail(self, *what, error=KVTransferError):
        def fail():
            raise error("no route")

        self.consumers.hooks[what] = fail

    def wait(self, layer, stamp, timeout):
        self.waited[layer].set()
        return self.written.wait(layer, stamp, timeout)

    def write(self, stamp=1, layers=LAYERS):
        for layer in layers:
            self.written.advance(layer, stamp)

    def add(self, name="a", start=0, stop=TOKENS, stamp=1):
        self.sender.add([PushChunk(name_of(name), start, stop, stamp, BLOCKS[name], (0, 0))])

    def announce(self, name="a", consumer="c", **changes):
        """The refusal, or None."""
        nonce = len(self.consumers.names) + 1
        self.consumers.names[nonce] = name
        fields = {
            "transfer_id": name,
            "nonce": nonce,
            "engine_id": consumer,
            "rank": 0,
            "epoch": 1,
            "host": None,
            "port": None,
            "start": 0,
            "stop": TOKENS,
            "block_ids": list(BLOCKS[name]),
            "num_tokens": TOKENS,
            "token_digest": "",
        }
        return self.sender.announce(Announce(**(fields | changes)))

    def cancel(self, nonce=1):
        return self.sender.cancel(Cancel(transfer_id=self.consumers.names[nonce], nonce=nonce))

    def end(self, name="a", reason="it was preempted"):
        return self.sender.end(name_of(name), reason)

    def settle(self, consumer="c"):
        """Returns when nothing is left to do for a consumer."""
        wait_for(lambda: not self.sender._lanes.is_busy((consumer, 0, None, None)))

    def told(self, what="pushed"):
        """What consumers were told, and the log is forgotten."""
        log = [entry[1:] for entry in self.consumers.log if entry[0] == what]
        self.consumers.log.clear()
        return log


def name_of(name):
    return TransferName(name, TOKENS, "")


def whole(name="a"):
    return [(name, layer, 0, TOKENS) for layer in LAYERS]


@pytest.fixture
def make():
    with makes(Sender, "sender") as make_one:
        yield make_one


@pytest.fixture
def sender(make):
    return make()


both = pytest.mark.parametrize("writes", [True, False], ids=["writes", "tells"])


class TestAnnouncements:
    @both
    def test_either_may_come_first(self, make, writes):
        sender = make(writes)
        sender.write()
        sender.add("a")
        assert sender.announce("a") is None
        assert sender.announce("b") is None
        sender.settle()
        sender.add("b")
        sender.settle()
        assert sender.told() == [*whole("a"), *whole("b")]

    def test_one_that_asks_for_more_than_the_prompt_is_refused(self, sender):
        sender.add()
        assert f"positions up to {TOKENS + 1}" in sender.announce(stop=TOKENS + 1)
        assert sender.announce() is None

    def test_one_that_came_first_and_asks_for_more_than_the_prompt_is_told_so_when_the_prompt_is_there(self, sender):
        sender.write()
        assert sender.announce(stop=TOKENS + 1) is None
        sender.add()
        sender.settle()
        ((name, reason),) = sender.told("ended")
        assert name == "a"
        assert f"positions up to {TOKENS + 1}" in reason
        assert sender.announce() is None
        sender.settle()
        assert sender.told() == whole()

    @pytest.mark.parametrize("is_here", [True, False])
    def test_a_second_one_is_refused(self, sender, is_here):
        if is_here:
            sender.add()
        assert sender.announce() is None
        assert "was announced before" in sender.announce()

    def test_the_oldest_of_too_many_that_nobody_here_has_heard_of_ends(self, sender, monkeypatch):
        monkeypatch.setattr(push_sender, "_MAX_EARLY", 1)
        assert sender.announce("a") is None
        assert sender.announce("b") is None
        sender.settle()
        ((name, reason),) = sender.told("ended")
        assert name == "a"
        assert "too many announcements" in reason
        assert sender.announce("a") is None

    @pytest.mark.parametrize("change", [{"block_ids": [1]}, {"block_ids": [1, 2, 3]}, {"block_ids": [1, NUM_BLOCKS]}], ids=str)
    def test_one_for_blocks_that_do_not_fit_gets_nothing_and_is_told_so(self, sender, change):
        sender.write()
        sender.add()
        assert sender.announce(**change) is None
        sender.settle()
        assert [entry[0] for entry in sender.consumers.log] == ["ended"]
        assert sender.sender.failed == 1

    def test_one_that_comes_after_the_end_is_refused_with_its_reason_while_the_end_is_remembered(self, sender, monkeypatch):
        monkeypatch.setattr(push_sender, "_REMEMBERED_ENDS", 1)
        assert sender.end("a", "it was aborted")
        assert sender.announce("a") == "it was aborted"
        assert sender.end("b", "it was aborted too")
        assert sender.announce("b") == "it was aborted too"
        assert sender.announce("a") is None


class TestEnds:
    def test_a_transfer_of_which_a_layer_is_missing_has_not_been_completed(self, sender):
        sender.write(layers=[0])
        sender.add()
        sender.announce()
        assert sender.waited[1].wait(60)
        assert not sender.end()
        sender.settle()
        assert sender.end()
        sender.settle()
        assert sender.told("ended") == [("a", "it was preempted")]

    def test_of_one_that_is_complete_nothing_more_is_said(self, sender):
        sender.write()
        sender.add()
        sender.announce()
        sender.settle()
        assert sender.end()
        sender.settle()
        assert sender.told("ended") == []

    def test_one_that_was_announced_and_never_begun_is_told_once(self, sender):
        sender.announce()
        assert sender.end()
        sender.settle()
        assert sender.told("ended") == [("a", "it was preempted")]
        sender.write()
        sender.add()
        assert sender.announce() is None
        sender.settle()
        assert sender.told() == whole()

    def test_a_consumer_that_stands_still_holds_it_up_for_a_while_from_its_first_call_on(self, sender, monkeypatch):
        clock = VirtualClock()
        clock.advance(1.0)
        monkeypatch.setattr(push_sender, "time", SimpleNamespace(monotonic=clock.now))
        held = sender.hold("write", "a", 0)
        sender.write()
        sender.add()
        sender.announce()
        assert held.arrived.wait(60)
        for _ in range(4):
            assert not sender.end()
            clock.advance(push_sender._QUIESCENT_SECONDS / 4)
        assert sender.end()
        held.go_on.set()
        sender.settle()
        assert sender.told() == []

    def test_the_one_that_is_remembered_longest_is_the_last(self, sender, monkeypatch):
        monkeypatch.setattr(push_sender, "_REMEMBERED_ENDS", 2)
        for name in ("a", "b"):
            assert sender.end(name, "it was aborted")
        sender.add("a")
        for name in ("a", "first"):
            assert sender.end(name, "it was aborted too")
        assert sender.announce("b") is None
        assert sender.announce("a") == "it was aborted too"

    def test_what_was_to_come_again_does_not_after_an_end(self, sender, monkeypatch):
        monkeypatch.setattr(push_sender, "_QUIESCENT_SECONDS", 0.01)
        held = sender.hold("write", "a", 0)
        sender.write()
        sender.add()
        sender.announce()
        assert held.arrived.wait(60)
        sender.sender.withdraw([name_of("a")])
        monkeypatch.setattr(push_sender, "_QUIESCENT_SECONDS", 60.0)
        sender.add()
        assert not sender.end()
        held.go_on.set()
        sender.settle()
        assert sender.told() == []
        assert sender.end()

    @pytest.mark.parametrize("error", [KVTransferError, PeerGoneError])
    def test_a_consumer_that_cannot_be_told_of_one_is_told_of_the_others(self, sender, error):
        with held_lane(sender):
            for name in ("a", "b"):
                sender.announce(name)
                sender.end(name, "it is over")
            sender.fail("ended", "a", "it is over", error=error)
        sender.settle()
        assert sender.told("ended") == [("first", "it is over"), ("a", "it is over"), ("b", "it is over")]


class TestFailures:
    def test_a_push_that_fails_is_told_counted_and_not_gone_on_with(self, sender):
        sender.fail("write", "a", 1)
        sender.write()
        sender.add(stop=4)
        sender.announce()
        sender.settle()
        assert sender.sender.failed == 1
        log = [entry for entry in sender.consumers.log if entry[0] in ("pushed", "ended")]
        assert log == [("pushed", "a", 0, 0, 4), ("ended", "a", "the producer could not push: no route")]
        sender.consumers.log.clear()
        sender.add(start=4)
        sender.settle()
        assert sender.consumers.log == []

    def test_its_blocks_are_given_back_although_another_push_to_its_consumer_is_held_up(self, sender):
        sender.fail("write", "a", 0)
        held = sender.hold("write", "b", 0)
        take_both_at_once(sender)
        assert held.arrived.wait(60)
        assert sender.cancel(2)
        assert sender.end("a")
        assert not sender.cancel(3)
        assert not sender.end("b")

    def test_they_are_given_back_once(self, sender):
        """Another consumer's push of them, which has begun since, keeps them."""
        sender.fail("write", "a", 0)
        held = sender.hold("write", "b", 0)
        take_both_at_once(sender)
        assert held.arrived.wait(60)
        assert sender.cancel(2)
        others = sender.hold("write", "a", 0)
        assert sender.announce("a", "other") is None
        assert others.arrived.wait(60)
        held.go_on.set()
        sender.settle()
        assert not sender.end("a")
        others.go_on.set()
        sender.settle("other")
        assert sender.end("a")


@contextlib.contextmanager
def held_lane(sender, consumer="c", name="first"):
    """Until the end, the consumer's thread tells of an end; what is asked of it meanwhile it takes up together. Takes a nonce."""
    held = sender.hold("ended", name, "it is over")
    sender.announce(name, consumer)
    sender.end(name, "it is over")
    assert held.arrived.wait(60)
    yield
    held.go_on.set()


def take_both_at_once(sender):
    """A thread takes up the pushes of a and b together, nonces 2 and 3."""
    sender.write()
    with held_lane(sender):
        for name in ("a", "b"):
            sender.add(name)
            sender.announce(name)


def test_a_thread_pushes_to_its_own_consumer_alone(sender):
    sender.write()
    sender.add("a")
    with held_lane(sender, "other"):
        with held_lane(sender, "c", "b"):
            sender.announce("a", "other")
        sender.settle("c")
        assert sender.told() == []
    sender.settle("other")
    assert sender.told() == whole()


class TestCancels:
    def test_one_under_way_is_over_when_its_push_has_stopped_and_the_next_gets_everything(self, sender):
        held = sender.hold("write", "a", 1)
        sender.write()
        sender.add()
        sender.announce()
        assert held.arrived.wait(60)
        assert not sender.cancel()
        assert "was announced before" in sender.announce("a", "other")
        held.go_on.set()
        sender.settle()
        assert sender.told() == whole()[:1]
        assert sender.announce("a", "other") is None
        assert sender.cancel()
        sender.settle("other")
        assert sender.told() == whole()

    def test_one_that_is_not_under_way_is_over_at_once_and_the_next_gets_everything(self, sender):
        sender.write()
        sender.add(stop=4)
        sender.announce()
        sender.settle()
        assert sender.cancel()
        assert sender.announce("a", "other") is None
        sender.add(start=4)
        sender.settle("other")
        pushed = sender.told()
        assert [entry for entry in pushed if entry[2:] == (0, 4)] == [("a", layer, 0, 4) for layer in LAYERS] * 2
        assert [entry for entry in pushed if entry[2:] == (4, TOKENS)] == [("a", layer, 4, TOKENS) for layer in LAYERS]

    def test_one_that_nobody_here_has_heard_of_is_forgotten(self, sender):
        sender.announce()
        assert sender.cancel()
        assert sender.announce() is None

    def test_an_engine_that_shuts_down_promises_nothing(self, sender):
        sender.sender.close()
        assert not sender.sender.cancel(Cancel(transfer_id="a", nonce=1))
        assert "shutting down" in sender.announce()


class TestWithdrawals:
    def test_it_returns_when_nothing_is_read_any_more(self, sender, monkeypatch):
        monkeypatch.setattr(push_sender, "_QUIESCENT_SECONDS", 3600.0)
        held = sender.hold("write", "a", 0)
        sender.write()
        sender.add()
        sender.announce()
        assert held.arrived.wait(60)
        withdrawing, _ = run_in_thread(lambda: sender.sender.withdraw([name_of("a")]))
        (push,) = sender.sender._pushes.values()
        wait_for(lambda: push.stopped)
        assert withdrawing.is_alive()
        held.go_on.set()
        withdrawing.join(60)
        assert not withdrawing.is_alive()
        assert sender.told() == []

    @pytest.mark.parametrize("point", [("write", "a", 1), ("written", "a", 1), ("pushed", "a", 1, 0, 4)], ids=lambda point: point[0])
    def test_what_is_under_way_comes_again(self, make, monkeypatch, point):
        monkeypatch.setattr(push_sender, "_QUIESCENT_SECONDS", 0.01)
        writes = point[0] != "pushed"
        sender = make(writes)
        held = sender.hold(*point)
        sender.write()
        sender.add(stop=4)
        sender.add(start=4)
        sender.announce()
        assert held.arrived.wait(60)
        sender.sender.withdraw([name_of("a")])
        sender.consumers.log.clear()
        sender.add()
        held.go_on.set()
        sender.settle()
        assert sorted(sender.told()) == (whole() if not writes else [("a", 1, 0, TOKENS), ("a", 2, 0, TOKENS)])

    def test_one_that_has_come_again_stays_stopped_when_it_fails(self, sender, monkeypatch):
        monkeypatch.setattr(push_sender, "_QUIESCENT_SECONDS", 0.01)
        held = sender.hold("write", "a", 0)
        sender.write()
        sender.add(stop=4)
        sender.announce()
        assert held.arrived.wait(60)
        sender.sender.withdraw([name_of("a")])
        held.go_on.set()
        sender.settle()
        sender.fail("write", "a", 0)
        sender.add(stop=4)
        sender.settle()
        assert sender.told("ended") == [("a", "the producer could not push: no route")]
        sender.add(start=4)
        sender.settle()
        assert sender.consumers.log == []


def test_an_engine_closes_although_a_push_waits_for_a_layer_that_is_never_written(sender):
    sender.add()
    sender.announce()
    assert sender.waited[0].wait(60)
    closing, _ = run_in_thread(sender.sender.close)
    closing.join(60)
    assert not closing.is_alive()
    assert sender.told() == []
