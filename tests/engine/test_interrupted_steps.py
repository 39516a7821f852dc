"""Ctrl-C anywhere in the engine: the books stay right, every block comes back, and what runs afterwards gives the right bits."""

import gc
import os
import signal
import sys
import threading

import pytest
from interrupted import count_places, interrupted, sample_places
from test_llm import Letters, LLMRunner
from waiting_connectors import LOADS, Loads

from checkpoints import make_tiny_llama
from interlock import LLM, SamplingParams
from interlock.graphs.stream import Event
from interlock.runner.input_batch import InputBatch

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SAMPLES = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=3, ignore_eos=True, logprobs=2)
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [5, 6, 7, 8, 9, 10, 11, 12, 13]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model"), eos_token_id=None)


def real_engine(model, **options):
    sizes = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 8, "kv_cache_memory_bytes": 24 << 10, "threads": 1}
    return LLM(model, **sizes, **options)


def fake_engine():
    return LLM("fake", runner=LLMRunner(num_blocks=12, tokenizer=Letters()), block_size=4, max_num_seqs=3, max_num_batched_tokens=8)


@pytest.fixture(params=["fake", "FULL", "PIECEWISE"])
def llm(request, model):
    """A small pool, so that requests wait for blocks and are preempted; and small steps, so that prompts come in chunks."""
    made = fake_engine() if request.param == "fake" else real_engine(model, cudagraph_mode=request.param)
    yield made
    made.close()


def generate(llm):
    outputs = llm.generate(PROMPTS, [GREEDY, SAMPLES, GREEDY])
    return [(sample.token_ids, sample.finish_reason) for output in outputs for sample in output.outputs]


def check_all_is_well(llm, expected):
    assert generate(llm) == expected
    audit = llm.audit()
    assert audit.all_free, audit
    assert not llm.core.has_unfinished_requests
    assert not llm.core._streams
    assert not llm._live
    assert not llm._kept


def test_an_interrupt_anywhere_in_generate_costs_its_requests_and_nothing_else(llm):
    expected = generate(llm)
    places = count_places(lambda: generate(llm))
    for place in sample_places(places, 60):
        assert interrupted(lambda: generate(llm), [place]), place
        assert llm.audit().violations == (), place
        check_all_is_well(llm, expected)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_while_the_first_is_cleaned_up_after_costs_nothing_more(llm):
    expected = generate(llm)
    places = count_places(lambda: generate(llm))
    for index, place in enumerate(sample_places(places, 30, seed=1)):
        assert interrupted(lambda: generate(llm), {place + distance for distance in range(0, 400, 1 + 7 * index)})
        check_all_is_well(llm, expected)


def test_an_interrupt_in_a_stream_leaves_the_other_streams_alone(llm):
    expected = generate(llm)

    def consume():
        for _ in llm.stream(PROMPTS, GREEDY):
            pass

    consume()
    for place in sample_places(count_places(consume), 40, seed=2):
        other = llm.stream([PROMPTS[0]], GREEDY)
        deltas = [next(other)]
        assert interrupted(consume, [place])
        deltas += other
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert deltas[-1].finish_reason in ("length", "error")  # it takes part in the step that was interrupted, or it does not
        assert tokens == expected[0][0][: len(tokens)]
        assert deltas[-1].finish_reason == "error" or tokens == expected[0][0]
        check_all_is_well(llm, expected)


def test_an_interrupt_while_a_stream_is_closed_still_ends_its_requests(llm):
    expected = generate(llm)

    def begin():
        stream = llm.stream(PROMPTS, GREEDY)
        next(stream)
        return stream

    for place in sample_places(count_places(begin().close), 10, seed=3):
        stream = begin()
        assert interrupted(stream.close, [place])
        check_all_is_well(llm, expected)


def test_an_interrupt_anywhere_in_a_step_leaves_the_books_right(llm):
    """Driven by hand, as a server does it: the caller goes on with the requests that are left."""
    expected = generate(llm)

    def run(number):
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        for index, prompt in enumerate(PROMPTS):
            llm.core.add_request(llm.core.make_request(f"hand-{number}-{index}", prompt, params))
        llm.core.abort_request(f"hand-{number}-1")
        while llm.core.has_work:
            llm.core.step()

    for place in sample_places(count_places(lambda: run(0)), 40, seed=4):
        assert interrupted(lambda place=place: run(place), [place])
        while llm.core.has_work:
            llm.core.step()
        assert llm.audit().violations == ()
        llm.core._streams.clear()  # the caller of an interrupted step has lost what it would have returned
        check_all_is_well(llm, expected)


def held():
    """What the process holds: descriptors, and threads that were started in Python."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), sorted(thread.name for thread in threading.enumerate())


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_an_interrupt_while_the_engine_starts_or_stops_leaves_nothing(model):
    def start():
        return real_engine(model, kv_transfer_config={"kv_connector": "PeerConnector"})

    start().close()
    before = held()
    made = []
    places = count_places(lambda: made.append(start()))
    made.pop().close()
    for place in sample_places(places, 4, seed=5)[::2]:
        assert interrupted(lambda: made.append(start()), [place])
        while made:  # it was not reached
            made.pop().close()
        assert held() == before, place
    for place in sample_places(count_places(start().close), 4, seed=6)[::3]:
        engine = start()
        assert interrupted(engine.close, [place])
        engine.close()  # where it came before the first line
        del engine
        assert held() == before, place


class Waits:
    """SIGINT from another thread, as a terminal sends it, as soon as the main thread has come to a wait (`reached`)."""

    def __init__(self, reached, handler=signal.default_int_handler):
        self._handler = handler
        self._thread = threading.Thread(target=self._interrupt, args=(reached,))

    def _interrupt(self, reached):
        if reached.wait(60):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def __enter__(self):
        self._before = signal.signal(signal.SIGINT, self._handler)
        self._thread.start()

    def __exit__(self, *_):
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)


def engine_with(model, connector, mode, **options):
    """An engine with one of the connectors of `waiting_connectors`, and what the connector does."""
    LOADS.append(Loads())
    transfer = {"kv_connector": f"waiting_connectors:{connector}", "kv_load_failure_policy": "fail"}
    return real_engine(model, cudagraph_mode=mode, kv_transfer_config=transfer, kv_load_timeout=600.0, **options), LOADS[-1]


@pytest.mark.parametrize(
    ("connector", "mode", "unknown"),  # unknown: blocks whose load nobody has said anything about, so they stay in quarantine
    [
        ("ClaimingConnector", "FULL", 1),
        ("ClaimingConnector", "PIECEWISE", 0),
        ("ReportingConnector", "FULL", 0),
        ("ReportingConnector", "PIECEWISE", 0),
    ],
    ids=["in the connector before the launch", "in the connector's hook", "at a gate of a FULL replay", "at the ledger between layers"],
)
def test_an_interrupt_is_served_wherever_a_step_waits_for_a_load_that_never_lands(model, connector, mode, unknown):
    llm, loads = engine_with(model, connector, mode)
    expected = llm.generate(PROMPTS[1:2], GREEDY)[0].outputs[0].token_ids
    llm.reset_prefix_cache()
    for number in range(1, 4):  # more often than there are slots
        loads.offered = 4
        loads.waiting.clear()
        with Waits(loads.waiting), pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[:1], GREEDY)
        loads.offered = 0
        assert llm.generate(PROMPTS[1:2], GREEDY)[0].outputs[0].token_ids == expected
        audit = llm.audit()
        assert audit.violations == ()
        assert (audit.referenced, audit.leased, audit.quarantined) == (0, 0, number * unknown)
        llm.reset_prefix_cache()
    llm.close()


def test_a_second_interrupt_is_served_while_a_connector_does_not_stop_its_loads(model):
    """Their blocks stay in quarantine then, since anything may still be written into them."""
    llm, loads = engine_with(model, "ClaimingConnector", "PIECEWISE")
    expected = llm.generate(PROMPTS[1:2], GREEDY)[0].outputs[0].token_ids
    loads.offered, loads.stubborn = 4, True

    def again(number, frame):
        loads.waiting.clear()
        thread.start()
        raise KeyboardInterrupt

    def interrupt():
        if loads.waiting.wait(60):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def stop(number, frame):
        raise TimeoutError

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with Waits(loads.waiting, again), pytest.raises((KeyboardInterrupt, TimeoutError)):
            llm.generate(PROMPTS[:1], GREEDY)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    loads.offered = 0
    assert llm.generate(PROMPTS[1:2], GREEDY)[0].outputs[0].token_ids == expected
    audit = llm.audit()
    assert audit.violations == ()
    assert audit.referenced == audit.leased == 0 < audit.quarantined
    llm.close()


@pytest.mark.parametrize("error", [SystemExit, TimeoutError])
def test_whatever_the_handler_of_a_signal_raises_comes_out_of_generate(model, error):
    """TimeoutError: an ordinary exception, in a call whose ordinary exceptions would cost the loads alone."""
    llm, loads = engine_with(model, "ClaimingConnector", "PIECEWISE")
    loads.offered = 4

    def handler(number, frame):
        raise error("from the handler")

    with Waits(loads.waiting, handler), pytest.raises(error, match="from the handler"):
        llm.generate(PROMPTS[:1], GREEDY)
    loads.offered = 0
    llm.generate(PROMPTS[1:2], GREEDY)
    assert llm.audit().all_free
    llm.close()


def test_a_gate_that_nobody_opens_does_not_keep_an_interrupted_step_from_ending(model, monkeypatch):
    """A FULL replay whose gates nothing will ever open: the step is aborted, so those after it run."""
    llm = real_engine(model, cudagraph_mode="FULL")
    expected = generate(llm)
    reached, begin, arm = threading.Event(), Event.wait, [True]

    def wait(event, timeout=None):
        reached.set()
        return begin(event, timeout)

    prepare = InputBatch.prepare

    def prepare_and_arm(batch, output):
        prepared = prepare(batch, output)
        if arm[0] and output.num_scheduled_tokens:
            prepared.arm_gates()
        return prepared

    monkeypatch.setattr(InputBatch, "prepare", prepare_and_arm)
    for _ in range(3):
        arm[0] = True
        reached.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Event, "wait", wait)
            with Waits(reached), pytest.raises(KeyboardInterrupt):
                generate(llm)
        arm[0] = False
    check_all_is_well(llm, expected)
    llm.close()
