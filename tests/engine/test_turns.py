"""Threads that share an LLM: each gets what it would get alone, one drives the engine at a time, and none is passed over."""

import os
import signal
import threading
from contextlib import nullcontext, suppress

import pytest
from engine_fakes import VOCAB, run_alone
from test_llm import GREEDY, Letters, LLMRunner, make, text_of

from checkpoints import make_tiny_llama
from children import in_forked_child
from interlock import LLM, SamplingParams
from interlock.core import interrupts
from interlock.core.errors import RequestError
from interlock.engine.turns import Turns

PATIENCE = 60.0  # seconds after which a test gives up on a thread


def in_threads(*functions):
    """Run the functions together and return their results; the first error is raised."""
    results, errors = {}, []

    def run(number):
        try:
            results[number] = functions[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    for error in errors:
        raise error
    return [results[number] for number in range(len(functions))]


def until(condition):
    """Wait for what another thread does."""
    tick = threading.Event()
    for _ in range(int(PATIENCE / 0.001)):
        if condition():
            return
        tick.wait(0.001)
    raise AssertionError("it never came")


class MeetingRunner(LLMRunner):
    """Its first step with tokens lasts until another thread has asked for a step: `overlaps` counts the steps that ran within another."""

    def __init__(self):
        super().__init__(tokenizer=Letters())
        self.in_step = threading.Event()
        self.other_is_there = lambda: True
        self.depth = self.overlaps = 0

    def execute_model(self, output):
        self.depth += 1
        self.overlaps += self.depth > 1
        try:
            if output.num_scheduled_tokens and not self.in_step.is_set():
                self.in_step.set()
                until(lambda: self.other_is_there() or self.overlaps)
            return super().execute_model(output)
        finally:
            self.depth -= 1


class NoTurns:
    """The negative control: nothing is held back."""

    inside = awaited = False

    def __enter__(self):
        return None

    def __exit__(self, *error):
        return None


def meet(turns):
    """Two threads that generate, the second one while the first is in a step; how many steps overlapped, and the results."""
    runner = MeetingRunner()
    llm = make(runner)
    llm._turns = turns
    runner.other_is_there = lambda: turns.awaited

    def second():
        assert runner.in_step.wait(PATIENCE)
        return llm.generate([[7, 8]], GREEDY)

    with nullcontext() if isinstance(turns, Turns) else suppress(Exception):
        outputs = in_threads(lambda: llm.generate([[1, 2, 3]], GREEDY), second)
        assert [output[0].outputs[0].token_ids for output in outputs] == [run_alone([1, 2, 3], 5), run_alone([7, 8], 5)]
        assert llm.audit().all_free
    return runner.overlaps


def test_a_thread_that_generates_waits_until_the_step_of_another_has_ended():
    assert meet(Turns()) == 0


def test_without_turns_steps_overlap():
    assert meet(NoTurns()) > 0


def test_a_thread_that_gives_its_turn_back_and_asks_again_goes_behind_one_that_waits():
    turns, order, taken = Turns(), [], threading.Event()

    def first():
        with turns:
            taken.set()
            until(lambda: turns.awaited)
            order.append("first")
        with turns:
            order.append("first again")

    def second():
        assert taken.wait(PATIENCE)
        with turns:
            order.append("second")

    in_threads(first, second)
    assert order == ["first", "second", "first again"]


def test_a_turn_may_be_nested_and_is_given_back_once():
    turns = Turns()
    with turns, turns:
        assert turns.inside
    assert not turns.inside
    assert in_threads(lambda: (turns.inside, turns.__enter__(), turns.inside, turns.__exit__(None, None, None))) == [(False, None, True, None)]


def test_an_interrupt_is_served_while_another_thread_has_the_turn():
    turns, taken, over = Turns(), threading.Event(), threading.Event()

    def other():
        with turns:
            taken.set()
            until(lambda: turns.awaited)
            os.kill(os.getpid(), signal.SIGINT)
            assert over.wait(PATIENCE)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    assert taken.wait(PATIENCE)
    with pytest.raises(KeyboardInterrupt), interrupts.deferred(), turns:
        pytest.fail("the other thread has the turn")
    assert not turns.inside
    assert not turns.awaited
    over.set()
    thread.join(PATIENCE)
    with turns:
        assert turns.inside


def test_closing_waits_for_the_step_and_ends_what_another_thread_generates():
    runner = MeetingRunner()
    llm = make(runner)
    runner.other_is_there = lambda: llm._turns.awaited

    def close():
        assert runner.in_step.wait(PATIENCE)
        llm.close()
        return runner.depth

    def generate():
        with pytest.raises(RequestError, match="the LLM is closed"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=60, temperature=0.0))

    assert in_threads(generate, close) == [None, 0]
    assert runner.closed == 1


def test_what_runs_within_a_step_cannot_generate_and_the_step_goes_on():
    runner = LLMRunner(tokenizer=Letters())
    llm = make(runner)
    stream, *others = (llm.stream([[3, 2, 1]], GREEDY) for _ in range(2))
    answers = []

    def execute_model(output, inner=runner.execute_model):
        nexts = [others.pop().__next__] if others else []
        for use in (lambda: llm.generate([[7, 8]], GREEDY), lambda: llm.stream([[7, 8]], GREEDY), *nexts):
            with pytest.raises(RequestError, match="in the middle of a step of this thread"):
                use()
        answers.append(llm.audit().clean)
        return inner(output)

    runner.execute_model = execute_model
    assert llm.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids == run_alone([1, 2], 5)
    assert "".join(delta.text for delta in stream) == text_of(run_alone([3, 2, 1], 5))
    assert answers
    assert all(answers)
    assert llm.audit().all_free


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_that_is_forked_while_another_thread_has_the_turn_is_told_so_and_touches_nothing():
    runner, over = MeetingRunner(), threading.Event()
    llm = make(runner)
    runner.other_is_there = over.is_set
    stream = llm.stream([[3, 2, 1]], GREEDY)

    def fork():
        assert runner.in_step.wait(PATIENCE)
        uses = (lambda: llm.generate([[7, 8]], GREEDY), lambda: next(stream), llm.audit, llm.metrics, llm.reset_prefix_cache)
        answers = [in_forked_child(use) for use in (*uses, stream.close, llm.close)]
        over.set()
        return answers

    output, answers = in_threads(lambda: llm.generate([[1, 2, 3]], GREEDY), fork)
    assert all(answer.startswith(f"RequestError: the engine belongs to process {os.getpid()}") for answer in answers[:-2])
    assert answers[-2:] == ["None", "None"]
    assert output[0].outputs[0].token_ids == run_alone([1, 2, 3], 5)
    assert "".join(delta.text for delta in stream) == text_of(run_alone([3, 2, 1], 5))
    assert llm.audit().all_free
    assert in_forked_child(lambda: (llm.close(), runner.closed)) == "(None, 0)", "a child must not close what it shares with its parent"
    llm.close()
    assert runner.closed == 1


def test_a_stream_that_becomes_garbage_in_mid_step_is_ended_after_the_step():
    runner = LLMRunner(tokenizer=Letters())
    llm = make(runner)
    streams = [llm.stream([[3, 2, 1]], SamplingParams(max_tokens=60, temperature=0.0))]
    next(streams[0])
    seen = []

    def execute_model(output, inner=runner.execute_model):
        streams.clear()
        seen.append(len(llm._dropped))
        return inner(output)

    runner.execute_model = execute_model
    assert llm.generate([[1, 2]], GREEDY)[0].outputs[0].text == text_of(run_alone([1, 2], 5))
    assert seen[0] > 0
    assert not any(seen[1:])
    assert llm.audit().all_free


def test_threads_get_the_bits_that_each_would_get_alone(tmp_path):
    with LLM(make_tiny_llama(tmp_path, vocab_size=VOCAB), kv_cache_memory_bytes=2**18, threads=2, max_num_batched_tokens=16) as llm:
        prompts = [[(7 * number + step) % VOCAB for step in range(3 + 5 * number)] for number in range(6)]
        params = [SamplingParams(temperature=0.7 * (number % 2), seed=number, max_tokens=8 + number, logprobs=1) for number in range(6)]

        def bits(number):
            completion = llm.generate([prompts[number]], params[number])[0].outputs[0]
            return [(token, entry[token].logprob.hex()) for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]

        alone = [bits(number) for number in range(6)]
        together = in_threads(*(lambda first=first: [bits((first + step) % 6) for step in range(6)] for first in range(4)))
        assert together == [[alone[(first + step) % 6] for step in range(6)] for first in range(4)]
        assert llm.audit().all_free
