"""What failed several times in a row is tried again by one at a time, after pauses that grow up to a bound."""

from __future__ import annotations

from headstart.policy.backing_off import BackingOff


def test_up_to_its_patience_failures_hold_nobody_back_and_a_success_forgets_them() -> None:
    trying = BackingOff(patience=3, least_s=1.0, most_s=60.0)
    for _ in range(5):
        trying.failed(0.0)
        trying.failed(0.0)
        assert trying.may(0.0)
        trying.came()


def test_then_one_at_a_time_tries_after_pauses_that_double_up_to_a_bound() -> None:
    trying = BackingOff(patience=3, least_s=1.0, most_s=60.0)
    now_s, pauses = 0.0, []
    for _ in range(3):
        trying.failed(now_s)
    for _ in range(8):
        pauses.append(trying.until_s - now_s)
        assert not trying.may(now_s)
        now_s = trying.until_s
        assert trying.may(now_s)
        trying.tries(now_s)
        assert not trying.may(now_s)  # another one, before it is known what came of it
        trying.failed(now_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    trying.came()
    assert trying.may(now_s)


def test_one_of_which_nothing_is_heard_keeps_others_back_no_longer_than_a_pause() -> None:
    trying = BackingOff(patience=1, least_s=1.0, most_s=60.0)
    trying.failed(0.0)
    trying.tries(1.0)
    assert not trying.may(1.5)
    assert trying.may(2.0)
