"""How figures are made and shown."""

import contextlib
import io
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from interlock.bench import crowded, transfer_peer
from interlock.bench.measure import alternate, compare, prompt_token_ids
from interlock.bench.peer import PYTHON_VARIABLE, PeerProcess, find_peer_python
from interlock.bench.report import print_table, write_json
from interlock.bench.session import without_repeats
from interlock.commands.bench import bench
from interlock.core.errors import ConfigError, InterlockError


def test_what_goes_on_is_shown_once() -> None:
    shown: list[str] = []
    say = without_repeats(shown.append)
    for what in ("loading", "loading", "ready", "loading"):
        say(what)
    assert shown == ["loading", "ready", "loading"]


def test_runs_alternate_and_the_first_of_each_is_not_counted() -> None:
    calls: list[tuple[str, int]] = []

    def run(name: str, number: int) -> float:
        calls.append((name, number))
        return float(number)

    samples = alternate(3, {"a": lambda number: run("a", number), "b": lambda number: run("b", number)})
    assert calls == [(name, number) for number in (-1, 0, 1, 2) for name in ("a", "b")]
    assert samples == {"a": (0.0, 1.0, 2.0), "b": (0.0, 1.0, 2.0)}


@pytest.mark.parametrize(
    ("sense", "bound", "met"), [("at least", 2.0, True), ("at least", 2.1, False), ("at most", 2.0, True), ("at most", 1.9, False)]
)
def test_a_promise_holds_for_the_ratio_of_medians(sense: str, bound: float, met: bool) -> None:
    figure = compare("x", "s", {"ours": (5.0, 4.0, 100.0), "peer": (2.5, 1.0, 9.0)}, bound=bound, sense=sense)  # type: ignore[arg-type]
    assert (figure.value, figure.peer_value, figure.ratio, figure.met) == (5.0, 2.5, 2.0, met)


def test_without_a_peer_a_ratio_promise_is_open_and_a_value_promise_is_not() -> None:
    assert compare("x", "s", {"ours": (1.0,)}, bound=2.0, sense="at most", bound_of="value").met is True
    assert compare("x", "s", {"ours": (3.0,)}, bound=2.0, sense="at most", bound_of="value").met is False
    assert compare("x", "s", {"ours": (3.0,)}, bound=2.0).met is None


def test_prompts_have_their_length_and_share_no_prefix() -> None:
    prompts = [prompt_token_ids(50, salt) for salt in range(-1, 20)]
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({tuple(prompt[:2]) for prompt in prompts}) == len(prompts)
    assert prompt_token_ids(50, 3) == prompt_token_ids(50, 3)


def test_the_report_has_every_run_and_the_table_every_figure(tmp_path: Path) -> None:
    figures = [compare("decode", "tokens/s", {"ours": (3.0, 2.0), "peer": (1.0, 2.0)}, bound=1.3, notes={"aside (ms)": 7.5})]
    write_json(tmp_path / "deep" / "report.json", figures, threads=2, rounds=2)
    report = json.loads((tmp_path / "deep" / "report.json").read_text())
    assert report["figures"][0]["samples"] == [3.0, 2.0]
    assert report["figures"][0]["peer_samples"] == [1.0, 2.0]
    assert report["figures"][0]["met"] is True
    assert report["machine"]["cpus"] >= 1
    text = io.StringIO()
    print_table(Console(file=text, width=100), figures, "llama.cpp")
    assert all(word in text.getvalue() for word in ("decode (tokens/s)", "2.5", "1.5", ">= 1.3 kept", "aside (ms)"))


def test_a_peer_python_that_is_not_there_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "python"))
    with pytest.raises(InterlockError, match="make bench-peers"):
        find_peer_python()
    monkeypatch.delenv(PYTHON_VARIABLE)
    monkeypatch.chdir(tmp_path)
    assert find_peer_python() is None


def test_a_python_of_the_peers_that_cannot_be_run_is_an_error_that_names_it(tmp_path):
    with pytest.raises(InterlockError, match=rf"{re.escape(repr(str(tmp_path)))} cannot be run.*{PYTHON_VARIABLE}"):
        PeerProcess(tmp_path, "model", 2)


def test_a_peer_that_has_ended_is_an_error_that_says_so_and_can_be_closed(tmp_path):
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\nexec <&-\necho '{"name": "short-lived", "version": "1"}'\nexit 3\n""")
    python.chmod(0o700)
    peer = PeerProcess(python, "model", 2)
    with pytest.raises(InterlockError, match="ended with status 3"):
        peer.request("decode", prompts=[[1]], num_tokens=1)
    peer.close()


@pytest.mark.parametrize("there", [False, True])
def test_a_report_that_may_not_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch, there):
    path = tmp_path / "report.json"
    if there:
        path.write_text("old")
    asked = []
    monkeypatch.setattr(os, "access", lambda *arguments: asked.append(arguments))
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))} cannot be written: this user may not write"):
        bench("decode", json=path)
    assert asked == [(path if there else tmp_path, os.W_OK)]


def a_busy_process():
    return crowded._busy_processes(1)


def the_other_process_of_transfer():
    return contextlib.closing(transfer_peer.Peer("bench", transfer_peer.PoolSize(num_layers=1, num_blocks=1), []))


@pytest.mark.parametrize("process", [a_busy_process, the_other_process_of_transfer])
def test_an_interrupt_from_the_terminal_does_not_reach_helping_processes_which_would_show_a_traceback(monkeypatch, process):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with process():
        assert [os.getpgid(helper.pid) for helper in started] == [helper.pid for helper in started]
    assert len(started) == 1
    assert started[0].returncode is not None
