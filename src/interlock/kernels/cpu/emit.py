"""Loops and addresses in LLVM IR, for intrinsics that keep many vectors in registers. For use while Numba lowers an intrinsic."""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import config

_i64 = ir.IntType(64)


def target_features() -> set[str]:
    """Names of the features of the CPU that Numba compiles for: this one, unless it was told otherwise.

    Every 64-bit ARM CPU has NEON, whether or not the system lists it.
    """
    described = config.CPU_FEATURES or llvm.get_host_cpu_features().flatten()
    features = {feature[1:] for feature in described.split(",") if feature.startswith("+")}
    return features | ({"neon"} if llvm.get_process_triple().startswith(("aarch64", "arm64")) else set())


def integer(value: int) -> Any:
    """An int64 constant."""
    return ir.Constant(_i64, value)


def at(builder: Any, base: Any, *terms: tuple[Any, int]) -> Any:
    """The address base + the sum of index * stride over `terms`."""
    for index, stride in terms:
        base = builder.add(base, builder.mul(index, integer(stride)))
    return base


def loop(builder: Any, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Emit `for index in range(count)`; `body(index, values)` returns the next values of what is carried. Returns the last values."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_i64)
    values = [builder.phi(value.type) for value in carried]
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    results = body(index, list(values))
    end = builder.block
    index.add_incoming(integer(0), before)
    index.add_incoming(builder.add(index, integer(1)), end)
    for phi, start, result in zip(values, carried, results, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(result, end)
    builder.branch(head)
    builder.position_at_end(after)
    return values
