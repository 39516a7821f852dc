import pytest
from kv_support import engine_config, kv_cache_config
from peer_support import PeerEngine

from interlock.core.errors import ConfigError, LifecycleError, RequestError
from interlock.kv_transfer.connector import KVConnectorRole
from interlock.kv_transfer.connectors.peer import PeerConnector

TOKENS = list(range(100, 113))


class TestRequests:
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"remote_block_ids": None}, "remote_block_ids"),
            ({"remote_block_ids": [[1]]}, "remote_block_ids"),
            ({"remote_block_ids": [[1, 2], [1, 2]]}, "groups"),
            ({"remote_block_ids": [[1, -2]]}, "remote_block_ids"),
            ({"remote_engine_id": "../../x"}, "remote_engine_id"),
            ({"remote_engine_id": 5}, "remote_engine_id"),
            ({"remote_num_tokens": "8"}, "remote_num_tokens"),
            ({"remote_num_tokens": 0}, "remote_num_tokens"),
            ({"remote_num_tokens": 2**40}, "remote_num_tokens"),
            ({"remote_block_size": 0}, "remote_block_size"),
            ({"remote_epoch": -1}, "remote_epoch"),
            ({"remote_block_generations": [0]}, "remote_block_generations"),
            ({"remote_blocks_expiry_time": float("nan")}, "remote_blocks_expiry_time"),
        ],
    )
    def test_parameters_that_cannot_be_used_are_refused_by_name(self, engines, change, named):
        engine = engines()
        params = engine.prefill("p", TOKENS[:8], [1, 2])
        with pytest.raises(RequestError, match=named):
            engine.admit("d", TOKENS[:8], params | change, [3, 4])

    def test_a_reference_for_another_prompt_is_refused(self, engines):
        engine = engines()
        params = engine.prefill("p", TOKENS[:8], [1, 2])
        with pytest.raises(RequestError, match="token_digest"):
            engine.admit("d", [*TOKENS[:7], 0], params, [3, 4])
        with pytest.raises(RequestError, match="has 7 tokens"):
            engine.admit("d", TOKENS[:7], params, [3, 4])

    def test_unknown_keys_are_passed_over(self, engines):
        engine = engines()
        params = engine.prefill("p", TOKENS[:8], [1, 2])
        engine.admit("d", TOKENS[:8], params | {"something": {"else": 1}}, [3, 4])

    def test_roles_that_do_not_fit_are_refused(self, engines):
        producer, consumer = engines("kv_producer"), engines("kv_consumer")
        params = producer.prefill("p", TOKENS[:8], [1, 2])
        with pytest.raises(RequestError, match="kv_producer"):
            producer.admit("d", TOKENS[:8], params, [3, 4])
        with pytest.raises(RequestError, match="kv_consumer"):
            consumer.prefill("q", TOKENS[:8], [1, 2])

    def test_an_aborted_request_leaves_no_lease(self, engines):
        engine = engines()
        engine.step()
        request, _ = engine.admit("d", TOKENS[:8], {"do_remote_decode": True}, [1, 2])
        request.finish_reason, request.num_computed_tokens = "abort", 8
        assert engine.scheduler.request_finished(request, [1, 2]) == (False, None)
        assert not engine.scheduler.has_pending_push_work()


class TestConfiguration:
    def test_unknown_or_bad_options_are_refused(self):
        for extra, named in (({"lease": 3}, "lease"), ({"lease_seconds": "3"}, "lease_seconds"), ({"lease_seconds": 5}, "kv_load_timeout")):
            with pytest.raises(ConfigError, match=named):
                PeerConnector(engine_config("e", **extra), KVConnectorRole.SCHEDULER, kv_cache_config())

    @pytest.mark.parametrize("name", ["lease_seconds", "handshake_timeout"])
    @pytest.mark.parametrize("value", [1e308, 10**400, 86401, float("inf"), float("nan"), 0, True])
    def test_seconds_that_no_clock_can_bear_are_refused(self, name, value):
        with pytest.raises(ConfigError, match=f"'{name}'.* expected a number of seconds above 0, at most 86400"):
            PeerConnector(engine_config("e", **{name: value}), KVConnectorRole.SCHEDULER, kv_cache_config())

    def test_the_halves_do_not_do_each_others_work(self):
        scheduler = PeerConnector(engine_config("e"), KVConnectorRole.SCHEDULER, kv_cache_config())
        with pytest.raises(LifecycleError, match="worker-side"):
            scheduler.abort_loads(1)

    def test_two_engines_of_one_id_are_refused(self, engines):
        engine = engines()
        with pytest.raises(Exception, match="own engine_id"):
            PeerEngine(engine.worker.kv_transfer_config.engine_id)
