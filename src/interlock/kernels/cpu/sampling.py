"""Choosing tokens: argmax, temperature, top-k, top-p, a counter-based draw, log-probabilities.

Everything is a function of one row's logits and parameters, in one fixed order. Tokens are ordered by logit, descending, then by id; every
cut and every tie follows that order. top-p is taken of the distribution that top-k left, as in vLLM. Weights are exp(logit / temperature -
largest), float32; they are summed in float64: one after the other over ordered candidates, or, over the whole vocabulary, by chunks of 256 tokens.
Masked tokens have the logit -inf in all of this; log-probabilities and ranks are those of the logits as they came, as in vLLM.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numba import njit

from interlock.core.sampling_params import MAX_LOGPROBS, MAX_MASKED_TOKENS
from interlock.kernels.cpu.ordering import argmax, collect, collect_highest, rank, sort, token_of
from interlock.kernels.cpu.simd import (
    first_lane,
    load_f32,
    load_i32,
    load_i64,
    reduce_add,
    splat,
    store_f32,
    store_i32,
    vadd,
    vdiv,
    vload,
    vstore,
    vsub,
)
from interlock.kernels.cpu.vector_math import vexp
from interlock.kernels.slot import (
    MASKED_TOKENS,
    NUM_LOGITS,
    NUM_LOGPROBS,
    NUM_MASKED,
    OUTPUT_INDEX,
    SAMPLED,
    SAMPLED_LOGPROB,
    SAMPLED_RANK,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_LOGPROBS,
    TOP_P,
    TOP_TOKENS,
)

CHUNK: Final = 256  # tokens; the order of sums over a vocabulary depends on it

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_INFINITY = np.float32(np.inf)
_LN_2 = 0.6931471805599453
_SQRT_2 = 1.4142135623730951


def sample() -> Callable[..., None]:
    """Factory of `catalog.sample`. A row is one thread's; greedy rows without log-probabilities take one pass over their logits."""

    def kernel(args, slot, thread_id, num_threads):
        size = load_i64(args + 8)
        scratch = load_i64(args + 16) + thread_id * load_i64(args + 24)
        rows = load_i64(slot + 8 * NUM_LOGITS)
        for row in range(rows * thread_id // num_threads, rows * (thread_id + 1) // num_threads):
            logits = load_i64(args) + 4 * row * size
            best = _first_finite(logits, size)
            token = best
            if best >= 0:  # a row's NaN or infinity is its own affair: the other rows of the step are good
                num_masked = np.int64(load_i32(load_i64(slot + 8 * NUM_MASKED) + 4 * row))
                if num_masked > 0:
                    token = _choose_unmasked(slot, row, logits, size, num_masked, scratch)
                else:
                    token = _choose(slot, row, logits, size, best, scratch)
            store_i32(load_i64(slot + 8 * SAMPLED) + 4 * row, np.int32(token))
            if token >= 0 and load_i32(load_i64(slot + 8 * NUM_LOGPROBS) + 4 * row) >= 0:
                _report_logprobs(slot, row, logits, size, best, token, scratch)

    return kernel


@njit(error_model="numpy")
def _first_finite(logits, size):
    """The first token of a row; -1 if a logit is NaN, or the largest is not finite."""
    best = argmax(logits, size)
    return best if best >= 0 and abs(load_f32(logits + 4 * best)) < _INFINITY else np.int64(-1)


@njit(error_model="numpy")
def _choose_unmasked(slot, row, logits, size, num_masked, scratch):
    """`_choose` with the row's masked tokens out of the way; -1 if nothing that is left can be drawn."""
    masked = load_i64(slot + 8 * MASKED_TOKENS) + 4 * row * MAX_MASKED_TOKENS
    kept = scratch
    for i in range(num_masked):
        token = np.int64(load_i32(masked + 4 * i))
        if 0 <= token < size:
            store_f32(kept + 4 * i, load_f32(logits + 4 * token))
            store_f32(logits + 4 * token, -_INFINITY)
    best = _first_finite(logits, size)
    chosen = best if best < 0 else _choose(slot, row, logits, size, best, scratch + 4 * MAX_MASKED_TOKENS)
    for i in range(num_masked):
        token = np.int64(load_i32(masked + 4 * i))
        if 0 <= token < size:
            store_f32(logits + 4 * token, load_f32(kept + 4 * i))
    return chosen


@njit(error_model="numpy")
def _choose(slot, row, logits, size, best, scratch):
    """The most likely token, `best`, or a draw, as the row's temperature says."""
    if load_f32(load_i64(slot + 8 * TEMPERATURE) + 4 * row) > _ZERO:
        return _draw(slot, row, logits, size, best, scratch)
    return best


@njit(error_model="numpy")
def _draw(slot, row, logits, size, best, scratch):
    """The token that the row's parameters and its own random number choose."""
    temperature = load_f32(load_i64(slot + 8 * TEMPERATURE) + 4 * row)
    largest = load_f32(logits + 4 * best) / temperature
    if not abs(largest) < _INFINITY:  # all the weight lies on one token, or the temperature is as good as 0
        return best
    top_k = np.int64(load_i32(load_i64(slot + 8 * TOP_K) + 4 * row))
    top_p = np.float64(load_f32(load_i64(slot + 8 * TOP_P) + 4 * row))
    number = _uniform(load_i64(load_i64(slot + 8 * SEED) + 8 * row), load_i64(load_i64(slot + 8 * OUTPUT_INDEX) + 8 * row))
    weights = scratch
    candidates, other, histogram = _workspaces(scratch, size)
    if 0 < top_k < size:
        count = collect_highest(logits, size, top_k, candidates, other, histogram)
        ordered = sort(candidates, other, histogram, count)
        _weigh_candidates(logits, ordered, top_k, temperature, largest, weights)
        total = 0.0
        for i in range(top_k):
            total += np.float64(load_f32(weights + 4 * i))
        return _draw_ordered(ordered, weights, top_k, top_p * total if top_p < 1.0 else np.inf, number)
    total = _weigh_all(logits, size, temperature, largest, weights)
    if top_p < 1.0:
        # All tokens below this weight together are less than half of what top-p leaves out, so the cut lies above them.
        least = np.float32(0.5 * (1.0 - top_p) * total / size)
        count = collect(weights, logits, size, least, candidates)
        ordered = sort(candidates, other, histogram, count)
        _weigh_candidates(logits, ordered, count, temperature, largest, weights)
        return _draw_ordered(ordered, weights, count, top_p * total, number)
    return _draw_any(weights, size, total, number)


@njit(error_model="numpy")
def _draw_ordered(ordered, weights, count, enough, number):
    """Of the shortest prefix of the ordered candidates whose weight reaches `enough` (else of all), the one that `number` in [0, 1) points at."""
    kept = 0
    mass = 0.0
    while kept < count and (kept == 0 or mass < enough):
        mass += np.float64(load_f32(weights + 4 * kept))
        kept += 1
    wanted = number * mass
    mass = 0.0
    for i in range(kept):
        mass += np.float64(load_f32(weights + 4 * i))
        if mass > wanted:
            return token_of(ordered, i)
    return token_of(ordered, 0)


@njit(error_model="numpy")
def _draw_any(weights, size, total, number):
    """Of all tokens, in the order of their ids, the one that `number` in [0, 1) points at."""
    wanted = number * total
    mass = 0.0
    token = 0
    for start in range(0, size, CHUNK):
        stop = min(start + CHUNK, size)
        following = mass + _chunk_sum(weights, start, stop)
        if following > wanted or stop == size:
            for i in range(start, stop):
                weight = load_f32(weights + 4 * i)
                if weight > _ZERO:  # rounding may leave the sum below `wanted`: then the last token that can be drawn
                    token = i
                mass += np.float64(weight)
                if mass > wanted:
                    break
            return token
        mass = following
    return token


@njit(error_model="numpy")
def _weigh_all(logits, size, temperature, largest, weights):
    """Weights of all tokens, and their sum: chunks in ascending order. Up to a whole vector, what follows the last weight is 0."""
    i = 0
    while i + 16 <= size:
        vstore(weights + 4 * i, vexp(vsub(vdiv(vload(logits + 4 * i), splat(temperature)), splat(largest))))
        i += 16
    if i < size:
        vstore(weights + 4 * i, splat(_ZERO))
    while i < size:
        store_f32(weights + 4 * i, first_lane(vexp(splat(load_f32(logits + 4 * i) / temperature - largest))))
        i += 1
    total = 0.0
    for start in range(0, size, CHUNK):
        total += _chunk_sum(weights, start, min(start + CHUNK, size))
    return total


@njit(error_model="numpy")
def _chunk_sum(weights, start, stop):
    """Sum of the weights [start, stop): vectors in ascending order, then the fixed tree. What follows up to a whole vector is 0."""
    total = splat(_ZERO)
    for i in range(start, stop, 16):
        total = vadd(total, vload(weights + 4 * i))
    return np.float64(reduce_add(total))


@njit(error_model="numpy")
def _weigh_candidates(logits, ordered, count, temperature, largest, weights):
    """Weights of the first `count` candidates, in their order."""
    for i in range(count):
        store_f32(weights + 4 * i, load_f32(logits + 4 * token_of(ordered, i)))
    for i in range(0, count, 16):
        vstore(weights + 4 * i, vexp(vsub(vdiv(vload(weights + 4 * i), splat(temperature)), splat(largest))))


@njit(error_model="numpy")
def _report_logprobs(slot, row, logits, size, best, token, scratch):
    """Log-probability and rank of `token`, and the most likely tokens, under the untempered distribution."""
    largest = load_f32(logits + 4 * best)
    log_total = _log(_weigh_all(logits, size, _ONE, largest, scratch))
    store_f32(load_i64(slot + 8 * SAMPLED_LOGPROB) + 4 * row, _logprob(logits, token, largest, log_total))
    store_i32(load_i64(slot + 8 * SAMPLED_RANK) + 4 * row, np.int32(rank(logits, size, token)))
    wanted = min(np.int64(load_i32(load_i64(slot + 8 * NUM_LOGPROBS) + 4 * row)), size)
    if wanted > 0:
        candidates, other, histogram = _workspaces(scratch, size)
        count = collect_highest(logits, size, wanted, candidates, other, histogram)
        ordered = sort(candidates, other, histogram, count)
        for i in range(wanted):
            top = token_of(ordered, i)
            store_i32(load_i64(slot + 8 * TOP_TOKENS) + 4 * (row * MAX_LOGPROBS + i), np.int32(top))
            store_f32(load_i64(slot + 8 * TOP_LOGPROBS) + 4 * (row * MAX_LOGPROBS + i), _logprob(logits, top, largest, log_total))


@njit(error_model="numpy")
def _logprob(logits, token, largest, log_total):
    return np.float32(np.float64(load_f32(logits + 4 * token)) - np.float64(largest) - log_total)


@njit(error_model="numpy")
def _log(x):
    """log of x >= 1, float64: x = m * 2**e with m near 1, and log(m) = 2 artanh((m - 1) / (m + 1)) as its power series."""
    exponent = 0.0
    while x > _SQRT_2:
        x *= 0.5
        exponent += 1.0
    s = (x - 1.0) / (x + 1.0)
    square = s * s
    series = 0.0
    for i in range(21, 0, -2):
        series = series * square + 1.0 / i
    return exponent * _LN_2 + 2.0 * s * series


@njit(error_model="numpy")
def _uniform(seed, index):
    """A number in [0, 1) of 53 bits: the first two words of Philox-4x32-10 with key `seed` and counter `index`.

    J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    key_0, key_1 = np.uint64(seed) & mask, np.uint64(seed) >> half
    a, b, c, d = np.uint64(index) & mask, np.uint64(index) >> half, np.uint64(0), np.uint64(0)
    for _ in range(10):
        left = a * np.uint64(0xD2511F53)
        right = c * np.uint64(0xCD9E8D57)
        a, b, c, d = (right >> half) ^ b ^ key_0, right & mask, (left >> half) ^ d ^ key_1, left & mask
        key_0 = (key_0 + np.uint64(0x9E3779B9)) & mask
        key_1 = (key_1 + np.uint64(0xBB67AE85)) & mask
    return np.float64(((a << half) | b) >> np.uint64(11)) * 2.0**-53


@njit(error_model="numpy")
def _workspaces(scratch, size):
    """Behind the weights (float32 [size], padded to a vector): two int64 [size] for candidates, and a histogram."""
    candidates = scratch + (size + 15) // 16 * 64
    return candidates, candidates + 8 * size, candidates + 16 * size
