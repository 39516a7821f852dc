"""References pass through clients: one that is not what the producer gave reads nothing, ends nothing, and disturbs nobody."""

import json

import msgspec
import numpy as np
import pytest
from peer_support import MINE, MY_BLOCKS, THEIR_BLOCKS, THEIRS, load, resigned, two_hand_offs

from interlock.core.errors import KVTransferError, RequestError
from interlock.kv_transfer.references import KEY_BYTES, from_params, sign, token_digest, verify
from interlock.kv_transfer.transports import peer_client, shared_memory

over_both_transports = pytest.mark.parametrize("transport", ["shared_memory", "nixl"], indirect=True)


def wait_for_end_of_leases(producer, *expected):
    ended = set()
    while not ended >= set(expected):
        ended |= producer.step().finished_sending
    assert ended == set(expected)


def blocks_of(params):
    return {"remote_block_ids": params["remote_block_ids"], "remote_block_generations": params["remote_block_generations"]}


ALTERATIONS = {
    "another prompt's blocks": (lambda mine, theirs: blocks_of(theirs), MINE),
    "one of another prompt's blocks": (lambda mine, theirs: {"remote_block_ids": [[1, 2, THEIR_BLOCKS[0]]]}, MINE),
    "its own blocks in another order": (lambda mine, theirs: {"remote_block_ids": [[2, 1, 3]]}, MINE),
    "free blocks": (lambda mine, theirs: {"remote_block_ids": [[0, 7, 0]]}, MINE),
    "other generations": (lambda mine, theirs: {"remote_block_generations": [1, 1, 1]}, MINE),
    "another lease": (lambda mine, theirs: {"remote_request_id": theirs["remote_request_id"]}, MINE),
    "another lease, with its signature": (
        lambda mine, theirs: {name: theirs[name] for name in ("remote_request_id", "remote_signature")},
        MINE,
    ),
    "another signature": (lambda mine, theirs: {"remote_signature": "0" * 64}, MINE),
    "fewer tokens": (
        lambda mine, theirs: {
            "remote_num_tokens": 8,
            "remote_block_ids": [[1, 2]],
            "remote_block_generations": [0, 0],
            "remote_token_digest": token_digest(MINE[:8]),
        },
        MINE,
    ),
    "more tokens": (
        lambda mine, theirs: {
            "remote_num_tokens": 16,
            "remote_block_ids": [[1, 2, 3, 4]],
            "remote_block_generations": [0] * 4,
            "remote_token_digest": token_digest([*MINE, 1, 2, 3, 4]),
        },
        [*MINE, 1, 2, 3, 4],
    ),
    "another prompt": (lambda mine, theirs: {"remote_token_digest": token_digest(THEIRS)}, THEIRS),
    "a longer lease": (lambda mine, theirs: {"remote_blocks_expiry_time": mine["remote_blocks_expiry_time"] + 1000}, MINE),
    "another epoch": (lambda mine, theirs: {"remote_epoch": mine["remote_epoch"] + 1}, MINE),
}


@over_both_transports
@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_an_altered_reference_is_refused_and_both_true_ones_stay_good(engines, alteration):
    producer, [consumer], mine, theirs = two_hand_offs(engines)
    changes, tokens = ALTERATIONS[alteration]
    consumer.fill(2)
    before = consumer.snapshot()
    error = load(consumer, mine | changes(mine, theirs), tokens, blocks=[1, 2, 3, 7])
    assert "epoch" in error if alteration == "another epoch" else "were altered" in error
    assert np.array_equal(consumer.snapshot(), before)
    assert producer.worker._worker_half.leases.held == 2
    for params, tokens, blocks, name in ((theirs, THEIRS, THEIR_BLOCKS, "t"), (mine, MINE, MY_BLOCKS, "m")):
        assert load(consumer, params, tokens, [1, 2, 3], name) is None
        assert np.array_equal(consumer.positions([1, 2, 3], 0, 11), producer.positions(blocks, 0, 11))
    consumer.step()
    wait_for_end_of_leases(producer, "mine", "theirs")


@over_both_transports
def test_without_the_check_another_users_kv_would_be_served(engines, monkeypatch):
    producer, [consumer], mine, theirs = two_hand_offs(engines)
    monkeypatch.setattr(peer_client, "verify", lambda key, reference: reference.signature)
    assert load(consumer, mine | blocks_of(theirs), MINE) is None
    assert np.array_equal(consumer.positions([1, 2, 3], 0, 11), producer.positions(THEIR_BLOCKS, 0, 11))


@over_both_transports
@pytest.mark.parametrize("stolen", [("remote_request_id",), ("remote_request_id", "remote_signature")])
def test_a_request_that_names_anothers_lease_does_not_end_it(engines, stolen):
    producer, [consumer, other], mine, theirs = two_hand_offs(engines, consumers=2)
    assert load(consumer, mine | {name: theirs[name] for name in stolen}, MINE) is not None
    consumer.step()
    consumer.worker.shutdown()  # returns when every notice has been sent
    for _ in range(3):
        assert not producer.step().finished_sending
    assert producer.worker._worker_half.leases.held == 2
    assert load(other, theirs, THEIRS) is None
    assert np.array_equal(other.positions([1, 2, 3], 0, 11), producer.positions(THEIR_BLOCKS, 0, 11))


@over_both_transports
def test_a_reference_that_is_used_again_is_refused_here_and_elsewhere(engines):
    producer, [consumer, other], mine, _ = two_hand_offs(engines, consumers=2)
    assert load(consumer, mine, MINE) is None
    consumer.step()
    wait_for_end_of_leases(producer, "mine")
    producer.step()
    assert "used before" in load(consumer, mine, MINE, request_id="again")
    assert "generation" in load(other, mine, MINE)


@over_both_transports
def test_an_altered_epoch_leaves_the_connection_to_those_who_use_it(engines):
    _, [consumer], mine, theirs = two_hand_offs(engines)
    assert load(consumer, theirs, THEIRS) is None
    pools = consumer.worker._worker_half.pools._pools
    (pool,) = pools.values()
    assert "epoch" in load(consumer, mine | {"remote_epoch": 5}, MINE, request_id="e")
    assert list(pools.values()) == [pool]
    assert pool.alive
    assert load(consumer, mine, MINE, request_id="m") is None


def test_a_host_that_a_request_invents_makes_no_other_connection_over_shared_memory(engines):
    _, [consumer], mine, theirs = two_hand_offs(engines)
    assert load(consumer, theirs, THEIRS) is None
    assert "were altered" in load(consumer, mine | {"remote_host": "elsewhere", "remote_port": 9}, MINE, request_id="m")
    assert len(consumer.worker._worker_half.pools._pools) == 1


def test_a_reference_without_a_signature_is_refused(engines):
    _, [consumer], mine, _ = two_hand_offs(engines)
    del mine["remote_signature"]
    with pytest.raises(RequestError, match="remote_signature"):
        consumer.admit("d", MINE, mine, [1, 2, 3])


def test_every_field_of_a_reference_is_signed(engines):
    producer, _, mine, _ = two_hand_offs(engines, consumers=0)
    key, reference = producer.worker._worker_half.key, from_params(mine)
    assert verify(key, reference) == mine["remote_signature"]
    other = {str: "x", int: 9, float: 1.0, tuple: (9,), type(None): 9, bool: True}
    for name in set(reference.__struct_fields__) - {"signature", "key"}:
        altered = msgspec.structs.replace(reference, **{name: other[type(getattr(reference, name))]})
        with pytest.raises(KVTransferError, match="were altered"):
            verify(key, altered)


def test_a_reference_survives_the_ways_of_json(engines):
    producer, [consumer], mine, _ = two_hand_offs(engines)
    mine = resigned(producer, mine, remote_blocks_expiry_time=1e9)
    text = json.dumps(mine, sort_keys=True).replace("1000000000.0", "1000000000")  # as JavaScript writes it
    assert load(consumer, json.loads(text), MINE) is None


def test_a_producer_without_a_key_is_refused(engines):
    _, _, mine, _ = two_hand_offs(engines, consumers=0)
    reference = from_params(mine)
    with pytest.raises(KVTransferError, match=f"expected {KEY_BYTES}"):
        verify(b"", msgspec.structs.replace(reference, signature=sign(b"", reference)))


@over_both_transports
class TestConfirmation:
    """What is looked at after the last byte: the producer's epoch, and the generations, each at most one behind the reference."""

    def test_a_producer_that_began_another_life_during_the_read(self, engines):
        producer, [consumer], mine, theirs = two_hand_offs(engines)
        assert load(consumer, theirs, THEIRS) is None
        producer.worker._worker_half._control._words[shared_memory._EPOCH_WORD] += np.uint64(1)
        assert "left epoch" in load(consumer, mine, MINE, request_id="m")

    @pytest.mark.parametrize(("behind", "is_confirmed"), [(0, True), (1, True), (2, False), (4, False)])
    def test_how_far_the_table_may_be_behind_the_reference(self, engines, behind, is_confirmed):
        producer, [consumer], mine, _ = two_hand_offs(engines)
        ahead = resigned(producer, mine, remote_block_generations=[0, behind, 0])
        error = load(consumer, ahead, MINE)
        assert error is None if is_confirmed else "generation" in error
