"""The overlap benchmark over real transports, on a tiny model: what joins has its KV from the other process, and every way gives the same bits."""

import contextlib

import pytest

from checkpoints import make_tiny_llama
from interlock.bench import overlap_transport
from interlock.bench.overlap import BARRIER, GATES, WAYS
from interlock.bench.overlap_transport import Consumer, Joined, Sizes, bound, figures, run
from interlock.core.errors import InterlockError

SMALL = Sizes(loading=2, length=41, others=2, context=5, pool_bytes=1 << 20)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("m"), num_layers=3)


def test_each_way_joins_with_the_same_bits_over_each_transport(model, monkeypatch):
    monkeypatch.setattr(overlap_transport, "_TURNS", 1)
    found = run(model, 1, 1, WAYS, BARRIER, lambda what: None, SMALL)
    assert [figure.name for figure in found] == [f"{label}: {way.name}" for label in overlap_transport.transports() for way in WAYS]
    assert all(figure.value > 0 and figure.peer == "bound" for figure in found)


def test_negative_control_a_prompt_that_is_computed_here_is_no_join(model):
    connector = {"kv_connector": "PeerConnector"}
    engine = {"model": model, "threads": 1, "max_model_len": 128, "kv_cache_memory_bytes": SMALL.pool_bytes}
    with contextlib.closing(Consumer(GATES, SMALL, engine, connector)) as consumer:
        prompts = overlap_transport.draw(2, SMALL.length, consumer.vocab_size)
        with pytest.raises(InterlockError, match="FULL, gates: a prompt did not join with its KV loaded"):
            consumer.join(prompts, [{}, {}])


@pytest.mark.parametrize(
    ("load", "compute", "cpus", "expected"),
    [(10.0, 20.0, 2, 25.0), (60.0, 20.0, 2, 60.0), (10.0, 20.0, 3, 21.0)],
)
def test_a_copy_takes_a_cpu_from_the_compute_where_none_is_free(load, compute, cpus, expected):
    assert bound(load, compute, 10, 2, cpus) == expected


def test_the_load_time_is_what_the_barrier_waits():
    ends = {GATES.name: (0.030, 0.001), BARRIER.name: (0.040, 0.010)}
    joined = {name: [Joined(seconds, seconds + 0.005, wait, 0.020, (), ())] for name, (seconds, wait) in ends.items()}
    gates, barrier = figures("x", joined, BARRIER.name, 10, 2)
    assert (gates.notes["load T (ms)"], gates.notes["compute C (ms)"]) == (10.0, 20.0)
    assert gates.notes["worst stall of others (ms)"] == pytest.approx(35.0)
    assert (gates.value, barrier.value) == (30.0, 40.0)
