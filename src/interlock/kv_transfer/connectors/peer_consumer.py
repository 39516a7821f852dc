"""References that our requests brought: which of them is read when, by which of the two ways, and when it is given back."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from interlock.core.config import KVCacheConfig
from interlock.core.step import LoadPromise, SchedulerOutput
from interlock.kv_transfer.connector import ConnectorRequest
from interlock.kv_transfer.connectors.peer_messages import PeerLoad
from interlock.kv_transfer.references import RemoteReference, check_tokens, from_params, push_from_params

_REMEMBERED_REFERENCES = 65536
_ASSUMED_BYTES_PER_SECOND = 1e9  # before the first load was measured


@dataclass(slots=True)
class _Wanted:
    reference: RemoteReference
    parked: bool = False
    promise: LoadPromise | None = None
    started: bool = False


class PeerConsumer:
    """A reference is released when no request of ours can still want it, and then is void.

    max_sync_load_seconds: a load that is predicted to take longer is waited for outside the steps (parked). None: the loads of finished
    prefills are never parked, and pushes always are, since nobody knows when the producer computes them.
    """

    def __init__(self, config: KVCacheConfig, max_sync_load_seconds: float | None, push: bool) -> None:
        self.bytes_per_second = _ASSUMED_BYTES_PER_SECOND
        self._config = config
        self._max_sync_load_seconds = max_sync_load_seconds
        self._push = push
        self._wanted: dict[str, _Wanted] = {}
        self._users: Counter[str] = Counter()
        self._used: OrderedDict[str, None] = OrderedDict()
        self._allocated: list[str] = []
        self._kept: list[RemoteReference] = []
        self._released: list[RemoteReference] = []
        self._cancelled: list[str] = []
        self._ending: set[str] = set()

    def add(self, request: ConnectorRequest) -> None:
        """Raises RequestError for a reference that cannot be used."""
        if self._push:
            reference = push_from_params(request.kv_transfer_params or {}, request.all_token_ids)
        else:
            reference = from_params(request.kv_transfer_params or {})
            check_tokens(reference, request.all_token_ids)
        self._wanted[request.request_id] = _Wanted(reference)
        self._users[reference.key] += 1
        if reference.key not in self._used:
            self._kept.append(reference)

    def num_matched(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """Positions beyond `num_computed_tokens` that can be loaded (the last token of a request is always computed here), and whether
        the request is to wait for them outside the steps."""
        wanted = self._wanted.get(request.request_id)
        if wanted is None:
            return 0, False
        count = max(0, min(wanted.reference.num_tokens, request.num_tokens - 1) - num_computed_tokens)
        return count, count > 0 and self._parks(count)

    def allocated(self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Load with the next step; or, with everything cached here, not at all."""
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.started:
            return
        if not num_external_tokens:
            self.release(request.request_id)
            return
        start, size = request.num_computed_tokens, self._config.block_size
        stop = start + num_external_tokens
        wanted.parked = self._parks(num_external_tokens)
        wanted.promise = LoadPromise(request.request_id, start, stop, tuple(block_ids[start // size : -(-stop // size)]))
        self._allocated.append(request.request_id)

    def finished(self, request_id: str) -> None:
        """The request has ended. A load that it waits for is stopped first, and its reference goes back when it has ended."""
        wanted = self._wanted.get(request_id)
        if wanted is not None and wanted.parked and wanted.started:
            self._cancelled.append(request_id)
            self._ending.add(request_id)
        else:
            self.release(request_id)

    def release(self, request_id: str) -> None:
        """The request wants its reference no longer: it has been read, or is not going to be."""
        wanted = self._wanted.pop(request_id, None)
        self._ending.discard(request_id)
        if wanted is None:
            return
        reference = wanted.reference
        self._users[reference.key] -= 1
        if self._users[reference.key] == 0:
            del self._users[reference.key]
            if reference.key not in self._used:
                self._used[reference.key] = None
                self._released.append(reference)
            while len(self._used) > _REMEMBERED_REFERENCES:
                self._used.popitem(last=False)

    def take_loads(self, scheduler_output: SchedulerOutput) -> tuple[PeerLoad, ...]:
        """What is to be loaded from now on: the promises of the step that are ours to keep, and what requests wait for."""
        promises = {promise.req_id: promise for promise in scheduler_output.load_promises}
        loads = []
        for request_id in self._allocated:
            wanted = self._wanted.get(request_id)
            if wanted is None:
                continue
            promise = wanted.promise if wanted.parked else promises.get(request_id)
            if promise is None:
                continue
            wanted.started = True
            reference = wanted.reference
            void = f"the reference to request {reference.request_id!r} was used before" if reference.key in self._used else None
            loads.append(PeerLoad(promise, reference, void, wanted.parked))
        self._allocated.clear()
        return tuple(loads)

    def take_kept(self) -> tuple[RemoteReference, ...]:
        """New references since the last call."""
        kept, self._kept = tuple(self._kept), []
        return kept

    def take_released(self) -> tuple[RemoteReference, ...]:
        """References to be given back since the last call."""
        released, self._released = tuple(self._released), []
        return released

    def take_cancelled(self) -> tuple[str, ...]:
        """Requests that wait for their load no longer, since the last call."""
        cancelled, self._cancelled = tuple(self._cancelled), []
        return cancelled

    @property
    def has_news(self) -> bool:
        """Whether the worker half must hear something even if no request runs, or is expected to say something."""
        return bool(self._kept or self._released or self._cancelled or self._ending)

    def _parks(self, num_tokens: int) -> bool:
        limit = self._max_sync_load_seconds
        if self._push:
            return limit is None or limit < float("inf")
        return limit is not None and num_tokens * self._config.bytes_per_token / self.bytes_per_second > limit
