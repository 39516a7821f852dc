"""Functions for the tests of the compiler and its cache: sums, and some that print, may raise, need Python, or are no code."""

from interlock.kernels.native import NativeFunction

MODULE = "compiled_functions"


def function(name: str, factory: str | None = None, *arguments: str | int) -> NativeFunction:
    """An i64 function of two i64."""
    return NativeFunction(name, ("i64", "i64", "i64"), f"{MODULE}:{factory or name}", arguments)


def add_scaled(factor):
    def f(a, b):
        return a + factor * b

    return f


def prints(factor):
    print("a factory that prints on standard output")

    def f(a, b):
        return a + factor * b

    return f


def sum_with_helper(*_):
    from numba import njit

    @njit(error_model="numpy")
    def helper(a, b):
        total = 0
        for i in range(a):
            if i % 3 == 0:
                total += i * b
        return total

    def f(a, b):
        return helper(a, b) + helper(b, a)

    return f


def raises():
    def f(a, b):
        if a > b:
            raise ValueError("a > b")
        return a

    return f


def allocates():
    import numpy as np

    def f(a, b):
        return np.zeros(a, np.int64).sum()

    return f


def not_code():
    def f(a, b):
        return a.nonsense

    return f


def kills_its_process():
    import os

    os._exit(3)
