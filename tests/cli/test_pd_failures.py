"""What the parts of `interlock pd` do when another part fails or is slow, one by one."""

import queue
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from cli_support import TIMEOUT

from interlock.commands.pd_report import TransportRun, show_json, show_runs
from interlock.pd import pair as pair_module
from interlock.pd.messages import Channel, Failed, Finished, FromEngine, Generate, Heartbeat, ToEngine
from interlock.pd.pair import HandOff, PairRequest, PrefillDecodePair, run_single
from interlock.pd.worker import EngineServer

REQUEST = PairRequest("request-1", "hello", {"max_tokens": 8, "min_tokens": 5}, False)


def finished(request_id: str = "request-1") -> Finished:
    return Finished(request_id, [1, 2], [3], "x", "length", [[(3, -0.5)]], {"FULL": 1}, 0.1, 5, 0.0, 0)


class EngineThatAnswers:
    """Stands for an engine process: it says what it is told to, and keeps what it was sent."""

    name = "engine"
    alive = True

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.sent: list[Any] = []

    def send(self, message: Any, timeout: float = 0.0) -> None:
        self.sent.append(message)

    def receive(self, timeout: float = 0.0) -> Any:
        return self.answers.pop(0)

    def stop(self) -> None:
        pass

    def kill(self) -> None:
        pass


def pair_of(monkeypatch: pytest.MonkeyPatch, decode: EngineThatAnswers) -> PrefillDecodePair:
    """A pair of which only decode is there."""
    pair = object.__new__(PrefillDecodePair)
    pair.__dict__.update({"decode": decode, "_processes": [decode], "_stall_timeout": 1.0})
    monkeypatch.setattr(pair_module, "wait_readable", lambda processes, timeout: processes)
    return pair


def test_a_run_without_the_hand_off_is_for_one_token_whatever_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = EngineThatAnswers(Heartbeat(), finished())
    result = HandOff(REQUEST, decode=finished())
    pair_of(monkeypatch, decode).recompute(result)
    assert result.recompute == finished()
    (message,) = [message for message in decode.sent if isinstance(message, Generate)]
    assert (message.sampling["max_tokens"], message.sampling["min_tokens"]) == (1, 0)


def test_a_run_without_the_hand_off_that_fails_leaves_a_warning_and_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    result = HandOff(REQUEST, decode=finished())
    pair_of(monkeypatch, EngineThatAnswers(Failed("request-1", "no room"))).recompute(result)
    assert result.recompute is None
    assert result.decode == finished()
    assert result.warnings == ["the run without a hand-off failed: no room"]


def test_a_request_that_the_single_process_cannot_serve_leaves_a_warning_and_the_others_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    process = EngineThatAnswers(Failed("request-1", "no room"), Heartbeat(), finished("request-2"))
    monkeypatch.setattr(pair_module, "EngineProcess", lambda name, engine: process)
    monkeypatch.setattr(pair_module, "wait_ready", lambda process, on_progress: None)
    results = [HandOff(REQUEST, decode=finished()), HandOff(REQUEST, decode=finished("request-2")), HandOff(REQUEST, error="gone")]
    run_single({}, results, lambda name, stage, done, total: None)
    assert [result.single is not None for result in results] == [False, True, False]
    assert results[0].warnings == ["the single process could not serve it: no room"]
    assert results[1].identical


def test_no_single_process_is_started_when_nothing_is_left_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_module, "EngineProcess", lambda name, engine: pytest.fail("a process was started"))
    run_single({}, [HandOff(REQUEST, error="gone")], lambda name, stage, done, total: None)


def test_a_result_that_could_not_be_compared_is_neither_called_equal_nor_different(capsys: pytest.CaptureFixture[str]) -> None:
    run = TransportRun("shared_memory", 3, [HandOff(REQUEST, finished(), finished()), HandOff(REQUEST, decode=finished())])
    show_runs([run], True)
    show_json([run])
    out = capsys.readouterr().out
    assert "not compared" in out
    assert "differ" not in out
    assert "1 of 3 requests went through both processes, 1 through decode alone" in out
    assert '"tokens_equal_to_single_process": null' in out


class StepEndedError(Exception):
    """Ends the server of a test."""


def test_an_engine_beats_while_it_is_in_the_middle_of_a_step() -> None:
    beaten = threading.Event()

    def step() -> None:
        assert beaten.wait(TIMEOUT), "no heartbeat came during the step"
        raise StepEndedError

    core = SimpleNamespace(
        has_work=True,
        has_unfinished_requests=True,
        num_scheduled_tokens=1,
        tokenizer=None,
        make_request=lambda request_id, prompt, params: None,
        add_request=lambda request: None,
        step=step,
    )
    here, there = socket.socketpair()
    parent = Channel(here, FromEngine)
    listener = threading.Thread(target=lambda: (parent.receive(TIMEOUT), beaten.set()))
    listener.start()
    inbox: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
    inbox.put((0.0, Generate("r", [1], {})))
    llm: Any = SimpleNamespace(core=core)
    with pytest.raises(StepEndedError):
        EngineServer(llm, Channel(there, ToEngine), inbox).serve()
    listener.join()
    parent.close()
    there.close()
