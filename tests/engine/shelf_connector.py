"""A connector whose far side is a shelf in this process: KV of finished prompts, found again by their tokens, with faults on demand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from interlock.core.buffer import Buffer
from interlock.core.forward_context import ForwardContext
from interlock.kv_transfer.connector import KVConnector

POISON = 0x7FC0  # bfloat16: NaN


@dataclass
class Shelf:
    """entries: tokens → per layer uint16 [positions, 2, heads, dim]. fail_from: per load, its first block that does not land."""

    entries: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)
    fail_from: list[int | None] = field(default_factory=list)
    is_async: bool = False
    num_loads: int = 0
    num_failures: int = 0


SHELF: list[Shelf] = []  # the test's shelf; connectors are made by name, so they find it here


@dataclass
class Orders:
    """What the scheduler half tells the worker half in a step."""

    saves: dict[str, tuple[list[int], tuple[int, ...]]]
    loads: dict[str, tuple[list[int], int, int]]


class ShelfConnector(KVConnector):
    """Puts every finished request's KV on the shelf, and loads the longest prefix that it finds there."""

    saves_layers = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.shelf = SHELF[-1]
        self.found: dict[str, tuple[int, ...]] = {}
        self.orders = Orders({}, {})
        self.bad_blocks: set[int] = set()
        self.saved: set[str] = set()
        self.loaded: set[str] = set()

    # scheduler half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = tuple(request.all_token_ids)
        lengths = [sum(1 for _ in iterate_common(entry, tokens)) for entry in self.shelf.entries]
        return max([length - num_computed_tokens for length in lengths] + [0]), self.shelf.is_async

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        if num_external_tokens:
            start = request.num_computed_tokens
            self.orders.loads[request.request_id] = (list(block_ids), start, start + num_external_tokens)
            self.orders.saves[f"tokens {request.request_id}"] = ([], tuple(request.all_token_ids))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        orders, self.orders = self.orders, Orders({}, {})
        return orders

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        self.orders.saves[request.request_id] = (list(block_ids), tuple(request.all_token_ids[: request.num_computed_tokens]))
        return True, None

    # worker half

    def register_kv_caches(self, kv_caches: Mapping[str, Buffer]) -> None:
        self.layers = [buffer.numpy() for buffer in kv_caches.values()]
        self.block_size = self.layers[0].shape[3]

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        for req_id, (block_ids, start, stop) in orders.loads.items():
            self._load(block_ids, start, stop, orders.saves[f"tokens {req_id}"][1])
            if self.shelf.is_async:
                self.loaded.add(req_id)

    def _load(self, block_ids: list[int], start: int, stop: int, tokens: tuple[int, ...]) -> None:
        self.shelf.num_loads += 1
        fail_from = self.shelf.fail_from.pop(0) if self.shelf.fail_from else None
        first_bad = stop if fail_from is None else min(stop, start + fail_from * self.block_size)
        source = next(kv for entry, kv in self.shelf.entries.items() if entry[:stop] == tokens[:stop])
        for layer, kv in zip(self.layers, source, strict=True):
            for position in range(start, stop):
                page = layer[block_ids[position // self.block_size]]
                page[:, :, position % self.block_size] = kv[position] if position < first_bad else POISON
        bad = block_ids[first_bad // self.block_size : -(-stop // self.block_size)] if first_bad < stop else []
        self.shelf.num_failures += bool(bad)
        self.bad_blocks.update(bad)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Buffer, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for req_id, (block_ids, tokens) in self._get_connector_metadata().saves.items():
            if not req_id.startswith("tokens "):
                positions = np.arange(len(tokens))
                blocks = np.asarray(block_ids, np.int64)
                where = blocks[positions // self.block_size] if len(tokens) else positions
                self.shelf.entries[tokens] = [layer[where, :, :, positions % self.block_size].copy() for layer in self.layers]
                self.saved.add(req_id)

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[set[str] | None, set[str] | None]:
        saved, loaded = self.saved, self.loaded
        self.saved, self.loaded = set(), set()
        return saved, loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self.bad_blocks = self.bad_blocks, set()
        return bad


def iterate_common(first: Sequence[int], second: Sequence[int]) -> Any:
    """The tokens that both begin with."""
    for mine, other in zip(first, second, strict=False):
        if mine != other:
            return
        yield mine
