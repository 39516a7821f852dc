"""The reading threads: when a layer's end is told, and when a job writes no byte any more, whatever fails, hangs or is given up in between."""

import math
import threading
from types import SimpleNamespace

import pytest
from kv_support import Point, makes

from interlock.core.errors import KVTransferError
from interlock.core.step import LoadPromise
from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.references import RemoteReference
from interlock.kv_transfer.transports.copy_worker import CopyWorker, PoolShape, Read, ReadJob

SIZE = 4
LAYER_BYTES = 1 << 12
LAYERS = range(6)
BLOCK_BYTES = 2 * SIZE
BLOCKS = {"a": 1, "b": 2, "c": 3, "d": 4}  # one each
LEASE_ENDS = 100.0


class Pools:
    """Producers whose transfers end when they are waited for. log: what happened, as (what, request, layer); hooks: what is done at such a
    point, once; what a hook of "confirm" returns is the cause of a failure; repeated, late: ends that were told twice, or of
    a job that was quiescent."""

    def __init__(self):
        self.clock = VirtualClock()
        self.log, self.hooks, self.opened = [], {}, []
        self.repeated, self.late = [], []

    def happen(self, *what):
        self.log.append(what)
        return self.hooks.pop(what, lambda: None)()

    def get(self, peer, aborted):
        self.opened.append(peer.engine_id)
        return Pool(self)

    def lease_end(self, reference):
        return LEASE_ENDS

    def is_silent(self, peer):
        return False


class Pool:
    def __init__(self, pools):
        self._pools = pools
        self._layers = dict.fromkeys(BLOCKS, 0)
        self.description = SimpleNamespace(block_size=SIZE)
        self.memory = self

    def layer_address(self, layer):
        return layer * LAYER_BYTES

    def check_reference(self, reference): ...

    def our_seconds(self, theirs):
        return theirs

    def confirm(self, epoch, block_ids, generations):
        (name,) = (name for name, block in BLOCKS.items() if block == block_ids[0])
        self._layers[name] += 1
        return self._pools.happen("confirm", name, self._layers[name] - 1)

    def post(self, operation, descriptors, abort):
        layer, offset = divmod(int(descriptors[0, 0]), LAYER_BYTES)
        (name,) = (name for name, block in BLOCKS.items() if block == offset // BLOCK_BYTES)
        self._pools.happen("post", name, layer)
        return Transfer(self._pools, name, layer)


class Transfer:
    done = False

    def __init__(self, pools, name, layer):
        self._pools, self._name, self._layer = pools, name, layer

    def wait(self, aborted):
        self._pools.happen("wait", self._name, self._layer)
        if aborted():
            raise KVTransferError("the read was stopped")


class Target:
    """ends: by layer, the cause or None."""

    def __init__(self, pools, name):
        self._pools, self._name = pools, name
        self.ends, self.job = {}, None

    def end_layer(self, layer, error=None):
        if layer in self.ends:
            self._pools.repeated.append((self._name, layer, error))
        if self.job.quiescent.is_set():
            self._pools.late.append((self._name, layer, error))
        self.ends.setdefault(layer, error)
        self._pools.happen("end" if error is None else "fail", self._name, layer)

    @property
    def failed(self):
        return [layer for layer, error in sorted(self.ends.items()) if error is not None]


class Reader:
    def __init__(self):
        self.pools = Pools()
        shape = PoolShape([layer * LAYER_BYTES for layer in LAYERS], SIZE, 1, 1)
        self.worker = CopyWorker(self.pools, self.pools.clock, shape, "interlock-kv-copy")
        self.points = []

    def submit(self, key, **producers):
        """A job that reads a block of each named request, from the producer named; its job, and its targets."""
        targets = [Target(self.pools, name) for name in producers]
        reads = [self.read_of(name, producer, target) for (name, producer), target in zip(producers.items(), targets, strict=True)]
        job = ReadJob(key, reads)
        for target in targets:
            target.job = job
        self.worker.submit(job)
        return job, *targets

    @staticmethod
    def read_of(name, producer, target):
        block = BLOCKS[name]
        reference = RemoteReference(
            engine_id=producer,
            rank=0,
            epoch=1,
            request_id=name,
            block_ids=(block,),
            generations=(0,),
            block_size=SIZE,
            num_tokens=SIZE,
            token_digest="",
            expiry=math.inf,
        )
        return Read(LoadPromise(name, 0, SIZE, (block,)), reference, target)

    def hold(self, *what):
        point = self.pools.hooks[what] = Point()
        self.points.append(point)
        return point

    def fail(self, *what):
        """A post or a wait fails, or what was read is not confirmed."""

        def fail():
            if what[0] == "confirm":
                return "another generation"
            raise KVTransferError("the connection is gone")

        self.pools.hooks[what] = fail

    def index(self, *what):
        return self.pools.log.index(what)


@pytest.fixture
def reader():
    with makes(Reader, "worker") as make:
        made = make()
        yield made
    assert made.pools.repeated == []
    assert made.pools.late == []


def test_a_layer_ends_after_its_last_byte_was_waited_for_and_then_confirmed(reader):
    job, a, b = reader.submit(1, a="p", b="p")
    assert job.quiescent.wait(60)
    for name, target in (("a", a), ("b", b)):
        assert target.ends == dict.fromkeys(LAYERS)
        for layer in LAYERS:
            places = [reader.index(what, name, layer) for what in ("post", "wait", "confirm", "end")]
            assert places == sorted(places)
        assert [entry[2] for entry in reader.pools.log if entry[:2] == ("end", name)] == list(LAYERS)


def test_a_lease_that_ended_before_the_confirmation_is_a_failure_although_the_generations_are_right(reader):
    reader.pools.hooks["wait", "a", 2] = lambda: reader.pools.clock.advance(LEASE_ENDS)
    job, a = reader.submit(1, a="p")
    assert job.quiescent.wait(60)
    assert a.failed == [2, 3, 4, 5]
    assert "lease" in a.ends[2]


@pytest.mark.parametrize("layer", [0, 1, 3, 5])
@pytest.mark.parametrize("what", ["post", "wait", "confirm"])
def test_a_failure_is_told_when_nothing_of_the_read_is_in_flight_any_more(reader, what, layer):
    reader.fail(what, "a", layer)
    job, a, b = reader.submit(1, a="p", b="p")
    assert job.quiescent.wait(60)
    assert a.failed == list(LAYERS)[layer:]
    assert b.ends == dict.fromkeys(LAYERS), "the other read of the producer goes on"
    told = reader.index("fail", "a", layer)
    posted = {entry[2] for entry in reader.pools.log if entry[:2] == ("post", "a")} - ({layer} if what == "post" else set())
    assert posted == {entry[2] for entry in reader.pools.log[:told] if entry[:2] == ("wait", "a")}
    assert not [entry for entry in reader.pools.log[told:] if entry[:2] in (("post", "a"), ("wait", "a"))]


@pytest.mark.parametrize("layer", [0, 1, 3, 5])
@pytest.mark.parametrize("what", ["post", "confirm"])
def test_a_fault_of_our_own_is_told_when_nothing_of_the_job_is_in_flight_any_more(reader, what, layer):
    def raise_fault():
        raise RuntimeError("a fault")

    reader.pools.hooks[what, "a", layer] = raise_fault
    job, a, b = reader.submit(1, a="p", b="p")
    assert job.quiescent.wait(60)
    told = next(index for index, entry in enumerate(reader.pools.log) if entry[0] == "fail")
    posted = [entry[1:] for entry in reader.pools.log if entry[0] == "post" and entry != (what, "a", layer)]
    assert [entry[1:] for entry in reader.pools.log[:told] if entry[0] == "wait"] == posted
    assert [entry for entry in reader.pools.log[told:] if entry[0] in ("post", "wait")] == []
    for target in (a, b):
        assert target.failed[-1] == LAYERS[-1]
        assert "RuntimeError: a fault" in target.ends[LAYERS[-1]]
    reader.pools.repeated.clear()  # whoever is told passes over what has ended
    other, c = reader.submit(2, c="p")
    assert other.quiescent.wait(60)
    assert c.ends == dict.fromkeys(LAYERS)


def test_nothing_is_posted_after_a_read_was_given_up(reader):
    reader.pools.hooks["post", "a", 2] = lambda: reader.worker.give_up(1)
    job, a = reader.submit(1, a="p")
    assert job.quiescent.wait(60)
    assert [entry[2] for entry in reader.pools.log if entry[0] == "post"] == [0, 1, 2]
    assert [entry[2] for entry in reader.pools.log if entry[0] == "wait"] == [0, 1, 2]
    assert a.failed == list(LAYERS)


def test_what_has_not_begun_is_given_up_without_a_wait_for_what_holds_it_up(reader):
    point, late = reader.hold("wait", "a", 0), []
    first, a = reader.submit(1, a="p")
    assert point.arrived.wait(60)
    second, b = reader.submit(2, b="p")
    reader.worker.abort(2, 0.0, late.append)
    assert second.quiescent.is_set()
    assert b.failed == list(LAYERS)
    assert a.ends == {}
    assert not first.quiescent.is_set()
    point.go_on.set()
    assert first.quiescent.wait(60)
    assert a.ends == dict.fromkeys(LAYERS)
    third, c = reader.submit(3, c="p")  # behind it: by then the second one's turn has passed
    assert third.quiescent.wait(60)
    assert c.ends == dict.fromkeys(LAYERS)
    assert [entry for entry in reader.pools.log if entry[1] == "b" and entry[0] != "fail"] == []
    assert late == []


def test_a_job_is_quiescent_when_its_last_producer_has_nothing_in_flight(reader):
    point, late, told = reader.hold("wait", "b", 0), [], threading.Event()
    job, a, b = reader.submit(1, a="p", b="q")
    assert point.arrived.wait(60)
    other, _ = reader.submit(2, c="p")
    assert other.quiescent.wait(60)
    assert a.ends == dict.fromkeys(LAYERS), "its part has ended, since what came later from its producer has"
    assert not job.quiescent.is_set()

    def on_late(req_ids):
        late.append((req_ids, job.quiescent.is_set(), b.failed))
        told.set()

    reader.worker.abort(1, 0.0, on_late)
    assert late == []
    assert not job.quiescent.is_set()
    point.go_on.set()
    assert told.wait(60)
    assert late == [(["a", "b"], True, list(LAYERS))]


def test_an_abort_of_what_has_ended_is_nothing(reader):
    job, _ = reader.submit(1, a="p")
    assert job.quiescent.wait(60)
    reader.worker.abort(1, 60.0, lambda req_ids: pytest.fail(f"{req_ids} are not late"))
    assert not job.aborted


def test_close_ends_what_is_read_and_what_waits(reader):
    point = reader.hold("wait", "a", 0)
    jobs = [reader.submit(1, a="p"), reader.submit(2, b="p")]
    assert point.arrived.wait(60)
    given_up = threading.Event()
    plain_close = reader.worker._lanes.close

    def close():
        given_up.set()
        plain_close()

    reader.worker._lanes.close = close
    closing = threading.Thread(target=reader.worker.close)
    closing.start()
    assert given_up.wait(60)
    point.go_on.set()
    closing.join(60)
    for job, target in jobs:
        assert job.quiescent.is_set()
        assert target.failed == list(LAYERS)
    assert reader.pools.opened == ["p"], "the second one did not begin"
