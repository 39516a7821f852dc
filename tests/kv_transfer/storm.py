"""Engines in processes of their own that are killed at random moments under load, while the other one goes on.

`python storm.py --kills 200 --report docs/storm.md` runs it at length (`make storm`); `test_kills.py` runs a few.
"""

import argparse
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests' own modules, in spawned processes too

from checkpoints import make_tiny_llama
from interlock import LLM, SamplingParams

TCP = "nixl over tcp"
CONFIGURATIONS = [(transport, mode) for mode in ("read", "write") for transport in ("shared_memory", "nixl", TCP)]
VICTIMS = ("prefill", "decode")
MAX_TOKENS = 6
NUM_PROMPTS = 24
IN_FLIGHT = 8
LEASE_SECONDS, LOAD_SECONDS = 1.5, 1.2
PATIENCE_SECONDS = 30.0  # what takes longer counts as a hang
START_SECONDS = 240.0  # of an engine, which may have to compile its kernels


def make_model(directory: str) -> str:
    """A model of four layers, small enough to start in a moment."""
    return make_tiny_llama(f"{directory}/storm", num_layers=4, max_position_embeddings=512)


def make_prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 250) for _ in range(rng.randrange(100, 400))] for _ in range(NUM_PROMPTS)]


def engine_options(model: str, **options: Any) -> dict[str, Any]:
    return {
        "model": model,
        "threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 448,
        "cudagraph_mode": "FULL",
        "cudagraph_capture_sizes": [8, 64],
        "kv_cache_memory_bytes": 8 << 20,
        "seed": 1,
        **options,
    }


def engine_process(pipe: Connection, environment: dict[str, str], options: dict[str, Any]) -> None:
    """Serve ('generate', id, tokens, max_tokens, kv_transfer_params), ('abort', id), ('audit',), ('stop',) until the parent is gone."""
    logging.disable(logging.WARNING)  # lost peers are what this is about
    os.environ.update(environment)
    with LLM(**options) as llm:
        core, requests, auditing = llm.core, {}, False
        pipe.send(("ready",))
        while True:
            while pipe.poll(patience(core)):
                try:
                    command, *arguments = pipe.recv()
                except EOFError:
                    return
                if command == "stop":
                    return
                if command == "audit":
                    auditing = True
                    break
                request_id, tokens, max_tokens, params = arguments
                sampling = SamplingParams(
                    temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, extra_args={"kv_transfer_params": params} if params else None
                )
                requests[request_id] = core.make_request(request_id, {"prompt_token_ids": tokens}, sampling)
                core.add_request(requests[request_id])
            for delta in core.step() if core.has_work else ():
                if delta.finished:
                    request = requests.pop(delta.request_id)
                    pipe.send(("done", delta.request_id, answer(request), delta.kv_transfer_params, delta.finish_reason, delta.error))
            if auditing and not core.has_work:
                auditing = False
                audit = core.audit()
                assert audit.clean, audit
                pipe.send(("audit", audit.free, audit.num_blocks, core.metrics()["num_failed_loads"]))


def patience(core: Any) -> float | None:
    """How long to wait for the parent, in seconds: an engine that only waits for peers lets their threads run."""
    if not core.has_work:
        return None
    return 0.0 if core.num_scheduled_tokens else 0.0005


def answer(request: Any) -> list[tuple[int, str]]:
    """Tokens, and the bits of their log-probabilities."""
    return [(token, float.hex(position.logprobs[0])) for token, position in zip(request.output_token_ids, request.logprobs, strict=True)]


class Engine:
    """One engine process."""

    def __init__(self, name: str, options: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.environment = environment or {}
        self.pending: set[str] = set()
        self.options = options
        self.start()

    def start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, child = spawn.Pipe()
        transfer = self.options["kv_transfer_config"] | {"engine_id": f"{self.name}-{uuid.uuid4().hex}"}
        self.engine_id = transfer["engine_id"]
        options = self.options | {"kv_transfer_config": transfer}
        self.process = spawn.Process(target=engine_process, args=(child, self.environment, options), daemon=True)
        self.process.start()
        child.close()

    def wait_ready(self) -> None:
        self.receive("ready", START_SECONDS)

    def receive(self, kind: str, patience: float = PATIENCE_SECONDS) -> tuple[Any, ...]:
        if not self.pipe.poll(patience):
            raise AssertionError(f"the {self.name} process has said nothing for {patience:g} s, expected {kind!r}: it hangs")
        message = self.pipe.recv()
        assert message[0] == kind, message
        return message

    def generate(self, request_id: str, tokens: list[int], max_tokens: int, params: dict[str, Any] | None) -> None:
        self.pending.add(request_id)
        self.pipe.send(("generate", request_id, tokens, max_tokens, params))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.pending.clear()

    def stop(self) -> None:
        if self.process.is_alive():
            self.pipe.send(("stop",))
        self.process.join(PATIENCE_SECONDS)
        self.pipe.close()


@dataclass
class Outcome:
    """What a storm came to. slowest: the longest that a survivor took to end everything, in seconds."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VICTIMS, 0))
    requests: int = 0
    failed_loads: int = 0
    slowest: float = 0.0


class Storm:
    """A pair of engines, a stream of requests through both, and kills. prefill, decode: options of one of them."""

    def __init__(
        self,
        model: str,
        transport: str,
        mode: str,
        expected: dict[int, Any],
        prompts: list[list[int]],
        seed: int,
        prefill: Any = (),
        decode: Any = (),
    ) -> None:
        self.outcome = Outcome()
        self.mode = mode
        self.prompts, self.expected = prompts, expected
        self.rng = random.Random(seed)
        self.count = 0
        self.seen_failed_loads = 0
        self.of: dict[str, int] = {}
        environment = {"UCX_TLS": "tcp,self"} if transport == TCP else {}
        extra = {"mode": mode, "transport": "nixl" if transport == TCP else transport, "lease_seconds": LEASE_SECONDS, "handshake_timeout": 1.0}
        self.engines = {}
        own = {"prefill": dict(prefill), "decode": dict(decode)}
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            transfer = {
                "kv_connector": "PeerConnector",
                "kv_role": role,
                "kv_connector_extra_config": extra,
                "kv_load_failure_policy": "recompute",
            }
            common = {"kv_transfer_config": transfer, "kv_load_timeout": LOAD_SECONDS, "enable_prefix_caching": name == "prefill"}
            options = engine_options(model, **(common | own[name]))
            self.engines[name] = Engine(name, options, environment)
        for engine in self.engines.values():
            engine.wait_ready()

    def run(self, kills: int) -> Outcome:
        for _ in range(kills):
            self.strike(self.rng.choice(VICTIMS))
        self.settle("decode", "prefill")
        return self.outcome

    def accompany(self, requests: int, max_tokens: int) -> None:
        """Prompts that the prefill engine answers itself; they grow, and take blocks from those that came later."""
        for number in range(requests):
            self.of[f"own{number}"] = number
            self.engines["prefill"].generate(f"own{number}", self.prompts[number], max_tokens, None)

    def calm(self, requests: int) -> Outcome:
        """Requests, and nothing else."""
        for _ in range(requests):
            self.submit()
        self.settle("prefill", "decode")
        self.settle("decode")  # what prefill's last answers began
        return self.outcome

    def strike(self, victim: str) -> None:
        """Load, a kill at a random moment of it, and what the survivor makes of it."""
        survivor = "decode" if victim == "prefill" else "prefill"
        for _ in range(IN_FLIGHT):
            self.submit()
        if self.rng.random() < 0.5:
            enough = self.outcome.requests + self.rng.randrange(1, IN_FLIGHT)  # at once after an answer: what follows from it has just begun
            while self.outcome.requests < enough:
                self.pump(PATIENCE_SECONDS)
        else:
            moment = time.monotonic() + self.rng.random() * 0.3
            while (rest := moment - time.monotonic()) > 0:
                self.pump(rest)
        lost = list(self.engines[victim].pending)
        self.engines[victim].kill()
        self.outcome.kills[victim] += 1
        if victim == "prefill":
            for request_id in lost:
                self.fall_back(request_id)
        began = time.monotonic()
        self.settle(survivor)
        self.outcome.slowest = max(self.outcome.slowest, time.monotonic() - began)
        if victim == "decode":
            self.seen_failed_loads = 0
        self.engines[victim].start()
        self.engines[victim].wait_ready()

    def halt(self, victim: str) -> None:
        """Load, and an engine that stands still at a random moment of it, alive; what the other one makes of it, and then both."""
        survivor = "decode" if victim == "prefill" else "prefill"
        for _ in range(IN_FLIGHT):
            self.submit()
        enough = self.outcome.requests + self.rng.randrange(1, IN_FLIGHT)
        while self.outcome.requests < enough:
            self.pump(PATIENCE_SECONDS)
        os.kill(self.engines[victim].process.pid, signal.SIGSTOP)
        try:
            for number in range(4):  # that need nobody else
                self.count += 1
                self.of[f"own{self.count}"] = number
                self.engines[survivor].generate(f"own{self.count}", self.prompts[number], MAX_TOKENS, None)
            began = time.monotonic()
            while self.engines[survivor].pending:
                hang = f"{sorted(self.engines[survivor].pending)} of the {survivor} engine hang while {victim} stands still"
                assert time.monotonic() < began + PATIENCE_SECONDS, hang
                self.pump(1.0)
            self.outcome.slowest = max(self.outcome.slowest, time.monotonic() - began)
        finally:
            os.kill(self.engines[victim].process.pid, signal.SIGCONT)
        self.finish(survivor, victim)
        self.finish(victim)  # what the first one's last answers began
        deadline = time.monotonic() + PATIENCE_SECONDS
        while missing := [name for name in self.engines if self.missing(name)]:
            assert time.monotonic() < deadline, f"blocks of {missing} are not back"
            self.submit()  # its steps take in what was heard of the stopped engine
            self.finish("prefill", "decode")
            self.finish("decode")

    def submit(self) -> None:
        self.count += 1
        number = self.rng.randrange(len(self.prompts))
        request_id = f"r{self.count}"
        self.of[request_id] = number
        prefill, decode = self.engines["prefill"], self.engines["decode"]
        if self.mode == "read":
            prefill.generate(request_id, self.prompts[number], 1, {"do_remote_decode": True})
            return
        host, port = self.side_channel
        both = {"transfer_id": request_id, "remote_engine_id": prefill.engine_id, "remote_host": host, "remote_port": port}
        legs = [
            lambda: prefill.generate(request_id, self.prompts[number], 1, {"do_remote_decode": True} | both),
            lambda: decode.generate(request_id, self.prompts[number], MAX_TOKENS, {"do_remote_prefill": True} | both),
        ]
        self.rng.shuffle(legs)
        for leg in legs:
            leg()

    @property
    def side_channel(self) -> tuple[str | None, int | None]:
        """Where the prefill engine's side channel is, as a router learns it: from an answer."""
        prefill = self.engines["prefill"]
        if getattr(self, "_channel_of", None) != prefill.engine_id:
            prefill.generate("ask", [5, 6, 7], 1, {"do_remote_decode": True})
            while True:
                _, request_id, _, params, *_ = prefill.receive("done")
                prefill.pending.discard(request_id)
                if request_id == "ask":
                    self._channel_of = prefill.engine_id
                    self._channel = params["remote_host"], params["remote_port"]
                    break
        return self._channel

    def fall_back(self, request_id: str) -> None:
        """What a router does when the prefill engine is gone: decode computes the prompt."""
        if self.mode == "read" and request_id in self.of:
            self.engines["decode"].generate(request_id, self.prompts[self.of[request_id]], MAX_TOKENS, None)

    def pump(self, timeout: float) -> None:
        """Take answers in and pass requests on."""
        pipes = {engine.pipe: engine for engine in self.engines.values() if engine.process.is_alive()}
        for pipe in wait(list(pipes), timeout):
            self.take(pipes[pipe], pipe.recv())

    def take(self, engine: Engine, message: tuple[Any, ...]) -> None:
        kind, request_id, output, params, reason, error = message
        assert kind == "done"
        engine.pending.discard(request_id)
        assert reason == "length", f"{request_id} on {engine.name} ended with {reason!r}: {error}"
        expected = self.expected[self.of[request_id]]
        assert output[:MAX_TOKENS] == expected[: len(output)], f"{request_id} on {engine.name} differs from an undisturbed run"
        self.outcome.requests += 1
        if engine.name == "prefill" and self.mode == "read" and params is not None:
            decode = self.engines["decode"]
            if decode.process.is_alive():
                decode.generate(request_id, self.prompts[self.of[request_id]], MAX_TOKENS, params)

    def finish(self, *names: str) -> None:
        """The engines end all that they have."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(self.engines[name].pending for name in names):
            assert time.monotonic() < deadline, f"requests {[sorted(self.engines[name].pending) for name in names]} hang"
            self.pump(1.0)

    def missing(self, name: str) -> int:
        """How many blocks of an engine that has nothing to do are not back."""
        self.engines[name].pipe.send(("audit",))
        _, home, total, failed_loads = self.engines[name].receive("audit")
        if name == "decode":
            self.outcome.failed_loads += failed_loads - self.seen_failed_loads
            self.seen_failed_loads = failed_loads
        return total - home

    def settle(self, *names: str) -> None:
        """The engines end all that they have, and every block is back."""
        self.finish(*names)
        for name in names:
            missing = self.missing(name)
            assert not missing, f"{missing} blocks of the {name} engine are not back"

    def close(self) -> None:
        for engine in self.engines.values():
            engine.stop()


def undisturbed(model: str, prompts: list[list[int]]) -> dict[int, Any]:
    """The answers of an engine that nobody disturbs."""
    with LLM(**engine_options(model, cudagraph_mode="NONE")) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
        requests = {}
        for number, prompt in enumerate(prompts):
            requests[number] = llm.core.make_request(str(number), {"prompt_token_ids": prompt}, params)
            llm.core.add_request(requests[number])
        while llm.core.has_work:
            llm.core.step()
        return {number: answer(request) for number, request in requests.items()}


def main() -> None:
    """Kills, spread over both modes and transports; the report says how it ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--only", choices=[f"{mode}-{transport}" for transport, mode in CONFIGURATIONS])
    options = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        model, prompts = make_model(directory), make_prompts(options.seed)
        expected = undisturbed(model, prompts)
        chosen = [pair for pair in CONFIGURATIONS if options.only in (None, f"{pair[1]}-{pair[0]}")]
        for index, (transport, mode) in enumerate(chosen):
            kills = options.kills // len(chosen) + (index < options.kills % len(chosen))
            began = time.monotonic()
            storm = Storm(model, transport, mode, expected, prompts, options.seed + index)
            try:
                outcome = storm.run(kills)
            finally:
                storm.close()
            lines.append(
                f"| {mode} | {transport} | {outcome.kills['prefill']} | {outcome.kills['decode']} | {outcome.requests} | {outcome.failed_loads} | "
                f"{outcome.slowest:.1f} | {time.monotonic() - began:.0f} |"
            )
            print(lines[-1], flush=True)
    if options.report:
        options.report.write_text(REPORT.format(kills=options.kills, seed=options.seed, rows="\n".join(lines)))


REPORT = (
    """# Storm

`make storm` ends one of two engine processes with SIGKILL, {kills} times, at random moments under load (seed {seed}); then it checks the
other one and starts a new one in the place of the dead. Every run below ended like this:

- the survivor ended every request that it had (a wait of {patience:g} s counts as a hang);
- every answer, token by token and in the bits of every log-probability, was that of an undisturbed engine, whether its KV had been loaded,
  had been lost in mid-transfer and was computed again, or had never been sent;
- every KV block of the survivor was free or cached again.

| mode | transport | prefill killed | decode killed | answers checked | loads lost | slowest recovery, s | run, s |
| --- | --- | --- | --- | --- | --- | --- | --- |
{{rows}}

Recovery is the time until the survivor had ended all its requests and had every block back; leases of the dead run {lease:g} s in this run.
""".replace("{patience:g}", f"{PATIENCE_SECONDS:g}")
    .replace("{lease:g}", f"{LEASE_SECONDS:g}")
    .replace("{{rows}}", "{rows}")
)


if __name__ == "__main__":
    main()
