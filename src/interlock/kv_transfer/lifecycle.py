"""One connector step per SchedulerOutput: its order, its states, and how its loads are waited for.

Order: handle_preemptions → bind metadata → start_load_kv at once if the step consumes loads, otherwise in
finish_forward, right after the launch → layer hooks → finish_forward → post_forward, after everything that writes KV.
"""

import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from interlock.core.buffer import Buffer
from interlock.core.config import KVCacheConfig, KVLoadWait
from interlock.core.errors import LifecycleError
from interlock.core.forward_context import AttentionMetadata, CUDAGraphMode, ForwardContext
from interlock.core.step import KVConnectorOutput, SchedulerOutput
from interlock.graphs.stream import Event
from interlock.kv_transfer.connector import KVConnector
from interlock.kv_transfer.ledger import Ledger
from interlock.kv_transfer.rungs import Rung, choose_rung

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.02  # how often a gated replay's deadline is looked at


class StepState(enum.Enum):
    """State of a connector step. CREATED: pre_forward has not been called."""

    CREATED = 0
    OPEN = 1
    FINISHED = 2
    ABORTED = 3


class StepBatch(Protocol):
    """What a connector step reads of the runner's input batch."""

    @property
    def req_ids(self) -> list[str]:
        """Requests of the step, in batch order."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""

    @property
    def gate_wait_seconds(self) -> float:
        """How long the step has waited at gates."""

    def arm_gates(self) -> None:
        """From here on every layer's gate waits for its timeline to reach the step's stamp."""


class KVStepDriver:
    """Drives the worker half of a connector through the steps of one rank; its `before_layer` and `after_layer` are the model's hooks.

    kv_caches: per layer name, in layer order, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.
    load_timeout: seconds from the start of a step to the deadline of its loads. modes: the run-time modes that steps may have,
    checked against `kv_load_wait` now rather than in the middle of a step. synchronize: returns when every kernel launched so far
    has run; called before `save_kv_layer` of a connector that saves layers. record: an event for all that is launched so far; loads
    start only after what was launched before their step has run, since it may still write their blocks.
    """

    def __init__(
        self,
        connector: KVConnector,
        ledger: Ledger,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, Buffer],
        *,
        load_timeout: float,
        kv_load_wait: KVLoadWait,
        modes: Iterable[CUDAGraphMode],
        synchronize: Callable[[], None],
        record: Callable[[], Event] | None = None,
    ) -> None:
        for mode in modes:
            choose_rung(mode, connector, kv_load_wait)
        self.connector = connector
        self.ledger = ledger
        self.layer_names = kv_cache_config.layer_names
        self.kv_caches = kv_caches
        self.load_timeout = load_timeout
        self.kv_load_wait: KVLoadWait = kv_load_wait
        self.synchronize = synchronize
        self.record = record
        self.bytes_per_layer_token = kv_cache_config.block_bytes // kv_cache_config.block_size
        self._open: KVStep | None = None
        self._disabled = False

    def begin(self, context: ForwardContext) -> "KVStep":
        """A step in `context`; use as a context manager, or call its methods and end it with `post_forward` or `abort`."""
        if not isinstance(context, ForwardContext):
            raise LifecycleError(f"a connector step was begun with {context!r}, expected the step's ForwardContext; there is no default one")
        if self._disabled:
            raise LifecycleError(f"step {context.step} was begun while the connector is disabled (warm-up and capture never reach it)")
        if self._open is not None:
            raise LifecycleError(
                f"step {context.step} was begun while step {self._open.context.step} is {self._open.state.name}; "
                "end each step with post_forward or abort before the next"
            )
        self._open = KVStep(self, context, self._step_ended)
        return self._open

    def no_forward(self, context: ForwardContext, scheduler_output: SchedulerOutput, batch: StepBatch) -> KVConnectorOutput:
        """The whole lifecycle of a step without tokens."""
        with self.begin(context) as step:
            step.pre_forward(scheduler_output, batch, None)
            step.finish_forward()
            return step.post_forward(scheduler_output.finished_req_ids)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the layer hooks do nothing and no step may begin: for warm-up, capture, and dummy forwards."""
        if self._open is not None:
            raise LifecycleError(f"the connector was disabled while step {self._open.context.step} is {self._open.state.name}")
        before, self._disabled = self._disabled, True
        try:
            yield
        finally:
            self._disabled = before

    def reset_capture_state(self) -> None:
        """All programs are captured. Call it once, before the first step."""
        self.connector.reset_capture_state()

    def before_layer(self, layer_index: int) -> None:
        """Hook in front of a layer's KV write (eager and piecewise): returns when its loads have ended."""
        if not self._disabled:
            self._current("before_layer").before_layer(layer_index)

    def after_layer(self, layer_index: int) -> None:
        """Hook behind a layer's attention (eager and piecewise)."""
        if not self._disabled:
            self._current("after_layer").after_layer(layer_index)

    def shutdown(self) -> None:
        """Abort a step that is still open and shut the connector down."""
        if self._open is not None:
            self._open.abort()
        self.connector.shutdown()

    def _current(self, what: str) -> "KVStep":
        if self._open is None:
            raise LifecycleError(f"{what} was called outside a step; call begin and pre_forward first, or run inside disabled()")
        return self._open

    def _step_ended(self) -> None:
        self._open = None


class KVStep:
    """One step of a connector: CREATED → OPEN → FINISHED or ABORTED. Made by `KVStepDriver.begin`. on_end: called when it has ended."""

    def __init__(self, driver: KVStepDriver, context: ForwardContext, on_end: Callable[[], None]) -> None:
        self.context = context
        self.state = StepState.CREATED
        self.rung = choose_rung(context.cudagraph_runtime_mode, driver.connector, driver.kv_load_wait)
        self._driver = driver
        self._on_end = on_end
        self._connector = driver.connector
        self._ledger = driver.ledger
        self._attn_metadata: AttentionMetadata | None = None
        self._deferred: Callable[[], None] | None = None
        self._waited: set[int] = set()
        self._loads_aborted = False
        self._forward_finished = False
        self._gated = False
        self._batch: StepBatch | None = None
        self._seconds_waited = 0.0

    def __enter__(self) -> "KVStep":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.state in (StepState.CREATED, StepState.OPEN):
            self.abort()
            if kind is None:
                raise LifecycleError(f"step {self.context.step} was left without post_forward or abort; it has been aborted")

    def pre_forward(self, scheduler_output: SchedulerOutput, input_batch: StepBatch, attn_metadata: AttentionMetadata | None) -> None:
        """Before the launch. On rung BARRIER it returns only when every promised read has landed or counts as failed."""
        if self.state is not StepState.CREATED:
            raise LifecycleError(f"pre_forward of step {self.context.step}, which is {self.state.name}; it is called once, first")
        if scheduler_output.step != self.context.step:
            raise LifecycleError(f"the context belongs to step {self.context.step}, the scheduler output to step {scheduler_output.step}")
        self.state = StepState.OPEN
        self._attn_metadata = attn_metadata
        self._batch = input_batch
        self._connector.handle_preemptions(scheduler_output.kv_connector_metadata)
        self._connector.bind_connector_metadata(scheduler_output.kv_connector_metadata)
        earlier = self._driver.record() if self._driver.record is not None else None
        self._ledger.open_step(self.context.step, scheduler_output.load_promises, self._driver.load_timeout)

        def start() -> None:
            if earlier is not None:
                earlier.wait()
            self._connector.start_load_kv(
                self.context,
                scheduler_output=scheduler_output,
                request_ids=list(input_batch.req_ids),
                num_tokens=input_batch.num_tokens,
                attn_metadata=attn_metadata,
                ledger=self._ledger,
            )

        if not scheduler_output.has_sync_kv_loads:
            self._deferred = start
            return
        if self.rung is Rung.GATE:
            input_batch.arm_gates()  # before the first report, which may come while start_load_kv runs
        began = self._ledger.clock.now()
        self._guarded(start, range(len(self._driver.layer_names)))
        if self.rung is Rung.BARRIER:
            self._barrier()
        elif self.rung is Rung.GATE:
            self._gated = True
            self._waited.update(range(len(self._driver.layer_names)))
        self._seconds_waited += self._ledger.clock.now() - began

    def before_layer(self, layer_index: int) -> None:
        """See `KVStepDriver.before_layer`."""
        self._require_open("before_layer")
        if layer_index not in self._waited:
            began = self._ledger.clock.now()
            self._wait_layer(layer_index)
            self._seconds_waited += self._ledger.clock.now() - began

    def after_layer(self, layer_index: int) -> None:
        """See `KVStepDriver.after_layer`."""
        self._require_open("after_layer")
        if self._connector.saves_layers:
            self._driver.synchronize()
            name = self._driver.layer_names[layer_index]
            self._connector.save_kv_layer(name, self._driver.kv_caches[name], self._attn_metadata)

    def finish_forward(self) -> None:
        """Right after the launch, before sampling: submits the loads that this step does not consume."""
        self._require_open("finish_forward")
        if self._forward_finished:
            raise LifecycleError(f"finish_forward of step {self.context.step} was called twice")
        self._forward_finished = True
        if self._deferred is not None:
            # Whose loads these were is the connector's secret: if it raises and never names them, the engine's deadline ends them.
            self._guarded(self._deferred, range(len(self._driver.layer_names)))
            self._deferred = None
        self._connector.finish_forward()

    def wait_forward(self, wait: Callable[[float | None], bool]) -> None:
        """Wait for what was launched, with `wait` (as `Event.wait`). At the loads' deadline whatever has not landed fails, which opens
        the gates that the replay stands at: it cannot be cancelled, so it runs to its end, and what it made of those requests is void."""
        self._require_open("wait_forward")
        while self._gated and not wait(_WATCH_SECONDS):
            if self._ledger.expire_if_due(self.context.step):
                self._abort_loads()
                break
        wait(None)

    def wait_layers(self, layers: Iterable[int]) -> None:
        """For what runs behind the model and has layers of its own (drafting): returns when the loads of `layers` have ended."""
        self._require_open("wait_layers")
        for layer in layers:
            if self._gated:
                self._ledger.wait_layer(self.context.step, layer)
            else:
                self.before_layer(layer)

    def post_forward(self, finished_req_ids: frozenset[str]) -> KVConnectorOutput:
        """After everything that writes KV in this step has run, drafts included. Ends the step."""
        self._require_open("post_forward")
        if not self._forward_finished:
            raise LifecycleError(f"post_forward of step {self.context.step} before its finish_forward")
        step, connector = self.context.step, self._connector
        connector.wait_for_save()
        results = connector.get_transfer_results(finished_req_ids)
        bad_blocks = connector.get_block_ids_with_load_errors()
        self._ledger.retract_blocks(step, bad_blocks, "the connector reports a load error of its block")
        self._fail_unwaited_layers()
        if self._ledger.is_expired(step) or self._ledger.unfinished_block_ids(step):
            self._abort_loads()
        pending = self._ledger.unfinished_block_ids(step)
        verdict = self._ledger.close_step(step)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=verdict.invalid_block_ids | frozenset(bad_blocks),
            pending_block_ids=pending,
            load_errors={**results.recving_errors, **verdict.load_errors},
            kv_connector_stats=dict(connector.get_kv_connector_stats()),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
            load_wait_seconds=self._seconds_waited + (self._batch.gate_wait_seconds if self._gated and self._batch else 0.0),
            loaded_bytes=verdict.landed_positions * self._driver.bytes_per_layer_token,
        )
        connector.clear_connector_metadata()
        self._end(StepState.FINISHED)
        return output

    def abort(self) -> None:
        """The step failed: stop its loads and forget it."""
        if self.state in (StepState.FINISHED, StepState.ABORTED):
            raise LifecycleError(f"abort of step {self.context.step}, which is {self.state.name}")
        opened = self.state is StepState.OPEN
        self._end(StepState.ABORTED)
        if opened:
            self._ledger.abandon_step(self.context.step)
            self._abort_loads()
            self._connector.clear_connector_metadata()

    # ---- waiting

    def _barrier(self) -> None:
        layers = range(len(self._driver.layer_names))
        if self._connector.supports_timelines:
            self._ledger.wait_step(self.context.step)
            self._waited.update(layers)
        else:
            for layer in layers:
                self._wait_layer(layer)
        if self._ledger.is_expired(self.context.step):
            self._abort_loads()

    def _wait_layer(self, layer: int) -> None:
        """Ask the connector, then the ledger; under FULL a connector's return from start_load_kv was its claim."""
        step = self.context.step
        if self.context.cudagraph_runtime_mode is not CUDAGraphMode.FULL:  # also without promises: it may still count on the call
            self._guarded(lambda: self._connector.wait_for_layer_load(self._driver.layer_names[layer]), range(layer, layer + 1))
        if not self._ledger.has_promises(step):
            self._waited.add(layer)
            return
        if not self._connector.supports_timelines:
            self._ledger.claim_layer(step, layer)
        self._ledger.wait_layer(step, layer)
        self._waited.add(layer)
        if self._ledger.is_expired(step):
            self._abort_loads()

    def _guarded(self, call: Callable[[], None], layers: Iterable[int]) -> None:
        """What a connector raises while it loads costs the loads, not the engine."""
        try:
            call()
        except Exception as error:
            logger.exception("%s raised while it loaded; its loads of step %d count as failed", type(self._connector).__name__, self.context.step)
            for layer in layers:
                self._ledger.fail_layer(self.context.step, layer, f"the connector raised {type(error).__name__}: {error}")

    def _fail_unwaited_layers(self) -> None:
        """A layer that nobody waited for may have run before its KV landed."""
        for layer, name in enumerate(self._driver.layer_names):
            if layer not in self._waited:
                self._ledger.fail_layer(self.context.step, layer, f"layer {name!r} ran without waiting for its load")

    def _abort_loads(self) -> None:
        if not self._loads_aborted:
            self._loads_aborted = True
            self._connector.abort_loads(self.context.step)

    def _require_open(self, what: str) -> None:
        if self.state is not StepState.OPEN:
            raise LifecycleError(
                f"{what} of step {self.context.step}, which is {self.state.name}; expected OPEN (between pre_forward and post_forward)"
            )

    def _end(self, state: StepState) -> None:
        self.state = state
        self._on_end()
