"""`interlock pd` with real processes: what it shows, and what is left when any of them is ended."""

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_support import TIMEOUT, Command, wait_until_gone

from interlock.pd import heartbeat
from interlock.pd.heartbeat import Heart
from interlock.pd.messages import Channel, FromEngine, Generate, Heartbeat, ToEngine
from interlock.pd.pair import wait_ready
from interlock.pd.process import EngineProcess, EngineProcessError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are watched through /proc and pidfds")

MANY = 300
STALLS = ["--stall-timeout", "3"]


@pytest.fixture
def many_prompts(tmp_path: Path) -> str:
    """A file of prompts that keep both processes busy for a while."""
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps(f"number {number} " + "x" * (number % 40)) + "\n" for number in range(MANY)))
    return str(file)


@pytest.fixture
def running(start: list[Command], engine_flags: list[str], many_prompts: str) -> Command:
    """The command in the middle of its work: both processes are there and the first text has come."""
    command = Command(["pd", "--file", many_prompts, "--max-tokens", "8", "--kv-load-failure-policy", "recompute", *STALLS, *engine_flags])
    start.append(command)
    assert command.read_line().startswith(f"[1/{MANY}]")
    assert command.read_line() != ""
    return command


@pytest.mark.parametrize(("mode", "steps"), [("FULL_AND_PIECEWISE", "FULL"), ("PIECEWISE", "PIECEWISE"), ("NONE", "NONE")])
def test_tokens_and_logprobs_equal_those_of_a_single_process_in_each_mode(engine_flags: list[str], mode: str, steps: str) -> None:
    prompts = ["a" * 200, "short"]
    status, out, err = Command(["pd", *prompts, "--json", "--max-tokens", "6", "--mode", mode, *engine_flags]).finish()
    assert status == 0, err
    results = [json.loads(line) for line in out.splitlines()]
    assert len(results) == 2
    for result in results:
        handoff = result["handoff"]
        assert handoff["tokens_equal_to_single_process"] is True
        assert handoff["logprobs_equal_to_single_process"] is True
        assert handoff["kv_bytes_moved"] > 0
        assert handoff["cudagraph_modes"] == {steps: 6}
        assert len(result["outputs"][0]["token_ids"]) == 6
        assert len(result["outputs"][0]["logprobs"]) == 6


def test_prompts_of_a_file_reach_both_processes_as_objects(engine_flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello\u2028", "cache_salt": "s"}\n{"prompt_token_ids": [5, 6, 7]}\n')
    status, out, err = Command(["pd", "--file", str(file), "--json", "--max-tokens", "2", *engine_flags]).finish()
    assert status == 0, err
    salted, plain = (json.loads(line) for line in out.splitlines())
    assert plain["prompt_token_ids"] == [5, 6, 7]
    assert len(salted["prompt_token_ids"]) == len("user:hello") + len("\u2028".encode()) + len("A:") + 1
    assert all(result["handoff"]["logprobs_equal_to_single_process"] for result in (salted, plain))


def test_prompts_share_cached_prefixes_on_both_sides_with_those_of_their_salt_alone(engine_flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": "x" * 100, "cache_salt": salt}) + "\n" for salt in ("a", "b", "a")))
    status, out, err = Command(["pd", "--file", str(file), "--json", "--max-tokens", "2", *engine_flags]).finish()
    assert status == 0, err
    moved = [json.loads(line)["handoff"]["kv_bytes_moved"] for line in out.splitlines()]
    assert moved[0] == moved[1] > moved[2]


def test_what_cannot_be_told_to_another_process_is_one_line(engine_flags: list[str], tmp_path: Path) -> None:
    transfer = {"kv_connector": "PeerConnector", "kv_connector_extra_config": {"port": 10**30}}
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello", "max_tokens": 2}\n')
    for arguments, word in ((["hi", "--kv-transfer-config", json.dumps(transfer)], str(10**30)), (["--file", str(file)], "['max_tokens']")):
        status, out, err = Command(["pd", *arguments, *engine_flags]).finish()
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert word in err
        assert err.count("\n") == 1


def test_text_streams_and_a_table_closes_the_run(engine_flags: list[str]) -> None:
    status, out, err = Command(["pd", "hello", "--max-tokens", "4", *engine_flags]).finish()
    assert status == 0, err
    assert out.startswith("[1/1] hello\n")
    assert "FULL x 4" in out
    assert "1 of 1 equal to a single process" in out


def test_no_verify_runs_no_single_process(engine_flags: list[str]) -> None:
    status, out, err = Command(["pd", "hello", "--json", "--no-verify", "--max-tokens", "2", *engine_flags]).finish()
    assert status == 0
    assert "single" not in err
    assert json.loads(out)["handoff"]["tokens_equal_to_single_process"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_whatever_ends_the_parent_ends_its_processes(running: Command, number: signal.Signals) -> None:
    segments = set(os.listdir("/dev/shm"))
    children = running.children()
    assert set(children) == {"prefill", "decode"}
    pidfds = [os.pidfd_open(pid) for pid in children.values()]
    running.process.send_signal(number)
    status, _, err = running.finish()
    assert status == (-9 if number is signal.SIGKILL else 128 + number)
    assert "Traceback" not in err
    assert wait_until_gone(pidfds)
    assert set(os.listdir("/dev/shm")) <= segments


def test_an_interrupt_while_the_processes_start_ends_them(start: list[Command], engine_flags: list[str]) -> None:
    command = Command(["pd", "hello", *engine_flags])
    start.append(command)
    assert command.process.stderr is not None
    assert command.process.stderr.readline().startswith("prefill: ")
    pidfds = [os.pidfd_open(pid) for pid in command.children().values()]
    assert pidfds
    command.process.send_signal(signal.SIGINT)
    status, out, err = command.finish()
    assert (status, out) == (130, "")
    assert "Traceback" not in err
    assert wait_until_gone(pidfds)


def test_when_prefill_is_killed_decode_recomputes_and_no_bit_changes(running: Command) -> None:
    os.kill(running.children()["prefill"], signal.SIGKILL)
    status, out, err = running.finish()
    assert status == 0, err
    assert "prefill process" in err
    assert "SIGKILL" in err
    assert f"{MANY} of {MANY} equal to a single process" in out


def test_when_prefill_is_killed_and_the_policy_is_fail_requests_fail_with_the_cause(
    start: list[Command], engine_flags: list[str], many_prompts: str
) -> None:
    command = Command(["pd", "--file", many_prompts, "--max-tokens", "8", "--kv-load-failure-policy", "fail", "--no-verify", *engine_flags])
    start.append(command)
    assert command.read_line().startswith("[1/")
    os.kill(command.children()["prefill"], signal.SIGKILL)
    status, _, err = command.finish()
    assert status == 1
    assert "kv_load_failure_policy is" in err
    assert "Traceback" not in err


def test_when_decode_is_killed_the_command_says_so_and_leaves_nothing(running: Command) -> None:
    children = running.children()
    pidfds = [os.pidfd_open(pid) for pid in children.values()]
    os.kill(children["decode"], signal.SIGKILL)
    status, _, err = running.finish()
    assert status == 1
    assert f"error: the decode process (pid {children['decode']}) was ended by signal 9 (SIGKILL)" in err
    assert "Traceback" not in err
    assert wait_until_gone(pidfds)


def test_when_prefill_stalls_decode_recomputes_and_the_stalled_process_is_ended(running: Command) -> None:
    prefill = running.children()["prefill"]
    pidfd = os.pidfd_open(prefill)
    os.kill(prefill, signal.SIGSTOP)
    status, out, err = running.finish()
    assert status == 0, err
    assert f"the prefill process (pid {prefill}) said nothing for 3 s, so it was taken for stalled and ended" in err
    assert "decode computes the prompt itself" in err
    assert f"{MANY} of {MANY} equal to a single process" in out
    assert wait_until_gone([pidfd])


def test_when_prefill_stalls_and_the_policy_is_fail_the_requests_fail_with_the_cause_and_no_single_process_is_started(
    start: list[Command], engine_flags: list[str]
) -> None:
    command = Command(["pd", "hello " * 50, "--max-tokens", "4", "--kv-load-failure-policy", "fail", *STALLS, *engine_flags])
    start.append(command)
    assert command.process.stderr is not None
    while not command.process.stderr.readline().startswith("prefill: ready"):
        pass
    prefill = command.children()["prefill"]
    os.kill(prefill, signal.SIGSTOP)
    status, out, err = command.finish()
    assert status == 1
    assert f"error: request-1: the prefill process (pid {prefill}) said nothing for 3 s" in err
    assert "kv_load_failure_policy is fail" in err
    assert "single" not in err
    assert "0 of 1 requests" in out


def test_when_decode_stalls_the_command_says_so_shows_what_was_finished_and_leaves_nothing(running: Command) -> None:
    children = running.children()
    pidfds = [os.pidfd_open(pid) for pid in children.values()]
    os.kill(children["decode"], signal.SIGSTOP)
    status, out, err = running.finish()
    assert status == 1
    assert f"error: the decode process (pid {children['decode']}) said nothing for 3 s" in err
    assert "not compared" in out
    assert f"of {MANY} requests went through both processes" in out
    assert "single" not in err
    assert "Traceback" not in err
    assert wait_until_gone(pidfds)


def test_a_process_that_stops_while_it_starts_is_given_up(tiny_model: str) -> None:
    process = EngineProcess("engine", {"model": tiny_model, "threads": 1})
    os.kill(process.pid, signal.SIGSTOP)
    pidfd = os.pidfd_open(process.pid)
    with pytest.raises(EngineProcessError, match=r"the engine process \(pid \d+\) said nothing for 0\.2 s"):
        wait_ready(process, lambda name, stage, done, total: None, 0.2)
    assert wait_until_gone([pidfd])


def test_a_process_that_takes_nothing_in_is_given_up(tiny_model: str) -> None:
    process = EngineProcess("engine", {"model": tiny_model, "threads": 1})
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EngineProcessError, match=r"said nothing for 0\.2 s"):
        process.send(Generate("r", list(range(10**6)), {}), 0.2)


def test_an_engine_that_is_slow_but_alive_beats() -> None:
    here, there = socket.socketpair()
    heart, parent = Heart(Channel(there, ToEngine)), Channel(here, FromEngine)
    heart.note(working=True)
    assert [parent.receive(TIMEOUT) for _ in range(3)] == [Heartbeat()] * 3
    heart.note(working=False)
    parent.close()
    there.close()


def test_an_engine_whose_step_does_not_end_has_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "LONGEST_STEP_SECONDS", 0.0)
    beats: list[object] = []
    waited = threading.Event()
    monkeypatch.setattr(heartbeat.time, "sleep", lambda seconds: (waited.set(), threading.Event().wait()))
    Heart(SimpleNamespace(send=beats.append)).note(working=True)  # type: ignore[arg-type]
    assert waited.wait(TIMEOUT)
    assert beats == []


def test_a_comparison_that_fails_keeps_the_results(start: list[Command], engine_flags: list[str]) -> None:
    command = Command(["pd", "hello", "--max-tokens", "2", "--no-verify", "--compare-barrier", *engine_flags])
    start.append(command)
    assert command.process.stderr is not None
    while not command.process.stderr.readline().startswith("decode-barrier: "):
        pass
    os.kill(command.children()["prefill"], signal.SIGKILL)
    status, out, err = command.finish()
    assert status == 1
    assert "error: the ways of waiting could not be compared: " in err
    assert "1 of 1 requests went through both processes" in out


def test_a_least_number_of_tokens_is_no_hindrance(engine_flags: list[str]) -> None:
    status, out, err = Command(["pd", "hello", "--json", "--min-tokens", "5", "--max-tokens", "8", *engine_flags]).finish()
    assert status == 0, err
    result = json.loads(out)
    assert result["handoff"]["time_to_first_token_recomputed"] > 0
    assert result["warnings"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere"], ["nowhere"]),
        (["--max-model-len", "0"], ["max_model_len", "0"]),
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--kv-load-failure-policy", "retry"], ["kv_load_failure_policy", "retry"]),
        (["-n", "2"], ["n is 2"]),
        (["--transport", "pigeon"], ["--transport", "pigeon", "shared_memory"]),
        (["--transport", "nixl", "--kv-transfer-config", '{"kv_connector": "PeerConnector"}'], ["--transport", "--kv-transfer-config"]),
        (["--file", "nowhere.txt"], ["nowhere.txt"]),
    ],
)
def test_a_user_error_is_one_line_and_exit_status_2(engine_flags: list[str], arguments: list[str], words: list[str]) -> None:
    status, out, err = Command(["pd", "hello", *engine_flags, *arguments]).finish()
    assert status == 2
    assert out == ""
    (line,) = [line for line in err.splitlines() if not line.startswith(("prefill: ", "decode: "))]
    assert line.startswith("error: ")
    assert all(word in line for word in words)


def test_each_transport_is_shown_and_compared_with_a_barrier(engine_flags: list[str]) -> None:
    status, out, err = Command(["pd", "hello there", "--max-tokens", "3", "--transport", "all", "--compare-barrier", *engine_flags]).finish()
    assert status == 0, err
    assert out.count("equal to a single process in every token") == 2
    assert "over shared_memory" in out
    assert "over nixl" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("shared_memory ", "nixl "))]
    assert [row[0] for row in rows] == ["shared_memory", "nixl"]
    assert all(float(value) > 0 for row in rows for value in row[1:3])


PUSH = ["--kv-transfer-config", '{"kv_connector": "PeerConnector", "kv_connector_extra_config": {"mode": "write"}}']


def test_pushed_kv_is_accounted_for(engine_flags: list[str]) -> None:
    status, out, err = Command(["pd", "a" * 200, "--json", "--no-verify", "--max-tokens", "2", *PUSH, *engine_flags]).finish()
    assert status == 0, err
    handoff = json.loads(out)["handoff"]
    assert handoff["kv_bytes_moved"] > 0
    assert handoff["load_wait_seconds"] > 0


def test_gates_are_not_compared_with_a_barrier_where_no_step_waits(engine_flags: list[str]) -> None:
    arguments = ["pd", "a" * 200, "--no-verify", "--max-tokens", "2", "--compare-barrier", *PUSH, *engine_flags]
    status, out, err = Command(arguments).finish()
    assert status == 0, err
    assert "is waited for outside the steps, so there is nothing to compare" in out
    assert "saved" not in out


def test_json_names_the_transport(engine_flags: list[str]) -> None:
    _, out, _ = Command(["pd", "hello", "--json", "--no-verify", "--max-tokens", "2", "--transport", "nixl", *engine_flags]).finish()
    assert json.loads(out)["handoff"]["transport"] == "nixl"
