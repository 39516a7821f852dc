"""What a layer holds: packed weights, and how they are taken from a checkpoint."""

from dataclasses import dataclass

from interlock.core.buffer import Buffer
from interlock.kernels.formats import PackedWeight


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A product `x @ W.T` with W `[out_features, in_features]`. Weights of different formats lie in parts: (first output, weight)."""

    parts: tuple[tuple[int, PackedWeight], ...]
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, eq=False)
class GateUp:
    """The first half of a gated MLP: `silu(x @ gate.T) * (x @ up.T)`, each `[intermediate_size, in_features]`.

    `fused` holds both, interleaved; where their formats differ it is None, and `stacked` is a product with 2 * intermediate_size outputs.
    """

    fused: PackedWeight | None
    stacked: Linear | None
    in_features: int
    intermediate_size: int


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """Root mean square normalisation (B. Zhang, R. Sennrich, 2019); weight: float32 `[hidden_size]`."""

    weight: Buffer
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """The table `[vocab_size, hidden_size]`, packed as a product's weight, so that a tied head shares it."""

    weight: PackedWeight

    def as_head(self) -> Linear:
        """The same table as the output head."""
        return Linear(((0, self.weight),), in_features=self.weight.k, out_features=self.weight.n)
