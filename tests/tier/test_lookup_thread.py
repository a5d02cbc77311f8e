"""Whoever asks waits so long and no longer, and takes a busy machine for no silent medium."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Event
from types import SimpleNamespace

import pytest

from headstart.tier import lookup_thread
from headstart.tier.lookup_thread import Late, LookupThread, Patience

PATIENCE_S = 0.1


class Starved(Future[str]):
    """An answer to whoever is woken a second late each time; it comes with the `answers`-th waking, or never."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, answers: int | None) -> None:
        super().__init__()
        self.now_s, self.woken, self.answers = 1000.0, 0, answers
        monkeypatch.setattr(lookup_thread, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        assert timeout is not None
        self.now_s += timeout + 1.0
        self.woken += 1
        if self.woken == self.answers:
            self.set_result("there")
        raise TimeoutError


def test_what_passes_while_nobody_gets_a_processor_is_not_held_against_who_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Patience(PATIENCE_S).wait(Starved(monkeypatch, answers=20)) == "there"


def test_who_never_answers_is_waited_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    patience, silent = Patience(PATIENCE_S), Starved(monkeypatch, answers=None)
    with pytest.raises(TimeoutError):
        patience.wait(silent)
    assert 32 <= silent.woken <= 33
    woken = silent.woken
    with pytest.raises(TimeoutError):  # it is for all answers together
        patience.wait(silent)
    assert silent.woken == woken


def test_an_answer_that_is_there_needs_no_patience() -> None:
    future: Future[str] = Future()
    future.set_result("there")
    assert Patience(0.0).wait(future) == "there"


def test_an_error_of_the_work_is_raised_as_it_is() -> None:
    thread = LookupThread("errors")

    def fail() -> None:
        raise TimeoutError("the work's own")

    with pytest.raises(TimeoutError, match="own"):
        thread.ask(fail, patience_s=20.0)
    assert thread.stuck_s == 0.0
    assert thread.close(20.0)


def test_a_thread_is_stuck_from_when_somebody_gave_up_until_the_work_ends() -> None:
    thread, ends, undone = LookupThread("late"), Event(), list[str]()
    with pytest.raises(Late):
        thread.ask(lambda: "late" if ends.wait(20) else "never", patience_s=0.01, undo=undone.append)
    assert thread.stuck
    assert thread.stuck_s > 0.0
    ends.set()
    assert thread.hand_over(lambda: "next").result(20) == "next"
    assert undone == ["late"]
    assert thread.stuck_s == 0.0
    assert not thread.stuck
    assert thread.close(20.0)
