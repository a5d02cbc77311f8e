"""A file that cannot be served is refused with one sentence that names it and says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf as gguf_package
import numpy as np
import pytest
from llama_kit import WORDS, opened

from asking import some_tokens
from gguf_fixtures import Kind, make_gguf
from headstart.engine.llama import opening
from headstart.errors import HeadstartError, ModelError

Made = Callable[[Kind], Path]


@pytest.mark.parametrize("part", [0.0001, 0.005, 0.02, 0.5, 0.99])
def test_a_truncated_file_is_named_as_such(part: float, gguf: Made, tmp_path: Path) -> None:
    whole = gguf("llama").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: max(8, int(len(whole) * part))])
    with pytest.raises(ModelError) as raised:
        opened(cut, tmp_path)
    assert raised.value.message == (f"{cut} is not a whole GGUF file: it is truncated or damaged; fetch the file again")


def test_a_model_in_several_files_is_one_and_a_part_that_is_missing_is_told(gguf: Made, tmp_path: Path) -> None:
    make_gguf(tmp_path / "parts.gguf", tensors_in_a_part=20)
    first, second = sorted(tmp_path.glob("parts-*.gguf"))
    assert first.name == "parts-00001-of-00002.gguf"
    prompt = some_tokens(100, 1, WORDS)
    with opened(gguf("llama"), tmp_path) as whole, opened(first, tmp_path) as parts:
        assert np.array_equal(whole.next_logits(prompt), parts.next_logits(prompt))
    second.unlink()
    with pytest.raises(ModelError, match=r"parts-00002-of-00002\.gguf cannot be read: No such file or directory"):
        opened(first, tmp_path)


def test_an_unknown_architecture_is_named(gguf: Made, tmp_path: Path) -> None:
    strange = tmp_path / "strange.gguf"
    writer = gguf_package.GGUFWriter(strange, "perceptron")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError) as raised:
        opened(strange, tmp_path)
    assert raised.value.message == (
        f"{strange} has the architecture 'perceptron', which this libllama does not know; use a newer one"
    )


def test_a_file_larger_than_what_is_free_is_refused_before_it_is_read(
    gguf: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "free_bytes", lambda: 300_000)
    with pytest.raises(ModelError, match=r"llama.gguf is 1 MiB and 0 MiB of memory are free; take a smaller one"):
        opened(gguf("llama"), tmp_path)


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("weights, honestly")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        opened(tmp_path / "text.gguf", tmp_path)


def test_too_little_kv_memory_says_what_a_token_takes(gguf: Made, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"too little for llama\.gguf, of which a token takes 524 bytes"):
        opened(gguf("llama"), tmp_path, kv_memory="20000")


def test_a_library_that_is_not_there_is_told(gguf: Made, tmp_path: Path) -> None:
    with pytest.raises(HeadstartError, match="libllama cannot be loaded"):
        opened(gguf("llama"), tmp_path, libllama=str(tmp_path / "libllama.so"))
