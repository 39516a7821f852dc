import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from engine_fakes import VOCAB, FakeRunner, make_kv_cache_config, run_alone

from interlock import LLM, SamplingParams
from interlock.core.errors import ConfigError, KernelError, RequestError
from interlock.core.memory import available_memory
from interlock.core.sampling_params import MAX_MASKED_TOKENS
from interlock.core.step import ModelRunnerOutput
from interlock.engine import llm as llm_module
from interlock.engine.inputs import InputProcessor, draw_seed


class Letters:
    """A tokenizer whose tokens are single characters."""

    has_chat_template = True
    eos_token_ids = ()

    def encode(self, text, add_special_tokens=True):
        return [ord(char) % VOCAB for char in text]

    def token_bytes(self, token_id):
        return bytes([65 + token_id])

    def is_special(self, token_id):
        return False

    def chat_text(self, messages, *, add_generation_prompt=True, **variables):
        return "".join(message["content"] for message in messages) + ("!" if add_generation_prompt else "")


class LLMRunner(FakeRunner):
    """A FakeRunner with what the engine asks of a runner; `sampled` is stirred by seed and sample index."""

    def __init__(self, num_blocks=64, tokenizer=None, eos=()):
        super().__init__(num_blocks)
        self.kv_cache_config = make_kv_cache_config(num_blocks)
        self.max_model_len = 64
        self.tokenizer = tokenizer
        self.model_config = SimpleNamespace(vocab_size=VOCAB, eos_token_ids=eos)
        self.seeds = {}
        self.faults = []
        self.closed = 0

    def execute_model(self, output):
        if self.faults and output.num_scheduled_tokens:
            fault = self.faults.pop(0)
            if fault is not None:
                self._update_states(output)
                self.last_step = output.step
                raise fault
        for new in output.scheduled_new_reqs:
            self.seeds[new.req_id] = (new.seed, new.sample_index, new.num_computed_tokens)
        return super().execute_model(output)

    def shutdown(self):
        self.closed += 1


def make(runner=None, **options):
    return LLM(model="fake", runner=runner or LLMRunner(tokenizer=Letters()), block_size=4, max_num_seqs=4, max_num_batched_tokens=16, **options)


GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


def text_of(token_ids):
    return "".join(chr(65 + token_id) for token_id in token_ids)


def test_generate_takes_every_form_of_prompt_and_answers_in_order():
    llm = make()
    text = "hello"
    ids = Letters().encode(text)
    outputs = llm.generate([text, {"prompt": text}, {"prompt_token_ids": ids, "cache_salt": "s"}, ids], GREEDY)
    for output in outputs:
        assert output.prompt_token_ids == ids
        assert output.finished
        assert [completion.index for completion in output.outputs] == [0]
        assert output.outputs[0].token_ids == run_alone(ids, 5)
        assert output.outputs[0].text == text_of(run_alone(ids, 5))
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].logprobs is None
        assert output.outputs[0].cumulative_logprob is None
        metrics = output.metrics
        assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert [output.prompt for output in outputs] == [text, text, None, None]
    assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids == run_alone(ids, 5)
    assert llm.audit().all_free
    assert llm.metrics()["num_blocks_free"] == 64


def test_parameters_may_be_given_for_each_prompt():
    llm = make()
    outputs = llm.generate([[1], [2]], [SamplingParams(temperature=0.0, max_tokens=count) for count in (2, 7)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 7]
    with pytest.raises(RequestError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate([[1], [2]], [GREEDY])


def test_logprobs_have_the_sampled_token_first_and_each_token_once():
    llm = make()
    output = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=3, logprobs=2))[0].outputs[0]
    assert output.cumulative_logprob == -1.5
    for token_id, table in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(table)) == token_id
        assert table[token_id].logprob == -0.5
        assert table[token_id].rank == 2
        assert table[token_id].decoded_token == chr(65 + token_id)
        assert set(table) == {token_id, 1, 2}


@pytest.mark.parametrize("way", ["eos", "stop", "stop at once", "length"])
def test_the_token_that_ends_a_request_by_itself_is_not_in_its_text(way):
    whole = run_alone([1, 2, 3], 8)
    end = 1 if way == "stop at once" else next(i for i in range(3, 8) if whole[i] not in whole[:i]) + 1
    params = {"stop_token_ids": [] if way in ("eos", "length") else [whole[end - 1]], "max_tokens": end if way == "length" else 8}
    llm = make(LLMRunner(tokenizer=Letters(), eos=(whole[end - 1],) if way == "eos" else ()))
    deltas = list(llm.stream([[1, 2, 3]], SamplingParams(temperature=0.0, **params)))
    output = deltas[-1].output.outputs[0]
    assert output.token_ids == whole[:end] == [token for delta in deltas for token in delta.token_ids]
    assert output.text == text_of(whole[: end if way == "length" else end - 1]) == "".join(delta.text for delta in deltas)
    assert output.finish_reason == ("length" if way == "length" else "stop")
    assert llm.audit().all_free


def test_n_samples_share_the_prompt_and_are_told_apart_by_their_index():
    runner = LLMRunner(tokenizer=Letters())
    llm = make(runner)
    output = llm.generate([list(range(9))], SamplingParams(n=4, max_tokens=5, seed=3))[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert sorted(runner.seeds.values()) == [(3, 0, 0), (3, 1, 8), (3, 2, 8), (3, 3, 8)]
    assert all(len(completion.token_ids) == 5 for completion in output.outputs)
    assert llm.audit().all_free


def test_a_hand_off_belongs_to_the_first_sample_alone():
    llm = make()
    seen = []
    add = llm.core.add_request
    llm.core.add_request = lambda request: (seen.append(request.kv_transfer_params), add(request))
    llm.generate([[1, 2]], SamplingParams(n=2, max_tokens=2, extra_args={"kv_transfer_params": {"transfer_id": "tx"}}))
    assert seen == [{"transfer_id": "tx"}, None]


def test_unseeded_requests_draw_seeds_that_a_second_engine_draws_again():
    seeds = []
    for _ in range(2):
        runner = LLMRunner(tokenizer=Letters())
        llm = make(runner, seed=7)
        llm.generate([[1], [2]], SamplingParams(max_tokens=1))
        llm.generate([[1]], SamplingParams(max_tokens=1))
        seeds.append([seed for seed, _, _ in runner.seeds.values()])
    assert seeds[0] == seeds[1] == [draw_seed(7, arrival) for arrival in (1, 2, 3)]
    assert len(set(seeds[0])) == 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[-1]], r"prompt_token_ids\[0\] is -1, expected an integer from 0 to 49"),
        ([[1, 50]], r"prompt_token_ids\[1\] is 50"),
        ([[1, True]], r"prompt_token_ids\[1\] is True"),
        ([{"prompt_token_ids": []}], "prompt_token_ids is empty"),
        ([""], "prompt is '', which has no tokens"),
        ([[1] * 64], "prompt has 64 tokens, expected fewer than max_model_len, which is 64"),
        ([{"text": "a"}], r"prompt has unknown keys \['text'\]"),
        ([{}], "expected 'prompt' or 'prompt_token_ids'"),
        ([3.5], "prompt is 3.5"),
        ([None], "prompt is None"),
        ([{"prompt": "a", "cache_salt": 3}], "cache_salt is 3, expected a string"),
        ([{"prompt_token_ids": "abc"}], "prompt_token_ids is 'abc'"),
    ],
)
def test_a_bad_prompt_is_refused_by_name_before_anything_runs(prompt, message):
    runner = LLMRunner(tokenizer=Letters())
    llm = make(runner)
    with pytest.raises(RequestError, match=message):
        llm.generate([[1, 2], *prompt], GREEDY)
    assert not runner.log
    assert not llm.core.has_unfinished_requests
    assert llm.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids == run_alone([1, 2], 5)


def test_bad_parameters_are_refused_by_name():
    llm = make()
    with pytest.raises(RequestError, match="stop_token_ids has 50, expected token ids below 50"):
        llm.generate([[1]], SamplingParams(stop_token_ids=[50]))
    with pytest.raises(RequestError, match="expected SamplingParams"):
        llm.generate([[1]], [{"temperature": 0}])
    with pytest.raises(RequestError, match="are 50 tokens, expected at most 49 with min_tokens, which is 1; give fewer"):
        make(LLMRunner(eos=(3, 49))).generate([[1]], SamplingParams(stop_token_ids=list(range(49)), min_tokens=1))
    params = SamplingParams(stop_token_ids=list(range(MAX_MASKED_TOKENS)), min_tokens=1)
    InputProcessor(None, 1000, 64, [5]).check_params(params)
    with pytest.raises(RequestError, match="are 129 tokens, expected at most 128"):
        InputProcessor(None, 1000, 64, [500]).check_params(params)
    with pytest.raises(RequestError, match="logprobs is 11, expected at most 10, the model's vocabulary"):
        InputProcessor(None, 10, 64).check_params(SamplingParams(logprobs=11))
    with pytest.raises(RequestError, match=r"needs up to 15 KV blocks .* the pool has 8"):
        make(LLMRunner(num_blocks=8)).generate([[1]], SamplingParams(max_tokens=60))


@pytest.mark.parametrize("params", [5, "x", {}, [5], [GREEDY, None]])
def test_what_are_no_parameters_is_refused_with_what_was_expected(params):
    with pytest.raises(RequestError, match=r"sampling_params .*expected SamplingParams"):
        make().generate([[1], [2]], params)


@pytest.mark.parametrize(
    "prompt", [np.array([1, 2]), [np.int64(1), np.int32(2)], {"prompt_token_ids": np.array([1, 2], np.uint16)}, np.array([[1, 2]])], ids=repr
)
def test_token_ids_may_be_numpys(prompt):
    (output,) = make().generate(prompt, GREEDY)
    assert output.prompt_token_ids == [1, 2]
    assert all(type(token_id) is int for token_id in output.prompt_token_ids)
    assert output.outputs[0].token_ids == run_alone([1, 2], 5)


@pytest.mark.parametrize("prompt", [np.array([1.0]), np.array([True]), [np.bool_(True)], np.array([50])], ids=repr)
def test_arrays_that_hold_no_token_ids_are_refused(prompt):
    with pytest.raises(RequestError, match=r"prompt_token_ids\[0\] is"):
        make().generate(prompt if isinstance(prompt, np.ndarray) else [prompt], GREEDY)


def test_memory_that_the_machine_does_not_have_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(llm_module, "available_memory", lambda: 3 << 30)
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes is {1 << 40}, but this machine has {3 << 30} bytes of memory available; lower it"):
        LLM(model="there is no such model", kv_cache_memory_bytes=1 << 40)


def test_memory_that_cannot_be_had_is_one_error_that_names_the_options(monkeypatch):
    def out_of_memory(*arguments, **options):
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr(llm_module, "EngineCore", out_of_memory)
    with pytest.raises(ConfigError, match=r"could not be had \(Unable to allocate 9 TiB\).*max_num_batched_tokens = 1048576.*lower what is large"):
        LLM(model="m", max_num_batched_tokens=1 << 20)


def test_available_memory_is_below_what_the_machine_has():
    assert 0 < available_memory() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_text_for_a_model_without_a_tokenizer_is_refused_and_token_ids_work():
    llm = make(LLMRunner())
    with pytest.raises(RequestError, match="have no tokenizer; give prompt_token_ids"):
        llm.generate("hello", GREEDY)
    output = llm.generate([[1, 2]], GREEDY)[0].outputs[0]
    assert (output.text, output.token_ids) == ("", run_alone([1, 2], 5))


def test_unknown_or_unusable_options_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown engine options \['max_seqs'\], expected some of .*max_num_seqs"):
        LLM(model="fake", max_seqs=3)
    with pytest.raises(ConfigError, match="cudagraph_mode is 'SOME'"):
        LLM(model="fake", cudagraph_mode="SOME")
    with pytest.raises(ConfigError, match="kv_transfer_config is 'x', which is not JSON"):
        LLM(model="fake", kv_transfer_config="x")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        LLM(model="fake", kv_transfer_config="[]")
    assert make(cudagraph_mode="full").config.cudagraph_mode.name == "FULL"


def test_chat_goes_through_the_template():
    llm = make()
    messages = [{"role": "user", "content": "hey"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == "hey!"
    assert output.outputs[0].token_ids == run_alone(Letters().encode("hey!"), 5)
    assert len(llm.chat([messages, messages], GREEDY)) == 2
    with pytest.raises(RequestError, match="no chat template"):
        make(LLMRunner()).chat(messages)
    for value in ("hi", None, 5, messages[0]):
        with pytest.raises(RequestError, match=r"messages is .*expected a list of objects"):
            llm.chat(value)


def test_a_stream_gives_what_each_step_adds_and_joined_it_is_the_whole():
    llm = make()
    prompts = [[1, 2, 3], [4, 5]]
    deltas = list(llm.stream(prompts, SamplingParams(temperature=0.0, max_tokens=4, n=2)))
    for number, prompt in enumerate(prompts):
        outputs = [delta.output for delta in deltas if delta.prompt_index == number and delta.output is not None]
        assert len(outputs) == 1
        for index, completion in enumerate(outputs[0].outputs):
            mine = [delta for delta in deltas if (delta.prompt_index, delta.index) == (number, index)]
            assert "".join(delta.text for delta in mine) == completion.text == text_of(run_alone(prompt, 4))
            assert [token_id for delta in mine for token_id in delta.token_ids] == completion.token_ids
            assert [delta.finish_reason for delta in mine] == [None, None, None, "length"]


@pytest.mark.parametrize("n", [1, 3])
def test_closing_a_stream_aborts_all_its_samples(n):
    llm = make()
    for _ in range(20):
        stream = llm.stream([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=30, n=n))
        next(stream)
        stream.close()
        assert not llm.core.has_unfinished_requests
    assert llm.generate([[1, 2, 3, 4, 5]], GREEDY)[0].metrics.num_cached_tokens == 4, "the prompt stays usable for the next turn"
    assert llm.audit().all_free


def test_a_stream_that_is_dropped_or_closed_before_its_first_step_leaves_nothing():
    llm = make()
    for _ in range(20):
        llm.stream([[1, 2, 3]], GREEDY).close()
        llm.stream([[1, 2, 3]], GREEDY)
        assert not llm.core.has_unfinished_requests
    assert llm.generate([[1]], GREEDY)[0].outputs[0].token_ids == run_alone([1], 5)
    assert llm.audit().all_free


def test_a_stream_of_a_closed_llm_says_so():
    llm = make()
    stream = llm.stream([[1]], GREEDY)
    next(stream)
    llm.close()
    with pytest.raises(RequestError, match="the LLM is closed"):
        next(stream)


def test_two_streams_at_once_keep_their_deltas_apart():
    llm = make()
    first, second = llm.stream([[1]], GREEDY), llm.stream([[2]], GREEDY)
    seen = {1: [], 2: []}
    for _ in range(5):
        seen[1] += next(first).token_ids
        seen[2] += next(second).token_ids
    assert list(first) == list(second) == []
    assert seen == {1: run_alone([1], 5), 2: run_alone([2], 5)}


def test_a_kernel_error_ends_the_requests_of_its_step_and_the_engine_goes_on():
    runner = LLMRunner(tokenizer=Letters())
    runner.faults = [None, KernelError("attention: a block of a block table lies outside the pool (launch 3, row 1)")]
    llm = make(runner)
    outputs = llm.generate([[1], [2]], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    assert all("launch 3, row 1" in output.error for output in outputs)
    assert llm.audit().all_free
    assert llm.generate([[1]], GREEDY)[0].outputs[0].token_ids == run_alone([1], 5)
    assert llm.metrics()["num_failed_steps"] == 1


def test_an_interrupt_in_mid_step_ends_the_requests_and_keeps_their_blocks_until_a_later_step_has_retired():
    runner = LLMRunner(tokenizer=Letters())
    runner.faults = [None, KeyboardInterrupt()]
    llm = make(runner)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], GREEDY)
    assert llm.audit().quarantined == 2
    assert llm.generate([[1]], GREEDY)[0].outputs[0].token_ids == run_alone([1], 5)
    assert llm.audit().all_free


def test_progress_is_told_of_each_prompt():
    calls = []
    make().generate([[1], [2], [3]], GREEDY, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_a_closed_engine_takes_no_requests_and_stops_its_runner_once():
    runner = LLMRunner()
    with make(runner) as llm:
        llm.generate([[1]], GREEDY)
    llm.close()
    assert runner.closed == 1
    with pytest.raises(RequestError, match="closed"):
        llm.generate([[1]], GREEDY)


def test_importing_the_package_is_light():
    script = "import interlock, sys; assert 'numpy' not in sys.modules; interlock.SamplingParams; assert 'numba' not in sys.modules; interlock.LLM"
    subprocess.run([sys.executable, "-c", script + "; assert 'numba' not in sys.modules"], check=True)


def test_the_runner_result_is_checked_against_what_was_asked():
    runner = LLMRunner()
    runner.execute_model = lambda output: ModelRunnerOutput(output.step)
    with pytest.raises(AssertionError, match="the runner sampled None"):
        make(runner).generate([[1]], GREEDY)
