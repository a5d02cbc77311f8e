"""What is remembered stays within its bound, whoever fills it, and is what was put there last."""

from __future__ import annotations

import random

from headstart.render.remembering import Remembered


def _filled(most_bytes: int) -> Remembered[int, str]:
    return Remembered(most_bytes, nbytes=lambda key, value: len(value))


def test_a_value_is_what_was_put_last_or_is_gone_and_the_bound_holds() -> None:
    draw = random.Random(3)
    held, model = _filled(50_000), dict[tuple[str, int], str]()
    for _ in range(3000):
        owner, key = draw.choice("abcdefgh"), draw.randrange(30)
        if draw.random() < 0.5:
            model[owner, key] = "x" * draw.randrange(2000)
            held.put(owner, {key: model[owner, key]})
        found = held.get(owner, [key])[0]
        assert found is None or found == model[owner, key]
        assert held.nbytes <= 50_000
        assert held.nbytes == 1024 * held.owners + sum(
            len(value) for name in "abcdefgh" for value in held.get(name, range(30)) if value is not None
        )
        assert len(held._by_size) <= 2 * held.owners + 65


def test_who_has_little_keeps_it_while_another_fills_the_memory() -> None:
    held = _filled(20_000)
    held.put("small", {1: "x" * 1000})
    for key in range(1000):
        held.put("large", {key: "x" * 1000})
    assert held.get("small", [1])[0] is not None
    assert held.get("large", [0, 999]) == [None, "x" * 1000]


def test_owners_that_come_once_are_forgotten_and_what_is_too_large_is_not_held() -> None:
    held = _filled(20_000)
    for number in range(1000):
        held.put(str(number), {1: "x"})
    assert held.owners < 20
    held.put("large", {1: "x" * 30_000})
    assert held.get("large", [1]) == [None]
    assert held.nbytes <= 20_000
    held.put("none", {})
    assert held.nbytes <= 20_000
