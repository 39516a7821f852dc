"""The connector steps of an engine without a connector: the calls of `lifecycle.py`, with nothing behind them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from interlock.core.errors import LifecycleError
from interlock.core.forward_context import AttentionMetadata, ForwardContext
from interlock.core.step import SchedulerOutput
from interlock.kv_transfer.connector_step import StepBatch


class InertKVStepDriver:
    """The driver of an engine without a connector: the same calls, nothing behind them."""

    def begin(self, context: ForwardContext) -> "InertKVStep":
        """See `KVStepDriver.begin`."""
        return InertKVStep(context)

    def no_forward(self, context: ForwardContext, scheduler_output: SchedulerOutput, batch: StepBatch) -> None:
        """See `KVStepDriver.no_forward`."""

    def take_abort_report(self) -> None:
        """Nothing is left behind."""

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """See `KVStepDriver.disabled`."""
        yield

    def reset_capture_state(self) -> None:
        """Nobody to tell."""

    def before_layer(self, layer_index: int) -> None:
        """Nothing is loaded."""

    def after_layer(self, layer_index: int) -> None:
        """Nothing is saved."""

    def shutdown(self) -> None:
        """Nothing to stop."""


class InertKVStep:
    """See `InertKVStepDriver`."""

    def __init__(self, context: ForwardContext) -> None:
        self.context = context

    def __enter__(self) -> "InertKVStep":
        return self

    def __exit__(self, *exc: Any) -> None:
        return None

    def pre_forward(self, scheduler_output: SchedulerOutput, input_batch: StepBatch, attn_metadata: AttentionMetadata | None) -> None:
        """Raises LifecycleError if the step was promised loads: without a connector nobody would make them."""
        if scheduler_output.has_sync_kv_loads:
            raise LifecycleError(f"step {scheduler_output.step} consumes KV loads, but the engine has no connector (kv_transfer_config)")

    def finish_forward(self) -> None:
        """Nothing to submit."""

    def wait_forward(self, wait: Callable[[float | None], bool]) -> None:
        """See `KVStep.wait_forward`."""
        wait(None)

    def wait_layers(self, layers: Iterable[int]) -> None:
        """Nothing is loaded."""

    def post_forward(self, finished_req_ids: frozenset[str]) -> None:
        """No report."""

    def abort(self) -> None:
        """Nothing to stop."""
