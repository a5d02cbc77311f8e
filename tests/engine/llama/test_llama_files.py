"""A file that cannot be served is refused with one sentence that names it and says why."""

from __future__ import annotations

import subprocess
import sys
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
COMPUTE = """
import sys
from pathlib import Path
from headstart.engine.llama.binding import Library
from headstart.engine.llama.context import Context, Row
from headstart.engine.llama.weights import Weights
weights = Weights(Library(), Path(sys.argv[1]), gpu_layers=0)
context = Context(weights, cells=256, sequences=2, kv_type="f16", batch=64, ubatch=64, threads=1, flash=True)
context.compute([Row(1, [1, 2, 3], 0, wanted=True)])
"""


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


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("llama.block_count", 0, "n_layer_all > 0"),
        ("llama.expert_used_count", 3, "n_expert_used_max <= hparams.n_expert"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "eps >= 0.0f"),  # only when it is computed with
    ],
)
def test_a_file_over_which_libllama_ends_the_process_is_named_in_a_sentence(
    key: str, value: float, why: str, tmp_path: Path
) -> None:
    file = make_gguf(tmp_path / "hostile.gguf", says={key: value})
    done = subprocess.run([sys.executable, "-c", COMPUTE, file], capture_output=True, text=True, timeout=120, check=False)
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == ModelError.exit_code, done.stderr
    assert said.startswith(f"headstart: libllama ended this process over {file}: GGML_ASSERT(")
    assert why in said
    assert said.endswith("; fetch the file again or give another")


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("llama.attention.head_count", 3, "tensor 'blk.0.attn_q.weight' has wrong shape"),
        ("llama.embedding_length", 1 << 31, "tensor 'token_embd.weight' has wrong shape"),
        ("general.alignment", 3, "alignment 3 is not a power of 2"),
        ("tokenizer.ggml.model", "nonsense", "unknown tokenizer: 'nonsense'"),
    ],
)
def test_a_file_whose_metadata_cannot_be_true_is_refused(key: str, value: int | str, why: str, tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "hostile.gguf", says={key: value})
    with pytest.raises(ModelError) as raised:
        opened(file, tmp_path)
    assert raised.value.message.startswith(f"{file} cannot be loaded: {why}")
    assert raised.value.message.endswith("; fetch the file again or give another")


@pytest.mark.parametrize("kind", ["gemma3", "granitehybrid"])
def test_a_file_that_turns_none_of_a_heads_numbers_is_refused_where_libllama_would_compute_for_ever(
    kind: Kind, tmp_path: Path
) -> None:
    file = make_gguf(tmp_path / "hostile.gguf", kind, says={f"{kind}.rope.dimension_count": 0})
    with pytest.raises(ModelError, match=rf"cannot be loaded: its {kind}\.rope\.dimension_count is 0; fetch the file again"):
        opened(file, tmp_path)


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
