"""What an idle engine has brought to memory: of conversations that are due, once each time."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.engine import expecting
from headstart.engine.expecting import Conversations


class Asked:
    def __init__(self, answer: bool = True) -> None:
        self.answer = answer
        self.prefixes: list[tuple[list[int], str | None]] = []

    def __call__(self, tokens: Sequence[int], salt: str | bytes | None, shared_tokens: int, identity: object) -> bool:
        self.prefixes.append((list(tokens), salt))
        return self.answer


def go_on(them: Conversations, session: str, *tokens: int, at: float, salt: str | None = None) -> None:
    them.went_on(tenant="t", session=session, tokens=tokens, salt=salt, identity=None, started_s=at, ended_s=at)


def test_a_conversation_that_is_due_is_brought_once_with_all_that_was_said() -> None:
    asked = Asked()
    them = Conversations(asked)
    go_on(them, "a", 1, 2, at=0.0, salt="s")
    go_on(them, "a", 1, 2, 3, at=10.0, salt="s")
    assert not them.look_ahead(11.0)
    assert them.look_ahead(19.0)
    assert not them.look_ahead(20.0)
    assert asked.prefixes == [([1, 2, 3], "s")]
    go_on(them, "a", 1, 2, 3, 4, at=21.0, salt="s")
    assert them.look_ahead(30.0)
    assert asked.prefixes[1:] == [([1, 2, 3, 4], "s")]


def test_where_nothing_is_to_be_brought_the_next_one_is_looked_for() -> None:
    asked = Asked(answer=False)
    them = Conversations(asked)
    for session in ("a", "b"):
        go_on(them, session, 1, at=0.0)
        go_on(them, session, 1, at=10.0)
    assert not them.look_ahead(20.0)
    assert len(asked.prefixes) == 2


def test_so_many_conversations_and_tokens_are_remembered_the_latest_ones() -> None:
    asked = Asked()
    them = Conversations(asked)
    for number in range(expecting._MOST_SESSIONS + 5):
        go_on(them, str(number), number, at=0.0)
    assert len(them._sessions) == expecting._MOST_SESSIONS
    assert ("t", "0") not in them._sessions
    go_on(them, "long", *range(1000), at=0.0)
    assert them._tokens == sum(len(one.tokens) for one in them._sessions.values())
