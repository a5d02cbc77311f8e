"""What the operator declares shared, from a file to the tokens that all tenants have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.serving import ByteRenderer
from headstart.api import shared as shared_module
from headstart.api.shared import SharedFile, SharedPrefixes, read_shared
from headstart.errors import ConfigError
from headstart.render import Renderer

RENDERER = cast(Renderer, ByteRenderer())


def test_messages_and_prompts_are_declared_as_requests_send_them(tmp_path: Path) -> None:
    file = tmp_path / "shared.jsonl"
    system = [{"role": "system", "content": "You serve everybody alike, in long sentences. " * 5}]
    file.write_text(json.dumps({"messages": system}) + "\n\n" + json.dumps({"prompt": "A text. " * 20}) + "\n")
    shared = SharedPrefixes(read_shared(file, RENDERER))
    asked = RENDERER.chat([*system, {"role": "user", "content": "What is new?"}])
    assert shared.tokens(asked) == len(RENDERER.chat(system)) // 64 * 64 > 0
    assert shared.tokens(list(b"A text. " * 30)) == 128
    assert shared.tokens(list(b"Another text. " * 30)) == 0
    assert not SharedPrefixes()


def test_a_file_that_changes_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_module, "LOOK_S", 0.0)
    file = tmp_path / "shared.jsonl"
    one, two = "One text for all. " * 10, "Another text for all. " * 10
    file.write_text(json.dumps({"prompt": one}))
    shared = SharedFile(file, RENDERER)
    assert (shared.tokens(list(one.encode())), shared.tokens(list(two.encode()))) == (128, 0)
    file.write_text("{")
    shared.look()
    assert shared.tokens(list(one.encode())) == 128
    assert "until then those hold that were read before" in caplog.text
    file.write_text(json.dumps({"prompt": two}))
    shared.look()
    assert (shared.tokens(list(one.encode())), shared.tokens(list(two.encode()))) == (0, 192)


@pytest.mark.parametrize("line", ["{", '{"messages": [], "prompt": ""}', "{}", '{"prompt": 5}', '{"promt": "x"}', "\xff"])
def test_a_line_that_declares_nothing_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "shared.jsonl"
    file.write_bytes(b'{"prompt": "x"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError, match=r"server\.shared_prefixes: .*line 2"):
        read_shared(file, RENDERER)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_shared(tmp_path / "none", RENDERER)


tokens = st.lists(st.integers(0, 1), max_size=200)


@given(st.lists(tokens, max_size=4), st.integers(0, 3), tokens)
def test_shared_is_the_longest_beginning_in_whole_blocks_that_is_declared(
    prefixes: list[list[int]], number: int, more: list[int]
) -> None:
    prompt = (prefixes[number][:150] if number < len(prefixes) else []) + more
    lengths = [0]
    for prefix in prefixes:
        common = next(
            (i for i, (a, b) in enumerate(zip(prefix, prompt, strict=False)) if a != b), min(len(prefix), len(prompt))
        )
        lengths.append(common // 64 * 64)
    assert SharedPrefixes(prefixes).tokens(prompt) == max(lengths)
