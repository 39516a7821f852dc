"""The consumer's side of pushes: when a load has landed or failed and nothing can write its blocks any more, whoever is silent or gone."""

import threading
from types import SimpleNamespace

import pytest
from kv_support import Point, makes, run_in_thread
from push_support import wait_for

from interlock.core.errors import KVTransferError
from interlock.core.step import LoadPromise
from interlock.kv_transfer.connectors import push_receiver
from interlock.kv_transfer.connectors.push_receiver import PushReceiver
from interlock.kv_transfer.handshake import Announce, Announced, Cancelled, Pushed, PushEnded
from interlock.kv_transfer.references import RemoteReference
from interlock.kv_transfer.transports.copy_worker import PoolShape
from interlock.kv_transfer.transports.transport import PeerAddress, PeerGoneError

SIZE = 4
LAYERS = range(3)
BLOCKS = {"a": (1, 2), "b": (3, 4)}  # ours and the producer's, by transfer
EPOCH = 5
NUM_BLOCKS = 16


class Producer:
    """A producer, and the transport that it is reached over. log: what happened, as (what, ...); hooks: what is done at such a point,
    once, instead of the answer if it gives one; ended: its answer to those who cancel; stands: whether a connection to it stands."""

    def __init__(self, writes):
        self.writes = writes
        self.log, self.hooks = [], {}
        self.ended, self.stands, self.silent = True, True, False
        self.refusal, self.void = None, None
        self.pool = Pool(self)

    def happen(self, *what):
        self.log.append(what)
        return self.hooks.pop(what, lambda: None)()

    def get(self, peer, aborted):
        self.happen("meet")
        return self.pool

    def ask(self, peer, message, aborted):
        if isinstance(message, Announce):
            return self.happen("announce", message.transfer_id) or Announced(refusal=self.refusal)
        return self.happen("cancel", message.transfer_id) or Cancelled(nonce=message.nonce, ended=self.ended)

    def is_alive(self, peer):
        return self.stands

    def is_silent(self, peer):
        return self.silent

    def drain(self):
        self.happen("drain")


class Pool:
    """One connection to the producer."""

    def __init__(self, producer):
        self._producer = producer
        self.epoch, self.alive = EPOCH, True
        self.description = SimpleNamespace(block_size=SIZE)
        self.memory = self

    def lease_of(self, reference): ...

    def check_epoch(self, epoch):
        if epoch != self.epoch:
            raise KVTransferError(f"epoch {epoch} is meant, it is in {self.epoch} now")

    def check_blocks(self, block_ids):
        if max(block_ids) >= NUM_BLOCKS:
            raise KVTransferError(f"block {max(block_ids)} is beyond the pool")

    def layer_address(self, layer):
        return layer << 12

    def post(self, operation, descriptors, abort):
        layer = int(descriptors[0, 1]) >> 12
        self._producer.happen("post", layer)
        return Transfer(self._producer, layer, abort)

    def confirm(self, epoch, block_ids, generations):
        self._producer.happen("confirm")
        return self._producer.void


class Transfer:
    """A copy, which sees its abort word."""

    def __init__(self, producer, layer, abort):
        self._producer, self._layer, self._abort = producer, layer, abort

    def wait(self, aborted):
        self._producer.happen("copy", self._layer)
        if self._abort.numpy()[0]:
            assert aborted()
            raise KVTransferError("the copy was stopped")
        self._producer.happen("copied", self._layer)


class Target:
    """ends: (layer, cause or None), in their order."""

    def __init__(self, producer, name):
        self._producer, self._name = producer, name
        self.ends, self.ended = [], threading.Event()

    def end_layer(self, layer, error=None):
        self.ends.append((layer, error))
        self._producer.happen("landed" if error is None else "failed", self._name, layer)
        if len(self.ends) == len(LAYERS):
            self.ended.set()

    @property
    def causes(self):
        """Of all layers, when they have ended."""
        assert self.ended.wait(60)
        assert sorted(layer for layer, _ in self.ends) == list(LAYERS)
        return {cause for _, cause in self.ends}


class Receiver:
    def __init__(self, writes=True):
        self.producer = Producer(writes)
        shape = PoolShape([layer << 12 for layer in LAYERS], SIZE, 1, 1)
        self.receiver = PushReceiver(self.producer, self.producer, PeerAddress("us"), shape)
        self.points, self.late = [], []

    def hold(self, *what):
        point = self.producer.hooks[what] = Point()
        self.points.append(point)
        return point

    def fail(self, *what, error=KVTransferError):
        def fail():
            raise error("no route")

        self.producer.hooks[what] = fail

    def submit(self, name="a"):
        """Its target; the request's load is known as the name."""
        target = Target(self.producer, name)
        reference = RemoteReference(
            engine_id="p",
            rank=0,
            epoch=0,
            request_id=name,
            block_ids=(),
            generations=(),
            block_size=SIZE,
            num_tokens=2 * SIZE,
            token_digest="",
            expiry=0.0,
            push=True,
        )
        self.receiver.submit(name, LoadPromise(name, 0, 2 * SIZE, BLOCKS[name]), reference, target)
        return target

    def announced(self, name="a"):
        """As `submit`, and the producer has been told."""
        target = self.submit(name)
        self.settle()
        return target

    def incoming(self, name="a"):
        return next(incoming for incoming in self.receiver._incoming.values() if incoming.key == name)

    def push(self, layer, name="a", **changes):
        """The producer says that a layer is there."""
        fields = {"transfer_id": name, "nonce": self.incoming(name).nonce, "layer": layer, "start": 0, "stop": 2 * SIZE}
        if not self.producer.writes:
            fields |= {"block_ids": list(BLOCKS[name]), "generations": [0, 0]}
        self.receiver.pushed(Pushed(**(fields | changes)))

    def say_end(self, name="a"):
        self.receiver.pushed(PushEnded(transfer_id=name, nonce=self.incoming(name).nonce, reason="it was preempted"))

    def abort(self, timeout, name="a"):
        self.receiver.abort(name, timeout, self.late.extend)

    def settle(self):
        """Returns when nothing is left to do for the producer."""
        wait_for(lambda: not self.receiver._lanes.is_busy(("p", 0, None, None)))

    def count(self, *what):
        return self.producer.log.count(what)

    def assert_order(self, *entries):
        places = [self.producer.log.index(entry) for entry in entries]
        assert places == sorted(places)


@pytest.fixture
def make():
    with makes(Receiver, "receiver") as make_one:
        yield make_one


@pytest.fixture
def unwatched(monkeypatch):
    """Nobody looks after what is awaited, except in what the producer says."""
    monkeypatch.setattr(push_receiver, "_WATCH_SECONDS", 3600.0)


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(push_receiver, "_WATCH_SECONDS", 0.001)


both = pytest.mark.parametrize("writes", [True, False], ids=["writes", "copies"])


@pytest.mark.usefixtures("unwatched")
class TestLandings:
    @both
    def test_each_layer_lands_once_however_often_it_is_pushed(self, make, writes):
        receiver = make(writes)
        target = receiver.announced()
        for layer in (0, 0, 1, 2):
            receiver.push(layer)
        assert target.causes == {None}
        assert receiver.count("copied", 0) == (not writes)
        assert not receiver.receiver._incoming

    def test_a_copy_that_is_queued_twice_is_made_once(self, make):
        receiver = make(writes=False)
        target = receiver.announced()
        held = receiver.hold("copy", 0)
        for layer in (0, 0, 1, 2):
            receiver.push(layer)
        assert held.arrived.wait(60)
        held.go_on.set()
        assert target.causes == {None}
        assert [receiver.count("post", layer) for layer in LAYERS] == [1, 1, 1]

    def test_a_layer_lands_when_its_last_byte_is_there_and_confirmed(self, make):
        receiver = make(writes=False)
        receiver.announced()
        receiver.push(1)
        receiver.settle()
        receiver.assert_order(("copied", 1), ("confirm",), ("landed", "a", 1))

    @pytest.mark.parametrize("change", [{"block_ids": [1]}, {"generations": [0]}, {"block_ids": [1, NUM_BLOCKS]}], ids=str)
    def test_blocks_that_the_producer_cannot_mean_are_not_read(self, make, change):
        receiver = make(writes=False)
        target = receiver.announced()
        receiver.push(0, **change)
        assert len(target.causes) == 1
        assert not receiver.count("post", 0)

    def test_what_was_given_away_before_it_was_confirmed_comes_again(self, make):
        receiver = make(writes=False)
        target = receiver.announced()
        receiver.producer.void = "the producer gave block 1 away"
        receiver.push(0)
        receiver.settle()
        assert target.ends == []
        receiver.producer.void = None
        for layer in LAYERS:
            receiver.push(layer)
        assert target.causes == {None}

    def test_what_cannot_be_confirmed_since_its_connection_is_gone_does_not_come_again(self, make):
        """Though the producer is reached over another connection by then."""
        receiver = make(writes=False)
        target = receiver.announced()
        receiver.producer.void = "the connection to the producer was lost before the read was confirmed"

        def lose():
            receiver.producer.pool.alive = False

        receiver.producer.hooks["confirm",] = lose
        receiver.push(0)
        assert target.causes == {receiver.producer.void}


@pytest.mark.usefixtures("unwatched")
class TestAnnouncements:
    def test_a_refusal_is_the_cause(self, make):
        receiver = make()
        receiver.producer.refusal = "another prompt"
        assert receiver.submit().causes == {"another prompt"}
        assert not receiver.count("cancel", "a")

    @pytest.mark.parametrize("is_silent", [True, False])
    def test_a_producer_that_gives_no_sign_of_life_and_holds_up_one_is_sent_no_other(self, make, is_silent):
        receiver = make()
        held = receiver.hold("announce", "a")
        receiver.submit("a")
        assert held.arrived.wait(60)
        receiver.producer.silent = is_silent
        target = receiver.submit("b")
        assert target.ended.is_set() == is_silent
        held.go_on.set()
        receiver.settle()
        assert receiver.count("announce", "b") == (not is_silent)

    def test_one_that_is_given_up_before_it_was_made_has_failed_and_is_not_made(self, make):
        receiver = make()
        held = receiver.hold("meet")
        target = receiver.submit()
        assert held.arrived.wait(60)
        receiver.receiver.give_up("a")
        assert target.causes == {"the load was given up"}
        held.go_on.set()
        receiver.settle()
        assert not receiver.count("announce", "a")
        assert not receiver.count("cancel", "a")

    def test_one_that_is_given_up_while_it_is_made_fails_when_it_is_cancelled(self, make):
        receiver = make()
        held = receiver.hold("announce", "a")
        target = receiver.submit()
        assert held.arrived.wait(60)
        receiver.receiver.give_up("a")
        assert target.ends == []
        held.go_on.set()
        assert target.causes == {"the load was given up"}
        receiver.assert_order(("announce", "a"), ("cancel", "a"), ("failed", "a", 0))

    @pytest.mark.parametrize("error", [KVTransferError, ZeroDivisionError])
    def test_one_whose_answer_is_lost_fails_when_it_is_cancelled(self, make, error):
        receiver = make()
        receiver.fail("announce", "a", error=error)
        target = receiver.submit()
        (cause,) = target.causes
        assert "no route" in cause
        receiver.assert_order(("announce", "a"), ("cancel", "a"), ("failed", "a", 0))


class TestCancels:
    @pytest.mark.usefixtures("unwatched")
    def test_the_first_cause_is_the_one_that_is_reported(self, make):
        receiver = make()
        target = receiver.announced()
        held = receiver.hold("cancel", "a")
        receiver.say_end("a")
        receiver.receiver.give_up("a")
        held.go_on.set()
        assert target.causes == {"it was preempted"}

    @pytest.mark.usefixtures("unwatched")
    def test_a_producer_that_has_ended_its_push_is_not_asked_and_what_it_had_sent_is_taken_in_first(self, make):
        receiver = make()
        target = receiver.announced()
        receiver.say_end()
        assert target.causes == {"it was preempted"}
        assert not receiver.count("cancel", "a")
        receiver.assert_order(("drain",), ("failed", "a", 0))

    @pytest.mark.usefixtures("unwatched")
    def test_where_only_we_write_our_blocks_the_answer_is_not_waited_for(self, make):
        receiver = make(writes=False)
        target = receiver.announced()
        held = receiver.hold("cancel", "a")
        receiver.receiver.give_up("a")
        assert held.arrived.wait(60)
        assert target.causes == {"the load was given up"}

    @pytest.mark.usefixtures("unwatched")
    def test_a_copy_that_is_being_made_is_stopped_and_those_behind_it_are_not_begun(self, make):
        receiver = make(writes=False)
        target = receiver.announced()
        held = receiver.hold("copy", 0)
        receiver.push(0)
        receiver.push(1)
        assert held.arrived.wait(60)
        receiver.receiver.give_up("a")
        held.go_on.set()
        assert target.causes == {"the load was given up"}
        receiver.settle()
        assert not receiver.count("copied", 0)
        assert not receiver.count("post", 1)

    @pytest.mark.usefixtures("unwatched")
    @pytest.mark.parametrize("error", [None, PeerGoneError])
    def test_of_a_producer_that_is_gone_what_it_had_sent_is_taken_in_first(self, make, error):
        receiver = make()
        target = receiver.announced()
        if error is not None:
            receiver.fail("cancel", "a", error=error)
        receiver.producer.pool.alive = error is not None  # or else it is lost while it answers
        receiver.receiver.give_up("a")
        assert target.causes == {"the load was given up"}
        receiver.assert_order(("cancel", "a"), ("drain",), ("failed", "a", 0))

    @pytest.mark.usefixtures("watched")
    @pytest.mark.parametrize("how", ["not yet", "no answer", "the answer to another"])
    def test_a_producer_that_may_still_write_is_asked_until_it_says_that_it_does_not(self, make, how):
        receiver = make()
        target = receiver.announced()
        last = Point()
        receiver.points.append(last)

        def answer():
            if receiver.count("cancel", "a") == 3:
                last()
            else:
                receiver.producer.hooks["cancel", "a"] = answer
                if how == "no answer":
                    raise KVTransferError("no route")
                return Cancelled(nonce=receiver.incoming().nonce + (how == "the answer to another"), ended=how != "not yet")
            return None

        receiver.producer.hooks["cancel", "a"] = answer
        receiver.receiver.give_up("a")
        assert last.arrived.wait(60)
        for layer in LAYERS:
            receiver.push(layer)
        assert target.ends == []
        last.go_on.set()
        assert target.causes == {"the load was given up"}


class TestAborts:
    @pytest.mark.usefixtures("unwatched")
    def test_it_returns_when_the_producer_has_stopped(self, make):
        receiver = make()
        target = receiver.announced()
        held = receiver.hold("cancel", "a")
        aborting, _ = run_in_thread(lambda: receiver.abort(60.0))
        assert held.arrived.wait(60)
        assert target.ends == []
        held.go_on.set()
        aborting.join()
        assert target.causes == {"the load was given up"}
        assert receiver.late == []

    @pytest.mark.usefixtures("unwatched")
    def test_what_has_not_stopped_by_then_is_reported_when_it_has(self, make):
        receiver = make()
        target = receiver.announced()
        other = receiver.announced("b")
        held = receiver.hold("cancel", "a")
        receiver.abort(0.0)
        assert receiver.late == []
        held.go_on.set()
        assert target.causes == {"the load was given up"}
        receiver.settle()
        assert receiver.late == ["a"]
        assert other.ends == []


@pytest.mark.usefixtures("watched")
class TestWatch:
    @both
    def test_a_producer_that_is_lost_fails_the_load(self, make, writes):
        receiver = make(writes)
        receiver.producer.stands = receiver.producer.pool.alive = False
        target = receiver.submit()
        assert target.causes == {"the connection to the producer was lost before it had pushed everything"}

    def test_a_connection_that_was_replaced_is_met_again_as_often_as_it_is(self, make):
        receiver = make()
        target = receiver.announced()
        for _ in range(3):
            before, now = receiver.producer.pool, Pool(receiver.producer)
            receiver.producer.pool = now
            before.alive = False
            incoming = receiver.incoming()
            wait_for(lambda incoming=incoming, now=now: incoming.pool is now)
        for layer in LAYERS:
            receiver.push(layer)
        assert target.causes == {None}

    def test_another_life_of_the_producer_fails_the_load(self, make):
        receiver = make()
        target = receiver.announced()
        before = receiver.producer.pool
        receiver.producer.pool = Pool(receiver.producer)
        receiver.producer.pool.epoch = EPOCH + 1
        before.alive = False
        assert target.causes == {f"epoch {EPOCH} is meant, it is in {EPOCH + 1} now"}


@pytest.mark.usefixtures("unwatched")
class TestClose:
    def test_it_stops_a_copy_that_is_being_made(self, make):
        receiver = make(writes=False)
        receiver.announced()
        held = receiver.hold("copy", 0)
        receiver.push(0)
        assert held.arrived.wait(60)
        closing, _ = run_in_thread(receiver.receiver.close)
        wait_for(lambda: receiver.receiver._stopping)
        with receiver.receiver._lock:  # it has told everyone
            pass
        held.go_on.set()
        closing.join()
        assert not receiver.count("copied", 0)

    def test_nobody_is_asked_any_more(self, make):
        receiver = make()
        held = receiver.hold("announce", "a")
        receiver.submit()
        assert held.arrived.wait(60)
        receiver.receiver.give_up("a")
        closing, _ = run_in_thread(receiver.receiver.close)
        wait_for(lambda: receiver.receiver._stopping)
        held.go_on.set()
        closing.join()
        assert not receiver.count("cancel", "a")
