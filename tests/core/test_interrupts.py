"""Interrupts at safe points. Signals are raised by the thread itself, so that each comes exactly where the test says."""

# ruff: noqa: PT012 (what is tested is when, in the course of a block, an exception comes)

import os
import signal
import threading

import pytest

from children import in_forked_child
from interlock.core import interrupts

SIGNALS = (signal.SIGINT, signal.SIGUSR1)


class HandlerError(Exception):
    """What a handler of a user raises (an alarm that times out, for one)."""


@pytest.fixture(autouse=True)
def handlers():
    """SIGINT as Python has it, a handler that raises for SIGUSR1; and afterwards as it was."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, raise_error)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not interrupts._MainThread.pending
    assert not interrupts._MainThread.notes


def raise_error(number, frame):
    raise HandlerError(number)


def test_a_signal_is_held_off_until_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        signal.raise_signal(signal.SIGINT)
        done.append("the rest")
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_it_comes_at_once():
    """The negative control."""
    done = []
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        done.append("the rest")
    assert done == []


@pytest.mark.parametrize("number", SIGNALS)
def test_a_safe_point_delivers_once_and_the_clean_up_after_it_is_left_alone(number):
    done = []
    with pytest.raises((KeyboardInterrupt, HandlerError)), interrupts.deferred():
        signal.raise_signal(number)
        try:
            with interrupts.deferred():
                done.append("first")
                interrupts.deliver()
                done.append("never")
        finally:
            signal.raise_signal(number)  # the user is impatient
            done.append("cleaned up")
    assert done == ["first", "cleaned up"]


def test_within_a_clean_up_safe_points_deliver_nothing_and_the_end_does():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        signal.raise_signal(signal.SIGINT)
        try:
            interrupts.deliver()
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
            interrupts.deliver()
            with interrupts.served():
                interrupts.deliver()
            done.append("cleaned up")
    assert done == ["cleaned up"]


def test_a_clean_up_that_waits_itself_may_be_interrupted_once_more():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        signal.raise_signal(signal.SIGINT)
        try:
            interrupts.deliver()
        finally:
            try:
                with interrupts.deferred():
                    signal.raise_signal(signal.SIGINT)
                    interrupts.deliver()
                    done.append("never")
            finally:
                interrupts.deliver()
                done.append("cleaned up")
    assert done == ["cleaned up"]


def test_the_end_of_an_inner_one_is_no_safe_point():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
        done.append("the rest")
    assert done == ["the rest"]


def test_in_code_that_may_wait_it_comes_at_once_and_what_follows_is_protected():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        try:
            with interrupts.served():
                signal.raise_signal(signal.SIGINT)
                done.append("never")
        finally:
            signal.raise_signal(signal.SIGINT)
            done.append("cleaned up")
    assert done == ["cleaned up"]


def test_what_was_noted_before_comes_before_code_that_may_wait():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        signal.raise_signal(signal.SIGINT)
        with interrupts.served():
            done.append("never")
    assert done == []


def test_served_by_itself_does_nothing():
    with pytest.raises(KeyboardInterrupt), interrupts.served():
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it was held off")


def test_a_handler_that_raises_nothing_is_called_once_for_signals_that_came_together():
    calls = []
    signal.signal(signal.SIGUSR1, lambda number, frame: calls.append((number, frame is not None)))
    with interrupts.deferred():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert calls == []
        interrupts.deliver()
        assert calls == [(signal.SIGUSR1, True)]
        signal.raise_signal(signal.SIGUSR1)
    assert calls == [(signal.SIGUSR1, True)] * 2


def test_of_two_handlers_that_raise_both_are_called():
    with pytest.raises((KeyboardInterrupt, HandlerError)) as caught, interrupts.deferred():
        for number in SIGNALS:
            signal.raise_signal(number)
        interrupts.deliver()
    assert {type(caught.value), type(caught.value.__context__)} == {KeyboardInterrupt, HandlerError}


def test_whoever_asks_can_tell_what_a_handler_raised():
    with interrupts.deferred():
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(HandlerError) as caught:
            interrupts.deliver()
        assert interrupts.caused(caught.value)
        assert not interrupts.caused(HandlerError())
    assert not interrupts.caused(HandlerError())


def test_a_handler_that_is_installed_inside_stays():
    def mine(number, frame):
        pytest.fail("not called")

    with interrupts.deferred():
        signal.signal(signal.SIGUSR1, mine)
    assert signal.getsignal(signal.SIGUSR1) is mine
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_is_installed_in_code_that_may_wait_is_held_off_behind_it_and_stays():
    calls = []
    with interrupts.deferred():
        with interrupts.served():
            signal.signal(signal.SIGUSR1, mine := lambda number, frame: calls.append(number))
        signal.raise_signal(signal.SIGUSR1)
        assert calls == []
    assert calls == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is mine


def test_code_that_puts_back_what_it_found_inside_breaks_nothing():
    with interrupts.deferred():
        found = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, found)
    with pytest.raises(HandlerError):
        signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(HandlerError), interrupts.deferred():
        signal.raise_signal(signal.SIGUSR1)


def test_default_and_ignored_signals_are_left_alone():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with interrupts.deferred():
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_in_another_thread_nothing_happens():
    seen = []

    def run():
        with interrupts.deferred(), interrupts.served():
            interrupts.deliver()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_another_thread_delivers_nothing():
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        signal.raise_signal(signal.SIGINT)
        thread = threading.Thread(target=interrupts.deliver)
        thread.start()
        thread.join()
        assert interrupts._MainThread.pending


def test_a_signal_that_comes_again_after_a_while_is_not_held_off(monkeypatch):
    monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", -1.0)
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        signal.raise_signal(signal.SIGINT)
        done.append("stuck")
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert done == ["stuck"]


def test_an_error_of_the_body_is_the_context_of_what_a_handler_raises():
    with pytest.raises(KeyboardInterrupt) as caught, interrupts.deferred():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_handlers_are_given_back_although_one_raises_meanwhile(monkeypatch):
    real = interrupts._signal.signal

    class Module:
        getsignal = interrupts._signal.getsignal

        @staticmethod
        def signal(number, handler):
            real(number, handler)
            if type(handler) is not interrupts._Note:
                signal.raise_signal(number)  # it comes right when its handler is back

    monkeypatch.setattr(interrupts, "_signal", Module)
    with pytest.raises((KeyboardInterrupt, HandlerError)), interrupts.deferred():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGUSR1) is raise_error


def test_nothing_that_was_noted_is_left_for_later_although_something_comes_right_before_its_delivery(monkeypatch):
    real, calls = interrupts._deliver, []

    def deliver():
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt  # at its first bytecode
        real()

    monkeypatch.setattr(interrupts, "_deliver", deliver)
    with pytest.raises((KeyboardInterrupt, HandlerError)), interrupts.deferred():
        signal.raise_signal(signal.SIGUSR1)
    assert not interrupts._MainThread.pending


def interrupt_in_child():
    answers = []
    thread = threading.Thread(target=lambda: answers.append(in_forked_child(lambda: signal.raise_signal(signal.SIGINT))))
    thread.start()
    thread.join()
    return answers


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_that_another_thread_forks_holds_nothing_off():
    with interrupts.deferred():
        assert interrupt_in_child() == ["KeyboardInterrupt: "]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_that_the_same_thread_forks_goes_on_holding_them_off():
    with interrupts.deferred():
        assert in_forked_child(lambda: signal.raise_signal(signal.SIGINT)) == "None"
