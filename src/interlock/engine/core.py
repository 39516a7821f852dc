"""The engine: scheduler, runner and the connector's scheduler half, one step at a time."""

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from interlock.core import interrupts
from interlock.core.config import EngineConfig, KVCacheConfig
from interlock.core.errors import KernelError
from interlock.core.sampling_params import SamplingParams
from interlock.core.step import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from interlock.engine.block_pool import PoolAudit
from interlock.engine.detokenizer import Detokenizer, TextStream
from interlock.engine.inputs import InputProcessor, Prompt, TokenizedPrompt, draw_seed
from interlock.engine.outputs import RequestDelta
from interlock.engine.request import Request
from interlock.engine.scheduler import Scheduler
from interlock.kv_transfer.connector import KVConnector, KVConnectorRole
from interlock.kv_transfer.registry import create_connector, discard_connector
from interlock.runner.data_parallel import Lockstep, join_lockstep

Progress = Callable[[str, int, int], None]


class Runner(Protocol):
    """What the engine needs of a runner. `execute_model` returns, or raises KernelError, only after everything that the step started has
    ended. While it runs, interrupts are held off; where it waits, it calls `core.interrupts.deliver`."""

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """The pool that it has allocated."""

    @property
    def max_model_len(self) -> int:
        """The longest sequence that it can compute."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""

    @property
    def model_config(self) -> Any:
        """The model's sizes, with `vocab_size` and `eos_token_ids`."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and wait for its tokens. Raises KernelError if a kernel reported a fault."""

    def take_abort_report(self) -> KVConnectorOutput | None:
        """After `execute_model` has raised: what may still write blocks, and what was not begun; None if the connector never heard of the step."""

    def shutdown(self) -> None:
        """Give everything back."""


class EngineCore:
    """Requests in, deltas out. One thread drives it at a time. `progress(what, done, total)` is called during the start.

    A step that fails in a kernel ends its requests with 'error', and the engine goes on. A rank that runs in lockstep with others has a
    `lockstep`; it then also steps, without tokens if need be, while another rank has requests.
    """

    def __init__(self, config: EngineConfig, runner: Runner | None = None, *, connector: KVConnector | None = None, progress: Progress | None = None):
        self.config = config
        # What is made is given back here if anything below fails, Ctrl-C included; what the caller brought stays the caller's.
        with interrupts.deferred(), ExitStack() as made:
            with interrupts.served():  # waits for the other ranks
                self.lockstep = join_lockstep(config)
            if self.lockstep is not None:
                made.callback(self.lockstep.close)
            if runner is None:
                runner = _make_runner(config, progress, self.lockstep)
                made.callback(runner.shutdown)
            if connector is None and config.kv_transfer_config is not None:
                connector = create_connector(config, KVConnectorRole.SCHEDULER, runner.kv_cache_config)
                made.callback(discard_connector, connector)
            self.runner: Runner = runner
            self._connector = connector
            self.tokenizer, self.max_model_len, model_config = runner.tokenizer, runner.max_model_len, runner.model_config
            self.inputs = InputProcessor(self.tokenizer, model_config.vocab_size, self.max_model_len, model_config.eos_token_ids)
            self.detokenizer = Detokenizer(self.tokenizer)
            self.scheduler = Scheduler(
                config, runner.kv_cache_config, self.max_model_len, eos_token_ids=model_config.eos_token_ids, connector=connector
            )
            self._streams: dict[str, TextStream] = {}
            self._arrivals = 0
            self._counters = {"num_steps": 0, "num_computed_tokens": 0, "num_failed_steps": 0}
            self.num_scheduled_tokens = 0
            interrupts.deliver()
            made.pop_all()

    def make_request(
        self, request_id: str, prompt: Prompt | TokenizedPrompt, params: SamplingParams, *, seed: int | None = None, sample_index: int = 0
    ) -> Request:
        """Check a prompt and its parameters, and make the request of its sample `sample_index`. Raises RequestError; nothing is changed.

        seed: overrides that of `params`; without either one is drawn.
        """
        tokenized = prompt if isinstance(prompt, TokenizedPrompt) else self.inputs.process(prompt)
        self.inputs.check_params(params)
        request = Request(
            request_id,
            tokenized.token_ids,
            params,
            seed=self.draw_seed(params) if seed is None else seed,
            arrival_time=time.monotonic(),
            sample_index=sample_index,
            prompt=tokenized.text,
            cache_salt=tokenized.cache_salt,
        )
        self.scheduler.check(request)
        return request

    def draw_seed(self, params: SamplingParams) -> int:
        """The seed of `params`, or one for a request that arrives now."""
        if params.seed is not None:
            return params.seed
        self._arrivals += 1
        return draw_seed(self.config.seed, self._arrivals)

    def add_request(self, request: Request) -> None:
        """Take a request in. Raises RequestError if it cannot be served."""
        with interrupts.deferred():
            self.scheduler.add_request(request)
            self._streams[request.request_id] = self.detokenizer.stream(request.sampling_params.skip_special_tokens)

    def abort_request(self, request_id: str) -> bool:
        """End a request at any moment; its last delta comes with the next step. False if it is not alive."""
        with interrupts.deferred():
            return self.scheduler.abort_request(request_id) is not None

    def step(self) -> list[RequestDelta]:
        """Run one step. Call it while `has_work`; a step without tokens serves the connector alone, or keeps pace with the other ranks.

        An interrupt is raised while the step waits, and then ends its requests with 'error'; or at its end, if the caller has not deferred
        it further, and then only what this would have returned is lost.
        """
        with interrupts.deferred():
            return self._step()

    def _step(self) -> list[RequestDelta]:
        if self.lockstep is not None:
            self.lockstep.begin_step(self.scheduler.has_unfinished_requests)
        output = self.scheduler.schedule()
        self.num_scheduled_tokens = output.total_num_scheduled_tokens
        try:
            result = self.runner.execute_model(output)
        except KernelError as error:
            self._counters["num_failed_steps"] += 1
            changed = self.scheduler.fail_step(output, str(error), self.runner.take_abort_report())
        except BaseException:
            self.scheduler.abandon_step(output, "the step was interrupted", self.runner.take_abort_report())
            raise
        else:
            changed = self.scheduler.update_from_output(output, result)
        self._counters["num_steps"] += 1
        self._counters["num_computed_tokens"] += output.total_num_scheduled_tokens
        return [self._delta(request) for request in changed]

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request has not ended."""
        return self.scheduler.has_unfinished_requests

    @property
    def has_work(self) -> bool:
        """Whether a step is wanted, be it only to notice the end of leases and transfers."""
        has_work = self.scheduler.has_work
        return has_work if self.lockstep is None else self.lockstep.wants_step(has_work)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        with interrupts.deferred():
            self.scheduler.blocks.reset_prefix_cache()

    def audit(self) -> PoolAudit:
        """Count every block and check every rule of the pool."""
        return self.scheduler.blocks.pool.audit()

    def metrics(self) -> dict[str, int]:
        """Counters and gauges by name."""
        audit = dataclasses.asdict(self.audit())
        blocks = {f"num_blocks_{state}": audit[state] for state in ("free", "cached", "referenced", "leased", "quarantined")}
        return {**self._counters, **self.scheduler.counters(), **blocks, "num_blocks": audit["num_blocks"]}

    def shutdown(self) -> None:
        """Stop the runner and the connector. May be called twice."""
        with interrupts.deferred(), ExitStack() as ends:  # in reverse order, and each although another fails
            if self.lockstep is not None:
                ends.callback(self.lockstep.close)
            ends.callback(self.runner.shutdown)
            ends.callback(self.scheduler.shutdown)

    def _delta(self, request: Request) -> RequestDelta:
        fresh = request.take_new_tokens()
        stream = self._streams[request.request_id]
        text = stream.feed(fresh[:-1] if request.finish_reason == "stop" else fresh)  # the token that ends it has no text, as in vLLM
        logprobs = request.logprobs[-len(fresh) :] if fresh and request.logprobs else []
        if not request.finished:
            return RequestDelta(request.request_id, text, fresh, logprobs)
        del self._streams[request.request_id]
        return RequestDelta(
            request.request_id,
            text + stream.finish(),
            fresh,
            logprobs,
            request.finish_reason,
            request.stop_reason,
            request.error,
            request.output_kv_transfer_params,
        )


def _make_runner(config: EngineConfig, progress: Progress | None, lockstep: Lockstep | None) -> Runner:
    from interlock.runner.model_runner import ModelRunner  # an engine with a runner of its own needs no kernels

    return ModelRunner(config, progress=progress, group=lockstep)
