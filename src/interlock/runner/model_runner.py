"""One rank: a model, its KV pool, its stream and programs, its half of the connector; and one step of it."""

import dataclasses
from collections.abc import Callable

from interlock.core.buffer import Buffer
from interlock.core.config import EngineConfig
from interlock.core.forward_context import BatchDescriptor, ForwardContext
from interlock.core.step import ModelRunnerOutput, SchedulerOutput
from interlock.graphs import NATIVE_FUNCTIONS
from interlock.graphs.program import Program
from interlock.graphs.stream import Stream, raise_for_status
from interlock.graphs.threads import ThreadTeam
from interlock.kernels import native
from interlock.kv_transfer.clock import Clock
from interlock.kv_transfer.lifecycle import KVStepDriver
from interlock.models.ops import Ops
from interlock.models.registry import load_model
from interlock.models.rope import rope_table
from interlock.models.workspace import Workspace
from interlock.runner.data_parallel import DataParallelGroup
from interlock.runner.dispatch import Dispatcher
from interlock.runner.drafter import Drafter, DraftStage
from interlock.runner.fingerprint import kernel_fingerprint
from interlock.runner.graph_manager import GraphManager
from interlock.runner.input_batch import InputBatch, PreparedBatch
from interlock.runner.kv_cache import KVCache, fit_max_model_len, kv_cache_config, kv_dtype, kv_identity
from interlock.runner.kv_step import StepTimelines, create_kv_driver, supported_mode
from interlock.runner.sampler import Sampler, sampled_logprobs, sampled_tokens

Progress = Callable[[str, int, int], None]


class ModelRunner:
    """Executes steps. Loads the model, compiles its kernels, allocates the pool and captures all programs when it is made.

    progress(what, done, total): called during the long parts. group: the data-parallel ranks, or None. drafter: runs after sampling, or None.
    clock: of load deadlines. logits: float32 [max_num_seqs, vocab_size], of which the rows of the last step are live.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        group: DataParallelGroup | None = None,
        drafter: Drafter | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        loaded = load_model(config.model, config.dtype, progress)
        self.model_config, self.tokenizer = loaded.config, loaded.tokenizer
        num_layers = loaded.config.num_layers + (drafter.num_layers if drafter is not None else 0)
        kv_model = dataclasses.replace(loaded.config, num_layers=num_layers)
        self.max_model_len = fit_max_model_len(config, kv_model)
        rope = Buffer.from_numpy(rope_table(loaded.config.rope, self.max_model_len))
        workspace = Workspace.allocate(
            loaded.config,
            max_num_tokens=config.max_num_batched_tokens,
            max_num_reqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            num_threads=config.num_threads,
        )
        self.logits = workspace.logits
        self._sampler = Sampler(workspace.logits, config.num_threads)
        functions = [*NATIVE_FUNCTIONS, *(kernel.function for kernel in (*loaded.model.kernels(kv_dtype(config)), self._sampler.kernel))]
        native.load(functions, progress and (lambda name, done, total: progress(f"compiling {name}", done, total)))
        identity = kv_identity(config, loaded, rope) + (f" drafter={drafter.identity}" if drafter is not None else "")
        shape = kv_cache_config(config, kv_model, identity)
        self.kv_cache = KVCache.allocate(shape, shared=config.kv_transfer_config is not None)
        self._team = ThreadTeam(config.num_threads)
        self.stream = Stream(self._team)
        if config.kv_transfer_config is not None:
            probe = Ops(self.stream, loaded.config, self.kv_cache.layers, workspace, rope)
            shape = kernel_fingerprint(
                config, shape, self.stream, lambda: loaded.model.forward(probe), self.kv_cache.layers, loaded.config.vocab_size
            )
        self.kv_cache_config = shape
        self.timelines = StepTimelines.create(shape.num_layers)
        self._kv = create_kv_driver(config, shape, self.kv_cache, self.stream, self.timelines, clock)
        landed, written = self.timelines.landed, self.timelines.written
        ops = Ops(self.stream, loaded.config, self.kv_cache.layers, workspace, rope, hooks=self._kv, landed=landed, written=written)
        self._draft = DraftStage(drafter, self.stream, self.kv_cache.layers, written) if drafter is not None else None
        self._input_batch = InputBatch(config, shape, self.max_model_len)
        self._graphs = GraphManager(self.stream, lambda: loaded.model.forward(ops))
        self._dispatcher = Dispatcher(supported_mode(config), config.capture_sizes, config.max_num_seqs, group)
        with self._kv.disabled():
            self._graphs.capture(self._dispatcher.descriptors())
        if isinstance(self._kv, KVStepDriver):
            self._kv.connector.reset_capture_state()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and wait for its tokens. Raises KernelError if a kernel reported a fault; the step then counts as not run."""
        self._input_batch.update_states(scheduler_output)
        batch = self._input_batch.prepare(scheduler_output)
        descriptor, dp_metadata = self._dispatcher.dispatch(batch.num_tokens, batch.uniform)
        context = ForwardContext(scheduler_output.step, batch.attn_metadata, descriptor.cg_mode, descriptor, dp_metadata)
        self.stream.bind_slot(batch.slot.address, batch.slot.status_buffer)
        if batch.num_tokens == 0:
            return self._step_without_tokens(context, scheduler_output, batch)
        with self._kv.begin(context) as kv:
            kv.pre_forward(scheduler_output, batch, batch.attn_metadata)
            self._graphs.launch(descriptor)
            kv.finish_forward()
            self._sampler.launch(self.stream)
            kv.wait_forward(self.stream.record().wait)
            raise_for_status(batch.slot.status_buffer)
            sampled, failed = sampled_tokens(batch)
            if self._draft is not None:
                self._draft.run(kv, batch, sampled)
            self._input_batch.append_sampled(sampled)
            connector_output = kv.post_forward(scheduler_output.finished_req_ids)
        return ModelRunnerOutput(scheduler_output.step, sampled, sampled_logprobs(batch), connector_output, descriptor.cg_mode, failed)

    def _step_without_tokens(self, context: ForwardContext, scheduler_output: SchedulerOutput, batch: PreparedBatch) -> ModelRunnerOutput:
        """The connector's lifecycle alone; before it, if other ranks have tokens, a forward pass with no live row, which writes nothing."""
        if context.dp_metadata is not None and any(context.dp_metadata.num_tokens_across_dp):
            assert context.batch_descriptor is not None
            with self._kv.disabled():
                self._graphs.launch(context.batch_descriptor)
            self.stream.synchronize()
            raise_for_status(batch.slot.status_buffer)
        connector_output = self._kv.no_forward(context, scheduler_output, batch)
        return ModelRunnerOutput(scheduler_output.step, kv_connector_output=connector_output, cudagraph_runtime_mode=context.cudagraph_runtime_mode)

    def program(self, descriptor: BatchDescriptor) -> Program:
        """The captured program of a descriptor."""
        return self._graphs.program(descriptor)

    def shutdown(self) -> None:
        """Stop the connector and the threads, and give the shared memory back. May be called twice."""
        self._kv.shutdown()
        self._team.shutdown()
        self.kv_cache.close()
