"""One rank: a model, its KV pool, its stream and programs, its half of the connector; and one step of it."""

from contextlib import ExitStack

from interlock.core import interrupts
from interlock.core.config import EngineConfig
from interlock.core.errors import KernelError
from interlock.core.forward_context import BatchDescriptor, ForwardContext
from interlock.core.step import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from interlock.graphs.program import Program
from interlock.graphs.stream import raise_for_status
from interlock.kv_transfer.clock import Clock
from interlock.models.ops import Ops
from interlock.runner.data_parallel import DataParallelGroup
from interlock.runner.dispatch import Dispatcher
from interlock.runner.drafter import Drafter, DraftStage
from interlock.runner.graph_manager import GraphManager
from interlock.runner.input_batch import InputBatch, PreparedBatch
from interlock.runner.kv_step import StepTimelines, create_kv_driver, supported_mode
from interlock.runner.rank import Progress, RankDevice, RankModel
from interlock.runner.sampler import Sampler, sampled_logprobs, sampled_tokens


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
        with interrupts.deferred(), ExitStack() as resources:  # given back here if anything below fails, Ctrl-C included
            with interrupts.served():  # long, and holds nothing yet
                model = RankModel.load(config, drafter, progress)
                loaded = model.loaded
                self._sampler = Sampler(model.workspace.logits, config.num_threads)
                model.load_kernels(config, self._sampler.kernel, progress)
            self.model_config, self.tokenizer, self.max_model_len = loaded.config, loaded.tokenizer, model.max_model_len
            self.logits = model.workspace.logits
            device = RankDevice.open(config, model, resources)
            self.kv_cache, self.stream, self.kv_cache_config = device.kv_cache, device.stream, device.kv_shape
            self.timelines = StepTimelines.create(self.kv_cache_config.num_layers)
            self._kv = create_kv_driver(config, self.kv_cache_config, self.kv_cache, self.stream, self.timelines, clock)
            resources.callback(self._kv.shutdown)
            landed, written, layers = self.timelines.landed, self.timelines.written, self.kv_cache.layers
            ops = Ops(self.stream, loaded.config, layers, model.workspace, model.rope, hooks=self._kv, landed=landed, written=written)
            self._draft = DraftStage(drafter, self.stream, layers, written) if drafter is not None else None
            self._input_batch = InputBatch(config, self.kv_cache_config, self.max_model_len, self.stream.record)
            self._graphs = GraphManager(self.stream, lambda: loaded.model.forward(ops))
            self._dispatcher = Dispatcher(supported_mode(config), config.capture_sizes, config.max_num_seqs, group)
            with self._kv.disabled():
                self._graphs.capture(self._dispatcher.descriptors())
            self._kv.reset_capture_state()
            interrupts.deliver()
            self._resources = resources.pop_all()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and wait for its tokens. Raises KernelError if a kernel reported a fault; the step then counts as not run. Whatever
        else is raised, an interrupt for one, aborts what the step has launched, without waiting for its end."""
        try:
            return self._execute(scheduler_output)
        except KernelError:
            raise
        except BaseException:
            self.stream.abort()
            raise

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
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

    def take_abort_report(self) -> KVConnectorOutput | None:
        """What the connector's part of a step that has just failed has left behind, once; None if it never heard of the step."""
        return self._kv.take_abort_report()

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
        self._resources.close()
