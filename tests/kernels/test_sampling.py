import numpy as np
import pytest
from step_slot import StepSlot, bits, run

from interlock.core.buffer import Buffer
from interlock.core.sampling_params import MAX_LOGPROBS, MAX_MASKED_TOKENS
from interlock.kernels import catalog

MARGIN = 2e-5  # relative; float32 weights and their sums are within it of the exact ones


class Sampled:
    """The result of sampling `rows`: dicts with the logits of a row and its parameters."""

    def __init__(self, rows, num_threads=1):
        count, size = len(rows), rows[0]["logits"].size
        logits = np.stack([row["logits"] for row in rows])

        def parameter(name, default, dtype):
            return np.array([row.get(name, default) for row in rows], dtype)

        self.tokens = np.full(count + 1, -5, np.int32)
        self.logprobs = np.full(count, np.nan, np.float32)
        self.ranks = np.full(count, -5, np.int32)
        self.top_tokens = np.full((count, MAX_LOGPROBS), -5, np.int32)
        masked = np.full((count, MAX_MASKED_TOKENS), size // 2, np.int32)  # beyond what a row has: ids that must not be masked
        for i, row in enumerate(rows):
            masked[i, : len(row.get("masked", ()))] = row.get("masked", ())
        self.top_logprobs = np.full((count, MAX_LOGPROBS), np.nan, np.float32)
        slot = StepSlot(
            NUM_LOGITS=count,
            TEMPERATURE=parameter("temperature", 0, np.float32),
            TOP_K=parameter("top_k", 0, np.int32),
            TOP_P=parameter("top_p", 1, np.float32),
            SEED=parameter("seed", 0, np.uint64),
            OUTPUT_INDEX=parameter("index", 0, np.int64),
            NUM_LOGPROBS=parameter("num_logprobs", -1, np.int32),
            NUM_MASKED=np.array([len(row.get("masked", ())) for row in rows], np.int32),
            MASKED_TOKENS=masked,
            SAMPLED=self.tokens,
            SAMPLED_LOGPROB=self.logprobs,
            SAMPLED_RANK=self.ranks,
            TOP_TOKENS=self.top_tokens,
            TOP_LOGPROBS=self.top_logprobs,
        )
        stride = catalog.sample_scratch_bytes(size)
        scratch = Buffer.zeros((stride * num_threads + 64,), "uint8")
        scratch.numpy()[:] = 0xFF
        kernel = catalog.sample()
        before = logits.copy()
        run(kernel, kernel.pack(logits=Buffer.from_numpy(logits), vocab_size=size, scratch=scratch, scratch_stride=stride), slot, num_threads)
        assert (bits(logits) == bits(before)).all()
        assert (scratch.numpy()[-64:] == 0xFF).all()
        assert self.tokens[count] == -5
        self.error = slot.error


def philox(seed, index):
    """Philox-4x32-10 with Python integers: the first two words, as a number in [0, 1)."""
    mask = 2**32 - 1
    key, counter = [seed & mask, seed >> 32], [index & mask, index >> 32, 0, 0]
    for _ in range(10):
        left, right = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(right >> 32) ^ counter[1] ^ key[0], right & mask, (left >> 32) ^ counter[3] ^ key[1], left & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return ((counter[0] << 32 | counter[1]) >> 11) / 2**53


def order(logits):
    return np.lexsort((np.arange(logits.size), -logits))


def draw(logits, temperature, top_k, top_p, number):
    ordered = order(logits)
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    if 0 < top_k < logits.size:
        ordered = ordered[:top_k]
    if top_p < 1:
        mass = np.cumsum(weights[ordered])
        ordered = ordered[: np.searchsorted(mass, top_p * mass[-1]) + 1]
    if top_p == 1 and not 0 < top_k < logits.size:
        ordered = np.arange(logits.size)
    mass = np.cumsum(weights[ordered])
    return int(ordered[min(np.searchsorted(mass, number * mass[-1], side="right"), ordered.size - 1)])


def possible_draws(row):
    """The tokens that the exact draw gives for top_p and the random number within rounding: one, unless they lie at a cut."""
    number = philox(row["seed"], row["index"])
    top_p = float(np.float32(row.get("top_p", 1)))
    shifts = (1 - MARGIN, 1, 1 + MARGIN)
    top_ps = {min(top_p * s, top_p if top_p == 1 else 1 - 1e-9) for s in shifts}
    return {
        draw(row["logits"], float(np.float32(row["temperature"])), row.get("top_k", 0), p, min(number * s, 1 - 1e-12)) for p in top_ps for s in shifts
    }


def random_logits(size, seed=0, scale=3):
    return (scale * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


@pytest.mark.parametrize("size", [1, 2, 15, 17, 33, 63, 64, 65, 257, 1000, 49152])
def test_greedy_takes_the_largest_logit(size):
    rows = [{"logits": random_logits(size, seed)} for seed in range(20)]
    assert Sampled(rows).tokens[:-1].tolist() == [int(np.argmax(row["logits"])) for row in rows]


@pytest.mark.parametrize("places", [[3, 70], [70, 6], [64, 65], [0, 127], [17, 130], [130, 131]])
def test_greedy_ties_go_to_the_lowest_token_id(places):
    logits = random_logits(133)
    logits[places] = 50
    assert Sampled([{"logits": logits}]).tokens[0] == min(places)


def test_logits_of_minus_infinity_are_never_drawn_and_signed_zeros_are_equal():
    logits = np.full(200, -np.inf, np.float32)
    logits[[90, 33]] = 0.0, -0.0
    rows = [{"logits": logits, "temperature": t, "index": i, "num_logprobs": 3} for i, t in enumerate((0, 0.7, 0.7, 0.7, 0.7))]
    sampled = Sampled(rows)
    assert sampled.tokens[0] == 33
    assert set(sampled.tokens[:-1].tolist()) <= {33, 90}
    np.testing.assert_allclose(sampled.logprobs, -np.log(2), atol=1e-6)
    assert (sampled.top_tokens[:, :3] == [33, 90, 0]).all()
    assert (sampled.top_logprobs[:, 2] == -np.inf).all()


@pytest.mark.parametrize("place", [0, 40, 63, 64, 128, 130])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_a_row_whose_logits_are_not_finite_has_no_token_and_the_other_rows_are_served(place, value, temperature):
    bad, good = random_logits(131), random_logits(131, 1)
    bad[place] = value
    rows = [{"logits": logits, "temperature": temperature, "num_logprobs": 2} for logits in (good, bad, np.full_like(bad, -np.inf), good)]
    sampled = Sampled(rows)
    assert sampled.tokens[1:3].tolist() == [-1, -1]
    assert sampled.tokens[0] == sampled.tokens[3] == Sampled(rows[:1]).tokens[0]
    assert np.isnan(sampled.logprobs[1:3]).all(), "the test's own NaN: nothing was written"


def parameters_of(seed):
    """Every way of drawing, one after the other."""
    common = {"seed": seed, "index": seed}
    return [common | way for way in ({}, {"temperature": 0.9}, {"temperature": 1.3, "top_k": 5}, {"temperature": 1, "top_p": 0.7})][seed % 4]


@pytest.mark.parametrize("size", [5, 70, 2000])
def test_masked_tokens_are_drawn_as_if_their_logits_were_minus_infinity(size):
    rows, without = [], []
    for seed in range(24):
        logits = random_logits(size, seed)
        masked = order(logits)[: (1, 3, min(size - 1, MAX_MASKED_TOKENS))[seed % 3]].astype(np.int32)
        removed = logits.copy()
        removed[masked] = -np.inf
        rows.append({"logits": logits, "masked": np.random.default_rng(seed).permutation(masked), **parameters_of(seed)})
        without.append({"logits": removed, **parameters_of(seed)})
    sampled = Sampled(rows, num_threads=2)
    assert sampled.tokens[:-1].tolist() == Sampled(without).tokens[:-1].tolist()
    assert not any(token in row["masked"] for token, row in zip(sampled.tokens, rows, strict=False))
    assert Sampled([row | {"masked": ()} for row in rows]).tokens[0] == order(rows[0]["logits"])[0], "without a mask the likeliest is drawn"


def test_masked_tokens_keep_their_log_probability_and_rank():
    logits = random_logits(300)
    likeliest = order(logits)
    plain = Sampled([{"logits": logits, "num_logprobs": 4}])
    masked = Sampled([{"logits": logits, "num_logprobs": 4, "masked": likeliest[:2]}])
    assert masked.tokens[0] == likeliest[2]
    assert masked.ranks[0] == 3
    assert masked.logprobs[0] == plain.top_logprobs[0, 2]
    assert (masked.top_tokens[0, :4] == plain.top_tokens[0, :4]).all()
    assert (bits(masked.top_logprobs)[0, :4] == bits(plain.top_logprobs)[0, :4]).all()


def test_ids_outside_of_the_vocabulary_mask_nothing():
    logits = random_logits(131)
    best, second = order(logits)[:2]
    sampled = Sampled([{"logits": logits, "masked": [131, -1, 2**31 - 1]}, {"logits": logits, "masked": [131, best]}, {"logits": logits}])
    assert sampled.tokens[:3].tolist() == [best, second, best]


def test_a_row_with_nothing_left_to_draw_has_no_token():
    logits = np.full(70, -np.inf, np.float32)
    logits[[3, 66]] = 1.0
    sampled = Sampled([{"logits": logits, "masked": [3, 66], "num_logprobs": 1}, {"logits": logits, "masked": [3], "num_logprobs": 1}])
    assert sampled.tokens[:2].tolist() == [-1, 66]
    assert np.isnan(sampled.logprobs[0])


def test_the_random_numbers_are_those_of_the_published_test_vector():
    size = 2**16
    token = Sampled([{"logits": np.zeros(size, np.float32), "temperature": 1, "seed": 0, "index": 0}]).tokens[0]
    assert token == 0x6627E8D5E169C58D >> 48  # Random123, kat_vectors: philox4x32 10, counter 0, key 0
    assert philox(0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53


@pytest.mark.parametrize("size", [5, 33, 100, 2001, 49152])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1, 0, 1), (0.5, 0, 1), (1, 1, 1), (1, 40, 1), (1.5, 700, 1), (1, 0, 0.9), (2, 0, 0.999), (0.8, 50, 0.5), (1, 20000, 0.3), (1, 0, 1e-6)],
)
def test_draws_what_the_definition_says(size, temperature, top_k, top_p):
    common = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    rows = [{"logits": random_logits(size, seed), "seed": 2**63 + 77 * seed, "index": seed + 2**32 * (seed % 3), **common} for seed in range(12)]
    wrong = [(token, exact) for token, exact in zip(Sampled(rows).tokens, map(possible_draws, rows), strict=False) if token not in exact]
    assert not wrong


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1), (0, 0.55), (0, 1), (4, 0.7)])
def test_cuts_through_equal_logits_keep_the_lowest_token_ids(top_k, top_p):
    logits = np.full(300, -4.0, np.float32)
    equal = [211, 16, 100, 64, 299]
    logits[equal] = 9.0
    rows = [{"logits": logits, "temperature": 1, "top_k": top_k, "top_p": top_p, "seed": 5, "index": i} for i in range(64)]
    drawn = set(Sampled(rows).tokens[:-1].tolist())
    kept = {(3, 1): 3, (0, 0.55): 3, (0, 1): 5, (4, 0.7): 3}[top_k, top_p]
    assert drawn == set(sorted(equal)[:kept])


def test_a_draw_depends_on_its_own_row_only():
    def row(seed, **changes):
        return {"logits": random_logits(3000, seed), "temperature": 0.9, "top_p": 0.95, "seed": seed, "index": seed, "num_logprobs": 4, **changes}

    rows = [row(0), row(1, temperature=0), row(2, top_k=7), row(3, num_logprobs=-1), row(4, top_p=1), row(5, num_logprobs=20)]
    whole = Sampled(rows)
    for num_threads in (2, 3, 7):
        other = Sampled(rows, num_threads)
        assert (other.tokens == whole.tokens).all()
        assert (bits(other.top_logprobs) == bits(whole.top_logprobs)).all()
    for i in (5, 0, 4, 2):
        alone = Sampled([rows[i]])
        assert alone.tokens[0] == whole.tokens[i]
        assert bits(alone.logprobs)[0] == bits(whole.logprobs)[i]


def test_seed_and_index_choose_the_random_number():
    def tokens(seed, indices):
        return Sampled([{"logits": np.zeros(40000, np.float32), "temperature": 1, "seed": seed, "index": i} for i in indices]).tokens[:-1].tolist()

    assert tokens(3, range(20)) == tokens(3, range(20))
    assert tokens(3, range(20)) != tokens(4, range(20))
    assert len(set(tokens(3, [*range(10), 2**32, 2**33]))) == 12


@pytest.mark.parametrize("size", [3, 17, 70, 257, 49152])
@pytest.mark.parametrize("temperature", [0, 1.3])
def test_logprobs_and_ranks_are_those_of_the_untempered_distribution(size, temperature):
    rows = [
        {"logits": random_logits(size, i), "temperature": temperature, "seed": i, "index": i, "num_logprobs": n} for i, n in enumerate([0, 1, 5, 20])
    ]
    sampled = Sampled(rows)
    for i, row in enumerate(rows):
        logits = row["logits"].astype(np.float64)
        exact = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        ordered = order(row["logits"])
        token, wanted = sampled.tokens[i], min(row["num_logprobs"], size)
        assert abs(sampled.logprobs[i] - exact[token]) < 3e-6
        assert sampled.ranks[i] == 1 + list(ordered).index(token)
        assert sampled.top_tokens[i, :wanted].tolist() == ordered[:wanted].tolist()
        assert (sampled.top_tokens[i, wanted:] == -5).all()
        np.testing.assert_allclose(sampled.top_logprobs[i, :wanted], exact[ordered[:wanted]], atol=3e-6)


def test_rank_and_top_tokens_of_equal_logits_follow_the_token_ids():
    logits = np.zeros(500, np.float32)
    logits[::2] = -0.0
    sampled = Sampled([{"logits": logits, "temperature": 1, "seed": 1, "index": i, "num_logprobs": 20} for i in range(30)])
    assert (sampled.ranks == sampled.tokens[:-1] + 1).all()
    assert (sampled.top_tokens == np.arange(20)).all()
