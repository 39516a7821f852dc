"""`interlock pd` with real processes: what it shows, and what is left when any of them is ended."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from cli_support import Command, wait_until_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are watched through /proc and pidfds")

MANY = 300


@pytest.fixture
def many_prompts(tmp_path: Path) -> str:
    """A file of prompts that keep both processes busy for a while."""
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps(f"number {number} " + "x" * (number % 40)) + "\n" for number in range(MANY)))
    return str(file)


@pytest.fixture
def running(start: list[Command], engine_flags: list[str], many_prompts: str) -> Command:
    """The command in the middle of its work: both processes are there and the first text has come."""
    command = Command(["pd", "--file", many_prompts, "--max-tokens", "8", "--kv-load-failure-policy", "recompute", *engine_flags])
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


def test_json_names_the_transport(engine_flags: list[str]) -> None:
    _, out, _ = Command(["pd", "hello", "--json", "--no-verify", "--max-tokens", "2", "--transport", "nixl", *engine_flags]).finish()
    assert json.loads(out)["handoff"]["transport"] == "nixl"
