"""`interlock generate`: what goes in, what comes out, and how it ends."""

import importlib.metadata
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_support import TIMEOUT, Command
from typer.testing import CliRunner

from checkpoints import make_tiny_llama, random_weights, write_safetensors
from interlock import LLM, SamplingParams
from interlock.commands import app
from interlock.commands.console import json_line

STAGES = ("engine: ", "prefill: ", "decode: ")


@pytest.fixture
def generate(engine_flags: list[str]) -> Any:
    """Run the command in this process: (exit code, standard output)."""

    def run(*arguments: str, text: str | None = None) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["generate", *arguments, *engine_flags], input=text)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout

    return run


def test_json_has_the_fields_of_a_request_output_and_the_tokens_of_the_engine(generate: Any, tiny_model: str) -> None:
    code, out = generate("--raw", "--json", "--max-tokens", "5", "--logprobs", "2", "hello")
    result = json.loads(out)
    with LLM(tiny_model, threads=1, kv_cache_memory_bytes=4194304) as llm:
        (expected,) = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=5, logprobs=2))
    assert code == 0
    assert result["prompt"] == "hello"
    assert result["prompt_token_ids"] == expected.prompt_token_ids
    assert result["finished"] is True
    output = result["outputs"][0]
    assert output["token_ids"] == expected.outputs[0].token_ids
    assert output["text"] == expected.outputs[0].text
    assert output["finish_reason"] == "length"
    assert output["cumulative_logprob"] == expected.outputs[0].cumulative_logprob
    assert len(output["logprobs"]) == 5
    assert output["index"] == 0
    assert result["metrics"]["num_cached_tokens"] == 0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_logits_that_are_not_finite_are_an_error_of_the_request_and_json_stays_json(tmp_path: Path, engine_flags: list[str], value: float) -> None:
    directory = make_tiny_llama(tmp_path, vocab_size=288, tokenizer_size=259, eos_token_id=None)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    weights = dict(random_weights(seed=0, vocab_size=288, tie=True, **sizes))
    weights["model.norm.weight"] = weights["model.norm.weight"].copy()
    weights["model.norm.weight"][0] = value
    write_safetensors(tmp_path / "model.safetensors", weights)
    result = CliRunner().invoke(app, ["generate", "--raw", "--json", "--logprobs", "2", "hello", *engine_flags, "--model", directory])
    output = json.loads(result.stdout, parse_constant=pytest.fail)
    assert result.exit_code == 1
    assert output["error"] == "the logits are not finite"
    assert (output["outputs"][0]["finish_reason"], output["outputs"][0]["token_ids"]) == ("error", [])
    assert "error: request 0: the logits are not finite" in result.stderr


def test_a_model_without_a_tokenizer_has_token_ids_but_no_text(tmp_path: Path, engine_flags: list[str]) -> None:
    directory, prompts = make_tiny_llama(tmp_path / "model", eos_token_id=None), tmp_path / "prompts.jsonl"
    prompts.write_text("[1, 2, 3]")
    arguments = ["generate", "--file", str(prompts), "--max-tokens", "3", *engine_flags, "--model", directory]
    assert len(json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["outputs"][0]["token_ids"]) == 3
    result = CliRunner().invoke(app, arguments)
    assert (result.stdout, str(result.exception)) == (
        "",
        "the model's files have no tokenizer, so that there is no text to write; use --json for token ids",
    )


def test_json_shows_a_log_probability_of_minus_infinity_as_a_number_and_lets_nothing_else_pass() -> None:
    value = {"logprobs": [{7: (-0.5, -math.inf)}], "text": "-Infinity", "count": 3, "none": None}
    assert json.loads(json_line(value)) == {"logprobs": [{"7": [-0.5, -9999.0]}], "text": "-Infinity", "count": 3, "none": None}
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="JSON"):
            json_line([bad])


def test_the_chat_template_is_used_unless_raw_is_asked_for(generate: Any) -> None:
    prompts = [json.loads(generate("--json", "--max-tokens", "1", *flags, "hi")[1])["prompt"] for flags in ([], ["--chat"], ["--raw"])]
    assert prompts == ["<s>user:hiA:", "<s>user:hiA:", "hi"]


def test_several_prompts_come_out_in_order_whatever_ends_first(generate: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [5, 6, 7]}\n"longer prompt text"\n')
    code, out = generate("--json", "--raw", "--max-tokens", "3", "first", "--file", str(file))
    results = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [result["prompt"] for result in results] == ["first", None, "longer prompt text"]
    assert results[1]["prompt_token_ids"] == [5, 6, 7]


def test_text_of_several_prompts_and_samples_is_headed_and_the_same_as_in_json(generate: Any) -> None:
    arguments = ("--raw", "--max-tokens", "4", "-n", "2", "--temperature", "1", "--seed", "5", "one", "two")
    texts = [output["text"] for line in generate("--json", *arguments)[1].splitlines() for output in json.loads(line)["outputs"]]
    expected = "\n".join(f"[{number}/4]\n{text}\n" for number, text in enumerate(texts, 1))
    assert generate(*arguments) == (0, expected)


def test_objects_reach_the_engine_with_their_salt_and_through_the_chat_template(generate: Any, tmp_path: Path) -> None:
    text, file = "x" * 100, tmp_path / "prompts.jsonl"
    salts: list[dict[str, str]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {}]
    file.write_text("".join(json.dumps({"prompt": text, **salt}) + "\n" for salt in salts))
    code, out = generate("--json", "--max-tokens", "2", "--max-num-seqs", "1", "--file", str(file))
    results = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {result["prompt"] for result in results} == {f"<s>user:{text}A:"}
    assert [result["metrics"]["num_cached_tokens"] > 0 for result in results] == [False, False, False, True, True]
    assert len({json.dumps(result["outputs"]) for result in results}) == 1


def test_the_prompt_may_come_from_standard_input(generate: Any) -> None:
    assert json.loads(generate("--raw", "--json", "--max-tokens", "1", text="from a pipe\n")[1])["prompt"] == "from a pipe\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["prompt"]),
        (["x" * 600, "--raw"], ["600", "512"]),
        (["hello", "--block-size", "3"], ["block_size", "3"]),
        (["hello", "--top-p", "0"], ["top_p", "0"]),
        (["hello", "--model", "nowhere"], ["nowhere", "smollm2"]),
    ],
)
def test_a_user_error_is_one_line_and_exit_status_2(engine_flags: list[str], arguments: list[str], words: list[str]) -> None:
    status, out, err = Command(["generate", *engine_flags, *arguments]).finish()
    assert status == 2
    assert out == ""
    (line,) = [line for line in err.splitlines() if not line.startswith("engine: ")]
    assert line.startswith("error: ")
    assert all(word in line for word in words)


def test_an_interrupt_ends_a_running_generation_with_130_and_no_traceback(start: list[Command], engine_flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text('"again"\n' * 5000)
    command = Command(["generate", "--raw", "--max-tokens", "8", "--file", str(file), *engine_flags])
    start.append(command)
    assert command.read_line() == "[1/5000]\n"
    command.process.send_signal(signal.SIGINT)
    status, _, err = command.finish()
    assert status == 130
    assert "Traceback" not in err


def test_a_reader_that_goes_away_ends_it_quietly_with_141(start: list[Command], engine_flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text('"again"\n' * 2000)
    command = Command(["generate", "--raw", "--max-tokens", "8", "--file", str(file), *engine_flags])
    start.append(command)
    process = command.process
    assert process.stdout is not None
    assert process.stdout.readline() == "[1/2000]\n"
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(TIMEOUT) == 141, "as a shell says it of a process that SIGPIPE ended"
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("command", ["generate", "pd"])
def test_a_full_disk_is_one_line_and_exit_status_1(engine_flags: list[str], command: str) -> None:
    with open("/dev/full", "w") as full:
        status, _, err = Command([command, "hello", "--max-tokens", "2", *engine_flags], stdout=full).finish()
    assert status == 1
    assert [line for line in err.splitlines() if not line.startswith(STAGES)] == ["error: the output cannot be written: No space left on device"]


@pytest.mark.parametrize("command", [["generate", "--raw"], ["pd", "--no-verify"]], ids=lambda command: command[0])
def test_characters_that_the_terminal_does_not_have_are_spelled_out(engine_flags: list[str], command: list[str]) -> None:
    outputs = []
    for encoding in ("utf-8", "ascii"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        status, out, err = Command([*command, "\u65e5", "--max-tokens", "4", *engine_flags], env=environment, encoding="utf-8").finish()
        assert status == 0, err
        outputs.append(out.partition("\n\n")[0])
    assert not outputs[0].isascii()
    assert outputs[1] == outputs[0].encode("ascii", "backslashreplace").decode()


def run_in_shell(line: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """`line`, in which "$@" is the command."""
    command = [sys.executable, "-P", "-m", "interlock", *arguments]
    return subprocess.run(["sh", "-c", line, "sh", *command], capture_output=True, text=True, timeout=TIMEOUT, check=False)


def test_a_closed_standard_output_is_one_line_and_exit_status_2(engine_flags: list[str]) -> None:
    result = run_in_shell('"$@" >&-', ["generate", "hello", *engine_flags])
    assert result.returncode == 2
    assert result.stderr.startswith("error: standard output is closed")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", ["2>&-", "<&-", "<&- 2>&-"])
@pytest.mark.parametrize("command", [["generate", "--raw", "hello"], ["pd", "hello", "--no-verify", "--json"]], ids=lambda command: command[0])
def test_other_closed_streams_change_nothing(engine_flags: list[str], closed: str, command: list[str]) -> None:
    result = run_in_shell(f'"$@" {closed}', [*command, "--max-tokens", "2", *engine_flags])
    assert result.returncode == 0
    assert result.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--threads", "two", "hi"], ["--threads", "integer", "interlock generate --help"]),
        (["generate", "--nonsense"], ["--nonsense", "interlock generate --help"]),
        (["genrate"], ["genrate", "generate", "interlock --help"]),
        (["bench", "decode", "--json", "/nowhere/at/all.json"], ["/nowhere/at"]),
        (["bench", "decode", "--json", "/"], ["/ cannot be written", "directory"]),
        (["bench", "decode", "--plot", "plot.png"], ["--plot", "'overlap'", "'decode'"]),
        (["generate", "hi", "--kv-cache-memory-bytes", str(1 << 60)], ["kv_cache_memory_bytes", str(1 << 60), "available"]),
        (["generate", "hi", "--mode", "PIECEWISE", "--kv-load-wait", "gate"], ["kv_load_wait", "gate", "PIECEWISE"]),
        (["generate", "hi", "--kv-load-timeout", "nan"], ["kv_load_timeout", "nan"]),
        (["pd", "hi", "--stall-timeout", "0"], ["--stall-timeout", "0"]),
        (["pd", "hi", "--kv-transfer-config", '{"kv_connector": "PeerConnector", "engine_id": "a"}'], ["engine_id 'a'", "leave it out"]),
        (["pd", "hi", "--kv-transfer-config", '{"kv_connector": "PeerConnector", "kv_role": "kv_consumer"}'], ["kv_role 'kv_consumer'"]),
    ],
)
def test_whatever_is_typed_wrong_is_one_line_and_exit_status_2(arguments: list[str], words: list[str]) -> None:
    status, out, err = Command(arguments).finish()
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words)


@pytest.mark.parametrize("command", ["generate", "pd"])
@pytest.mark.parametrize("level", ["", "debug"])
def test_a_connector_that_cannot_be_imported_is_one_line_and_its_traceback_is_for_those_who_ask(
    engine_flags: list[str], tmp_path: Path, command: str, level: str
) -> None:
    (tmp_path / "outside_broken.py").write_text("def x(:\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "INTERLOCK_LOGGING_LEVEL": level}
    flags = ["--kv-transfer-config", '{"kv_connector": "outside_broken:X"}']
    status, out, err = Command([command, "hi", *flags, *engine_flags], env=environment).finish()
    assert (status, out) == (2, "")
    lines = [line for line in err.splitlines() if not line.startswith(STAGES)]
    assert lines[-1].startswith("error: kv_connector 'outside_broken:X' cannot be imported: SyntaxError")
    assert len(lines) == 1 or level
    assert ("Traceback" in err) == bool(level)


def test_an_unknown_level_of_the_log_is_refused() -> None:
    status, _, err = Command(["generate", "hi"], env={**os.environ, "INTERLOCK_LOGGING_LEVEL": "loud"}).finish()
    assert (status, err) == (2, "error: INTERLOCK_LOGGING_LEVEL is 'loud', expected one of ['DEBUG', 'INFO', 'WARNING', 'ERROR', 'CRITICAL']\n")


def test_the_version_and_the_help_can_be_asked_for() -> None:
    assert Command(["--version"]).finish()[:2] == (0, f"interlock {importlib.metadata.version('interlock')}\n")
    assert Command([]).finish()[:2] == Command(["--help"]).finish()[:2]


def test_the_module_is_the_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "interlock", "--help"], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "80"}
    )
    assert all(name in result.stdout for name in ("generate", "pd", "bench"))
