"""One step of a connector: its order, its states, how its loads are waited for, and what is left of it when something fails.

Order: handle_preemptions → bind metadata → start_load_kv at once if the step consumes loads, otherwise in
finish_forward, right after the launch → layer hooks → finish_forward → post_forward, after everything that writes KV.
"""

import enum
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from interlock.core import interrupts
from interlock.core.errors import LifecycleError
from interlock.core.forward_context import AttentionMetadata, CUDAGraphMode, ForwardContext
from interlock.core.step import KVConnectorOutput, LoadPromise, SchedulerOutput
from interlock.graphs.stream import Event
from interlock.kv_transfer.connector import KVConnectorTransferResults
from interlock.kv_transfer.rungs import Rung, choose_rung

if TYPE_CHECKING:
    from interlock.kv_transfer.lifecycle import KVStepDriver

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


class KVStep:
    """One step of a connector: CREATED → OPEN → FINISHED or ABORTED. Made by `KVStepDriver.begin`.

    on_end: called when it has ended: with what it has left behind, if it was aborted after it was opened, and with whether the connector
    may still make loads that were ordered up to now (`KVStepDriver.owes_loads`). What the connector raises costs
    loads or saves of this step (`worker_guard.py`); the step goes on.
    """

    def __init__(self, driver: "KVStepDriver", context: ForwardContext, on_end: Callable[[KVConnectorOutput | None, bool], None]) -> None:
        self.context = context
        self.state = StepState.CREATED
        self.rung = choose_rung(context.cudagraph_runtime_mode, driver.connector, driver.kv_load_wait)
        self._driver = driver
        self._on_end = on_end
        self._connector = driver.guard
        self._ledger = driver.ledger
        self._attn_metadata: AttentionMetadata | None = None
        self._earlier: Event | None = None
        self._arguments: dict[str, Any] = {}
        self._fault: str | None = None
        self._owed = driver.owes_loads
        self._is_bound = False
        self._start_is_due = False
        self._has_started = False
        self._waited: set[int] = set()
        self._loads_raised = False
        self._abort_fault: str | None = None
        self._loads_aborted = False
        self._save_failed = False
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
        self._fault = "the step failed before its loads were started"  # holds until they are
        lost = self._bind(scheduler_output)
        self._earlier = self._driver.record() if self._driver.record is not None else None
        self._ledger.open_step(self.context.step, scheduler_output.load_promises, self._driver.load_timeout)
        self._arguments = {
            "scheduler_output": scheduler_output,
            "request_ids": list(input_batch.req_ids),
            "num_tokens": input_batch.num_tokens,
            "attn_metadata": attn_metadata,
            "ledger": self._ledger,
        }
        self._start_is_due = True
        if scheduler_output.has_sync_kv_loads and self.rung is Rung.GATE:
            input_batch.arm_gates()  # before the first report, which may come while start_load_kv runs
        if lost is not None:
            self._lose_loads(lost)
        if not scheduler_output.has_sync_kv_loads:
            return
        began = self._ledger.clock.now()
        self._start_loads()
        if self.rung is Rung.BARRIER:
            self._barrier()
        elif self.rung is Rung.GATE:
            self._gated = True
            self._waited.update(range(self._ledger.num_layers))
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
        if self._connector.saves_layers and self._is_bound and not self._save_failed:
            self._driver.synchronize()
            name = self._driver.layer_names[layer_index]
            fault = self._connector.save_kv_layer(name, self._driver.kv_caches[name], self._attn_metadata)
            self._save_failed = fault is not None

    def finish_forward(self) -> None:
        """Right after the launch, before sampling: submits the loads that this step does not consume."""
        self._require_open("finish_forward")
        if self._forward_finished:
            raise LifecycleError(f"finish_forward of step {self.context.step} was called twice")
        self._forward_finished = True
        self._start_loads()
        if self._is_bound:
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
        self._await_owed()
        if self._is_bound:
            connector.wait_for_save()
        ends = connector.get_transfer_results(finished_req_ids)
        results, bad_blocks = ends.results, connector.get_block_ids_with_load_errors()
        if bad_blocks.fault is not None:
            self._fail_all_layers(bad_blocks.fault)
            results = _all_failed(results, bad_blocks.fault)
        self._ledger.retract_blocks(step, bad_blocks.value, "the connector reports a load error of its block")
        self._fail_unwaited_layers()
        if (self._loads_raised and self._promises) or self._ledger.is_expired(step) or self._ledger.unfinished_block_ids(step):
            self._abort_loads()
        pending = self._ledger.unfinished_block_ids(step)
        verdict = self._ledger.close_step(step)
        if self._abort_fault is not None and not connector.supports_timelines:
            pending |= verdict.invalid_block_ids  # nothing tells which of them it has stopped writing
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=verdict.invalid_block_ids | bad_blocks.value,
            pending_block_ids=pending,
            load_errors={**results.recving_errors, **verdict.load_errors},
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
            load_wait_seconds=self._seconds_waited + (self._batch.gate_wait_seconds if self._gated and self._batch else 0.0),
            loaded_bytes=verdict.landed_positions * self._driver.bytes_per_layer_token,
            num_dropped_reports=ends.num_dropped,
            num_connector_faults=connector.take_num_faults(),
            fault=self._fault,
        )
        connector.clear_connector_metadata()
        self._end(StepState.FINISHED)
        return output

    def abort(self) -> None:
        """The step failed: stop its loads and forget it. What may still write is left to `KVStepDriver.take_abort_report`."""
        if self.state in (StepState.FINISHED, StepState.ABORTED):
            raise LifecycleError(f"abort of step {self.context.step}, which is {self.state.name}")
        if self.state is StepState.CREATED:
            self._end(StepState.ABORTED)
            return
        pending = frozenset(block_id for promise in self._promises for block_id in promise.block_ids)
        try:
            with interrupts.deferred():  # an interrupt of its own: this waits for the connector
                if self._stop_loads():
                    pending = self._ledger.unfinished_block_ids(self.context.step)
        finally:  # also if it is interrupted once more: then everything that was promised may still be written
            self._ledger.abandon_step(self.context.step)
            faults = self._connector.take_num_faults()
            if self._owed and self._fault is None:
                self._fault = f"step {self.context.step}, with which loads that were ordered before it may have begun, failed"
            self._end(StepState.ABORTED, KVConnectorOutput(pending_block_ids=pending, num_connector_faults=faults, fault=self._fault))
            self._connector.clear_connector_metadata()

    # ---- loads

    def _bind(self, scheduler_output: SchedulerOutput) -> str | None:
        """Give the connector its metadata, if there is some. Returns why the step's loads are lost, or None."""
        if scheduler_output.connector_fault is not None:
            return scheduler_output.connector_fault
        metadata = scheduler_output.kv_connector_metadata
        preemptions = self._connector.handle_preemptions(metadata)
        binding = self._connector.bind_connector_metadata(metadata)
        self._is_bound = binding is None
        return binding or preemptions

    def _start_loads(self) -> None:
        """Once, with the metadata bound: without it the connector would not know what to load."""
        if not self._start_is_due:
            return
        self._start_is_due = False
        if self._is_bound:
            if self._earlier is not None:
                self._earlier.wait()
            fault = self._connector.start_load_kv(self.context, self._arguments)
            self._fault, self._has_started = fault, True
            if fault is not None:
                self._lose_loads(fault)

    def _lose_loads(self, fault: str) -> None:
        self._loads_raised = True
        self._fault = fault
        self._fail_all_layers(fault)

    def _fail_all_layers(self, cause: str) -> None:
        for layer in range(self._ledger.num_layers):
            self._ledger.fail_layer(self.context.step, layer, cause)

    @property
    def _promises(self) -> tuple[LoadPromise, ...]:
        return self._arguments["scheduler_output"].load_promises if self._arguments else ()

    # ---- waiting

    def _barrier(self) -> None:
        layers = range(self._ledger.num_layers)
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
        self._ask_for_layer(layer)
        if not self._ledger.has_promises(step):
            self._waited.add(layer)
            return
        if not self._connector.supports_timelines:
            self._ledger.claim_layer(step, layer)
        self._ledger.wait_layer(step, layer)
        self._waited.add(layer)
        if self._ledger.is_expired(step):
            self._abort_loads()

    def _ask_for_layer(self, layer: int) -> bool:
        """Where no replay runs, the connector is asked, also without promises: it may count on the call. Whether it has said that the
        layer's reads have ended."""
        if self.context.cudagraph_runtime_mode is CUDAGraphMode.FULL or not self._is_bound:
            return True
        fault = self._connector.wait_for_layer_load(self._driver.layer_names[layer])
        if fault is not None:
            self._loads_raised = True
            self._ledger.fail_layer(self.context.step, layer, fault)
        return fault is None

    def _await_owed(self) -> None:
        """Loads that were ordered for earlier steps, whose metadata or start got lost, may have begun with this one. Nobody counts on them, but
        their blocks come back when it has ended, so they must have ended too. Had it loads of its own, the hooks have waited for all."""
        if self._owed and self._fault is None and not self._promises:
            for layer in range(self._ledger.num_layers):
                if not self._ask_for_layer(layer):
                    self._fault = "loads that were ordered before may not have ended: the wait for them has raised"

    def _fail_unwaited_layers(self) -> None:
        """A layer that nobody waited for may have run before its KV landed."""
        for layer, name in enumerate(self._driver.layer_names):
            if layer not in self._waited:
                self._ledger.fail_layer(self.context.step, layer, f"layer {name!r} ran without waiting for its load")

    def _abort_loads(self) -> None:
        if not self._loads_aborted and self._is_bound:
            self._loads_aborted = True
            self._abort_fault = self._connector.abort_loads(self.context.step)

    def _stop_loads(self) -> bool:
        """Of a step that has failed. Whether the ledger knows of everything that may still write: a connector that does not report there
        has to say for each layer that its reads have ended."""
        if not self._promises:
            self._start_loads()  # they have not failed with the step, which does not consume them
        was_interrupted = self._is_bound and not self._start_is_due and not self._has_started
        self._abort_loads()
        if self._connector.supports_timelines or not self._promises or not self._is_bound or self._start_is_due:
            return True
        asked = [self._ask_for_layer(layer) for layer in range(self._ledger.num_layers) if layer not in self._waited]
        return self._abort_fault is None and all(asked) and not was_interrupted

    def _require_open(self, what: str) -> None:
        if self.state is not StepState.OPEN:
            raise LifecycleError(
                f"{what} of step {self.context.step}, which is {self.state.name}; expected OPEN (between pre_forward and post_forward)"
            )

    def _end(self, state: StepState, report: KVConnectorOutput | None = None) -> None:
        was_open, self.state = self.state is StepState.OPEN, state
        owes = self._owed
        if was_open:
            output = self._arguments.get("scheduler_output")
            owes = self._fault is not None and (owes or output is None or bool(output.load_promises or output.async_load_req_ids))
        self._on_end(report, owes)


def _all_failed(results: KVConnectorTransferResults, cause: str) -> KVConnectorTransferResults:
    """The same ends, none of them a success."""
    recving = results.finished_recving | results.failed_recving
    return KVConnectorTransferResults(results.finished_sending, recving, recving, {**dict.fromkeys(recving, cause), **results.recving_errors})
