"""Errors travel: between processes, through copies, with everything they know."""

from __future__ import annotations

import copy
import pickle

import pytest

from headstart.errors import ContextLengthExceeded, HeadstartError, ModelError, RequestError

ERRORS = [
    HeadstartError("it broke; mend it", place="here"),
    ModelError("no model", path="m"),
    RequestError("n is wrong", param="n"),
    ContextLengthExceeded("too long", prompt_tokens=9, context_tokens=8, param="prompt"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_and_copying(error: HeadstartError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):  # noqa: S301 - our own bytes
        assert type(again) is type(error)
        assert (str(again), again.message, again.facts) == (str(error), error.message, error.facts)


def test_a_prompt_that_is_too_long_names_the_parameter_it_came_in() -> None:
    assert ContextLengthExceeded("too long", prompt_tokens=9, context_tokens=8).param == "messages"
    assert ERRORS[-1].param == "prompt"
