import itertools
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from interlock.engine.block_pool import BlockPool
from interlock.engine.prefix_cache import PrefixCache, chain_key, extend_keys, root_key


def keys_of(token_ids, root=b"root", block_size=2):
    keys = []
    extend_keys(keys, root, token_ids, block_size)
    return keys


def filled(token_ids, block_size=2, num_blocks=8):
    pool = BlockPool(num_blocks, block_size)
    keys = keys_of(token_ids, block_size=block_size)
    blocks = pool.allocate(len(keys), "a")
    cache = PrefixCache(pool)
    cache.publish(keys, blocks, 0, len(keys))
    return pool, cache, blocks


def test_a_hit_leaves_at_least_one_token_to_compute():
    _, cache, blocks = filled([1, 2, 3, 4])
    for num_tokens, hit in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 2)):
        token_ids = [1, 2, 3, 4, 5][:num_tokens]
        assert cache.match(keys_of(token_ids), num_tokens) == blocks[:hit]


def test_only_published_blocks_are_found_and_only_as_a_run_from_the_start():
    pool, cache, blocks = filled([1, 2, 3, 4, 5, 6])
    keys = keys_of([1, 2, 3, 4, 5, 6, 7])
    assert cache.match(keys, 7) == blocks
    pool.unpublish(blocks[1])
    assert cache.match(keys, 7) == blocks[:1]


def test_invalidating_a_block_forgets_everything_computed_behind_it_and_nothing_else():
    pool, cache, blocks = filled([1, 2, 3, 4, 5, 6])
    other = keys_of([9, 9, 9, 9])
    others = pool.allocate(2, "b")
    cache.publish(other, others, 0, 2)
    cache.invalidate([blocks[1]])
    assert [pool.published_key(block_id) is not None for block_id in blocks] == [True, False, False]
    assert cache.match([*other, b"end"], 5) == others
    assert pool.audit().clean


def test_with_caching_off_nothing_is_ever_found():
    pool = BlockPool(4, 2, enable_caching=False)
    cache = PrefixCache(pool)
    keys = keys_of([1, 2])
    cache.publish(keys, pool.allocate(1, "a"), 0, 1)
    assert cache.match(keys, 3) == []


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.lists(st.integers(0, 2**31 - 1), max_size=20), st.integers(1, 5))
def test_keys_agree_exactly_as_far_as_the_tokens_do(first, second, block_size):
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    equal = sum(a == b for a, b in zip(keys_of(first, block_size=block_size), keys_of(second, block_size=block_size), strict=False))
    assert equal == common // block_size


@given(st.lists(st.integers(0, 100), max_size=24), st.integers(1, 4), st.lists(st.integers(0, 24), max_size=6))
def test_keys_do_not_depend_on_how_they_were_grown(token_ids, block_size, cuts):
    keys = []
    for cut in [*sorted(cuts), len(token_ids)]:
        extend_keys(keys, b"root", token_ids[:cut], block_size)
    assert keys == keys_of(token_ids, block_size=block_size)


def test_adapter_salt_and_image_never_share_a_key():
    roots = [
        root_key("m"),
        root_key("m", cache_salt=""),
        root_key("m", cache_salt="X"),
        root_key("m", adapter="X"),
        root_key("m", adapter="X", cache_salt="X"),
        root_key("m", cache_salt=b"X"),
        root_key("m", image=b"\x00\x01\x12\x34"),
        root_key("m", image=b"\x00\x02\x12\x34"),
        root_key("m", cache_salt="a"),
        root_key("m", cache_salt="b"),
        root_key("m2"),
        root_key("m", cache_salt="aadapter"),
        root_key("m", cache_salt="a", adapter=""),
    ]
    assert len(set(roots)) == len(roots)
    assert root_key("m", cache_salt=None) == root_key("m")
    assert len({chain_key(root, [1, 2]) for root in roots}) == len(roots)


@given(
    st.dictionaries(st.sampled_from("abc"), st.text(max_size=3), max_size=3), st.dictionaries(st.sampled_from("abc"), st.text(max_size=3), max_size=3)
)
def test_two_lists_of_parts_never_have_one_encoding(first, second):
    assert (root_key("m", **first) == root_key("m", **second)) == (first == second)


def test_keys_are_the_same_in_processes_with_different_hash_seeds():
    script = "from interlock.engine.prefix_cache import *; print(chain_key(root_key('m', cache_salt='s', adapter='a'), [1, 2, 3]).hex())"
    seen = {
        subprocess.run([sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True).stdout
        for seed in "12"
    }
    assert seen == {chain_key(root_key("m", cache_salt="s", adapter="a"), [1, 2, 3]).hex() + "\n"}
