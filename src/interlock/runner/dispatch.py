"""Which captured shape and which mode a step runs under, agreed by all data-parallel ranks in the step's one collective."""

from collections.abc import Sequence

from interlock.core.forward_context import BatchDescriptor, CUDAGraphMode, DPMetadata
from interlock.runner.data_parallel import DataParallelGroup

# From the most conservative mode to the least: the ranks run under the lowest that any of them needs.
_MODE_ORDER = (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


class Dispatcher:
    """Chooses the batch descriptor of a step. Without a group, or with one rank, it makes no collective."""

    def __init__(
        self, configured_mode: CUDAGraphMode, capture_sizes: Sequence[int], max_num_seqs: int, group: DataParallelGroup | None = None
    ) -> None:
        self._configured = configured_mode
        self._sizes = tuple(sorted(capture_sizes))
        self._max_num_seqs = max_num_seqs
        self._group = group if group is not None and group.size > 1 else None
        self._decided: dict[tuple[int, bool], BatchDescriptor] = {}

    def descriptors(self) -> list[BatchDescriptor]:
        """Every descriptor that needs a captured program, largest first."""
        found = set()
        for size in self._sizes:
            for uniform in (True, False):
                descriptor = self._local(size, uniform)
                if self._group is not None and descriptor.cg_mode is CUDAGraphMode.FULL:
                    found.add(self._padded(size, uniform, CUDAGraphMode.PIECEWISE))  # another rank may need it
                if descriptor.cg_mode is not CUDAGraphMode.NONE:
                    found.add(descriptor)
        return sorted(found, key=lambda d: (-d.num_tokens, d.uniform, d.cg_mode.name))

    def dispatch(self, num_tokens: int, uniform: bool) -> tuple[BatchDescriptor, DPMetadata | None]:
        """The descriptor of a batch of `num_tokens` live rows; `uniform` says that every query has length 1.

        A batch without tokens asks for nothing: it is as uniform as the others' batches are.
        """
        uniform = uniform or num_tokens == 0
        local = self._local(num_tokens, uniform)
        if self._group is None:
            return local, None
        gathered = self._group.all_gather((num_tokens, int(uniform), _MODE_ORDER.index(local.cg_mode)))
        mode = _MODE_ORDER[min(row[2] for row in gathered)]
        agreed = self._padded(max(row[0] for row in gathered), all(row[1] for row in gathered), mode)
        return agreed, DPMetadata(tuple(row[0] for row in gathered), agreed.cg_mode)

    def _local(self, num_tokens: int, uniform: bool) -> BatchDescriptor:
        """What this rank would choose by itself; decided once for each kind of batch."""
        descriptor = self._decided.get((num_tokens, uniform))
        if descriptor is None:
            mode = self._configured.decode_mode() if uniform else self._configured.mixed_mode()
            descriptor = self._decided[num_tokens, uniform] = self._padded(num_tokens, uniform, mode)
        return descriptor

    def _padded(self, num_tokens: int, uniform: bool, mode: CUDAGraphMode) -> BatchDescriptor:
        size = next((size for size in self._sizes if size >= num_tokens), None)
        if mode is CUDAGraphMode.NONE or size is None:
            return BatchDescriptor(num_tokens, min(num_tokens, self._max_num_seqs), uniform, CUDAGraphMode.NONE)
        # Piecewise programs do not depend on the shape of the attention batch, so one serves uniform and mixed batches.
        return BatchDescriptor(size, min(size, self._max_num_seqs), uniform and mode is CUDAGraphMode.FULL, mode)
