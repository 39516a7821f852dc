"""Two ranks in two processes over gloo."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
from rank_processes import OTHER_PROMPT, PROMPT, different_options, lost_rank, run_ranks, starved_ranks

from checkpoints import make_tiny_llama
from children import in_forked_child
from interlock import LLM, SamplingParams
from interlock.core.errors import CheckpointError, ConfigError, DataParallelError, RequestError
from interlock.engine.data_parallel import DataParallelLLM, _read
from interlock.runner.data_parallel import GlooGroup

OPTIONS = {"threads": 1, "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("m"))


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def generate(llm, prompts, max_tokens):
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in max_tokens]
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_rank_that_only_waits_for_kv_keeps_pace_with_one_that_decodes(model, port, mode):
    with LLM(model, enforce_eager=True, **OPTIONS) as alone:
        [long, loaded, short] = generate(alone, [OTHER_PROMPT, PROMPT, OTHER_PROMPT], [202, 40, 30])
    first, second = run_ranks(starved_ranks, model, mode, port)
    assert first["tokens"] == {"first": loaded[:4], "second": long, "third": short}
    assert second["tokens"] == {"first": long, "second": loaded}
    for rank in (first, second):
        steps, collectives, _ = zip(*rank["trace"], strict=True)
        assert list(steps) == list(range(1, len(steps) + 1))
        assert list(collectives) == list(steps), "gloo counts another number of collectives than steps"
        assert rank["all_free"]
    assert len(first["trace"]) == len(second["trace"])
    assert first["paused_at"] == second["paused_at"]
    tokens = [[step[2] for step in rank["trace"]] for rank in (first, second)]
    swap = tokens[0].index(len(OTHER_PROMPT))
    assert swap > 200
    assert sum(tokens[0][:200]) == 0, "the first rank was to have no token in 200 steps"
    assert all(tokens[1][:200])
    assert sum(tokens[1][swap : swap + 199]) == 0
    assert all(tokens[0][swap : swap + 199])


def test_a_rank_that_dies_is_noticed_by_the_other_at_once(model, port):
    error, nothing = run_ranks(lost_rank, model, port)
    assert isinstance(error, DataParallelError)
    assert "rank 0 lost another rank" in str(error)
    assert nothing is None


class LateWork:
    """A collective that is done, or has failed, in the moment in which a slice of the wait for it ends."""

    def __init__(self, work, failure):
        self._work, self._failure = work, failure

    def is_completed(self):
        return self._work.is_completed()

    def wait(self, *timeout):
        self._work.wait()
        if timeout:
            raise RuntimeError("Operation timed out!")
        if self._failure:
            raise RuntimeError(self._failure)


@pytest.mark.parametrize("failure", [None, "Connection closed by peer"])
def test_a_collective_is_what_it_ended_with_and_not_the_slice_in_which_it_was_waited_for(port, failure):
    group = GlooGroup(0, 1, "127.0.0.1", port)
    inner = group._group
    group._group = SimpleNamespace(allgather=lambda *tensors: LateWork(inner.allgather(*tensors), failure))
    if failure is None:
        assert group.all_gather([3, 4]) == [[3, 4]]
    else:
        with pytest.raises(DataParallelError, match=r"lost another rank: Connection closed by peer; restart all ranks"):
            group.all_gather([3, 4])
    group.close()


def test_ranks_with_different_options_refuse_each_other(model, port):
    errors = run_ranks(different_options, model, port)
    assert all(isinstance(error, ConfigError) for error in errors)
    assert "max_num_seqs is 8 on data-parallel rank 0 and 7 on rank 1" in str(errors[0])
    assert "max_num_seqs is 7 on data-parallel rank 1 and 8 on rank 0" in str(errors[1])


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("lockstep", [True, False])
def test_one_call_starts_all_ranks_and_deals_the_prompts_out(model, lockstep, monkeypatch):
    prompts = [PROMPT[: 3 + 2 * index] for index in range(7)]
    counts = [20, 1, 5, 9, 2, 3, 11]
    with LLM(model, enforce_eager=True, **OPTIONS) as alone:
        expected = generate(alone, prompts, counts)
    with DataParallelLLM(model, data_parallel_lockstep=lockstep, **OPTIONS) as ranks:
        assert generate(ranks, prompts, counts) == expected
        assert generate(ranks, prompts[:1], counts[:1]) == expected[:1], "the second rank has no prompt"
        with pytest.raises(RequestError, match="prompt_token_ids is empty"):
            generate(ranks, [PROMPT, []], [3, 3])
        with pytest.raises(RequestError, match="sampling_params is 5, expected SamplingParams"):
            ranks.generate([PROMPT], 5)
        with pytest.raises(RequestError, match="cannot be sent to the ranks"):
            ranks.generate([PROMPT, PROMPT], [SamplingParams(), SamplingParams(extra_args={"lock": threading.Lock()})])
        assert in_forked_child(lambda: generate(ranks, prompts, counts)).startswith("RequestError: the engine belongs to process")
        assert in_forked_child(ranks.close) == "None"
        assert generate(ranks, prompts, counts) == expected
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "_answers", interrupt)
            with pytest.raises(KeyboardInterrupt):
                generate(ranks, prompts[::-1], counts)
        assert generate(ranks, prompts, counts) == expected, "an answer to the call that was interrupted was taken for one to this call"
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "_answers", lambda: generate(ranks, prompts, counts))
            with pytest.raises(RequestError, match="in the middle of a call of this thread"):
                generate(ranks, prompts[::-1], counts)
        assert generate(ranks, prompts, counts) == expected
        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(generate, ranks, prompts[number:], counts[number:]) for number in (0, 1, 2, 3) * 3]
            assert [call.result(60) for call in calls] == [expected[number:] for number in (0, 1, 2, 3) * 3]
        ranks._processes[1].kill()
        with pytest.raises(DataParallelError, match="rank 1 has ended"):
            generate(ranks, prompts, counts)
        with pytest.raises(RequestError, match="the DataParallelLLM is closed"):
            generate(ranks, prompts, counts)


def test_closing_ends_what_another_thread_generates(model):
    ranks = DataParallelLLM(model, data_parallel_lockstep=True, **OPTIONS)
    processes, sent = list(ranks._processes), threading.Event()

    def answers(inner=ranks._answers):
        sent.set()
        return inner()

    ranks._answers = answers
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)  # no answer comes before the call has ended
    with ThreadPoolExecutor(2) as threads:
        call = threads.submit(generate, ranks, [PROMPT, PROMPT], [400, 400])
        assert sent.wait(60)
        closing = threads.submit(ranks.close)
        try:
            with pytest.raises(RequestError, match="the DataParallelLLM is closed"):
                call.result(60)
        finally:
            for process in processes:
                os.kill(process.pid, signal.SIGCONT)
        closing.result(60)
    assert not any(process.is_alive() for process in processes)


def test_a_rank_whose_parent_closes_the_connection_ends_what_it_generates():
    parents, ranks = Pipe()
    parents.send_bytes(b"call")
    parents.close()
    calls, closed = queue.SimpleQueue(), []
    _read(ranks, SimpleNamespace(close=lambda: closed.append(True)), calls)
    assert [calls.get(), calls.get()] == [b"call", None]
    assert closed == [True]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_before_the_ranks_have_met_is_noticed_at_once(model, monkeypatch, rank):
    def answers(self, inner=DataParallelLLM._answers):
        self._processes[rank].kill()
        return inner(self)

    monkeypatch.setattr(DataParallelLLM, "_answers", answers)
    with pytest.raises(DataParallelError, match=f"rank {rank} has ended"):
        DataParallelLLM(model, data_parallel_lockstep=True, **OPTIONS)


def test_a_rank_that_cannot_start_ends_all(tmp_path):
    with pytest.raises(CheckpointError, match="nothing"):
        DataParallelLLM(str(tmp_path / "nothing"), **OPTIONS)


def test_an_engine_that_runs_by_itself_needs_no_torch():
    check = "import sys, interlock.engine.data_parallel, interlock.runner.model_runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
