"""The worker half of a connector, driven step by step: one connector step per SchedulerOutput, and nothing between capture and the first."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from interlock.core.buffer import Buffer
from interlock.core.config import KVCacheConfig, KVLoadWait
from interlock.core.errors import LifecycleError
from interlock.core.forward_context import CUDAGraphMode, ForwardContext
from interlock.core.step import KVConnectorOutput, SchedulerOutput
from interlock.graphs.stream import Event
from interlock.kv_transfer.connector import KVConnector
from interlock.kv_transfer.connector_step import KVStep, StepBatch
from interlock.kv_transfer.ledger import Ledger
from interlock.kv_transfer.registry import named_faults
from interlock.kv_transfer.rungs import choose_rung
from interlock.kv_transfer.worker_guard import WorkerGuard


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
        self.guard = WorkerGuard(connector)
        self.ledger = ledger
        self.layer_names = kv_cache_config.layer_names
        self.kv_caches = kv_caches
        self.load_timeout = load_timeout
        self.kv_load_wait: KVLoadWait = kv_load_wait
        self.synchronize = synchronize
        self.record = record
        self.bytes_per_layer_token = kv_cache_config.block_bytes // kv_cache_config.block_size
        self._open: KVStep | None = None
        self._aborted: KVConnectorOutput | None = None
        self._owes_loads = False
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
        self._open, self._aborted = KVStep(self, context, self._step_ended), None
        return self._open

    def no_forward(self, context: ForwardContext, scheduler_output: SchedulerOutput, batch: StepBatch) -> KVConnectorOutput:
        """The whole lifecycle of a step without tokens."""
        with self.begin(context) as step:
            step.pre_forward(scheduler_output, batch, None)
            step.finish_forward()
            return step.post_forward(scheduler_output.finished_req_ids)

    def take_abort_report(self) -> KVConnectorOutput | None:
        """What the last step has left behind if it was aborted (`KVStep.abort`); None if it was not, or the connector never heard of it."""
        report, self._aborted = self._aborted, None
        return report

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
        """All programs are captured. Call it once, before the first step. Raises ConfigError."""
        with named_faults(self.connector.kv_transfer_config, "cannot forget what the capture has changed (reset_capture_state)"):
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
        self.guard.shutdown()

    def _current(self, what: str) -> "KVStep":
        if self._open is None:
            raise LifecycleError(f"{what} was called outside a step; call begin and pre_forward first, or run inside disabled()")
        return self._open

    @property
    def owes_loads(self) -> bool:
        """Whether the connector was ordered to make loads that it has not begun, because something raised, and that it may make yet."""
        return self._owes_loads

    def _step_ended(self, report: KVConnectorOutput | None, owes_loads: bool) -> None:
        self._open, self._aborted, self._owes_loads = None, report, owes_loads
