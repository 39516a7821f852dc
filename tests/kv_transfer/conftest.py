import contextlib
import gc
import os
import threading
import uuid

import pytest
from peer_support import PeerEngine, ProducerProcess
from storm import make_model, make_prompts, undisturbed


def held_descriptors():
    """Sockets and shared segments that this process holds."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(target for target in targets if target.startswith(("socket:", "/memfd:interlock")))


@pytest.fixture
def transport(request):
    """Which transport the engines of a test use: parametrized indirectly, shared memory otherwise. 'tcp' is NIXL over TCP."""
    chosen = getattr(request, "param", "shared_memory")
    with pytest.MonkeyPatch.context() as patch:
        if chosen == "tcp":
            patch.setenv("UCX_TLS", "tcp,self")
        yield "nixl" if chosen == "tcp" else chosen


@pytest.fixture
def engines(transport):
    """Makes engines with an id of their own, and closes them; ends with the count of descriptors unchanged."""
    before = held_descriptors()
    threads_before = threading.active_count()
    made = []

    def make(*args, **kwargs):
        made.append(PeerEngine(f"test-{uuid.uuid4().hex}", *args, **{"transport": transport, **kwargs}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
        engine.close()
    made.clear()
    engine = None
    gc.collect()  # a mapping holds a descriptor until it goes
    assert threading.active_count() == threads_before
    assert held_descriptors() == before


@pytest.fixture
def push_pair(engines):
    """`push_pair(consumer options)`: a producer and a consumer."""

    def pair(producer=None, **options):
        wanted = {"mode": "write", "num_blocks": 16}
        return engines("kv_producer", **(wanted | (producer or {}))), engines("kv_consumer", **(wanted | options))

    return pair


@pytest.fixture
def producer_process(transport):
    process = ProducerProcess(f"test-{uuid.uuid4().hex}", transport)
    yield process
    process.stop()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny model for engines in processes of their own."""
    return make_model(str(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def prompts():
    return make_prompts(0)


@pytest.fixture(scope="session")
def expected(model, prompts):
    """What an undisturbed engine answers, per prompt: tokens, and the bits of their log-probabilities."""
    return undisturbed(model, prompts)
