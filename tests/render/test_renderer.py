"""Prompts become the token ids that the model's own template and tokenizer give, or a sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import ContextLengthExceeded, ModelError, RequestError
from headstart.render import Renderer
from headstart.render.messages import normal_messages
from headstart.render.plain import _compiled, load_plain
from headstart.render.token_bytes import TokenBytes

USER = {"role": "user", "content": "Größe 😀?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_importing_the_room_imports_no_heavy_library() -> None:
    heavy = "{'transformers', 'tokenizers', 'torch', 'jinja2'}"
    program = f"import sys, headstart.render; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_chat_is_what_the_template_writes(renderer: Renderer) -> None:
    ids = renderer.chat([{"role": "system", "content": "Be brief."}, USER])
    want = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGröße 😀?<|im_end|>\n<|im_start|>assistant\n"
    assert ids == renderer.completion(want)
    assert renderer.decode(ids) == "system\nBe brief.\nuser\nGröße 😀?\nassistant\n"


def test_the_next_turn_begins_with_the_previous_prompt_and_its_answer(renderer: Renderer) -> None:
    """What makes a chat's prefix reusable."""
    prompt = renderer.chat([USER])
    answer = renderer.completion("Yes.")
    following = renderer.chat([USER, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}])
    assert following[: len(prompt) + len(answer)] == prompt + answer


def test_the_generation_prompt_can_be_left_out(renderer: Renderer) -> None:
    without = renderer.chat([USER], add_generation_prompt=False)
    assert renderer.chat([USER])[: len(without)] == without
    assert renderer.decode(renderer.chat([USER])[len(without) :]) == "assistant\n"


def test_tools_and_tool_calls_reach_the_template_as_objects(renderer: Renderer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "seen"}]
    text = renderer.decode(renderer.chat(messages, tools=[TOOL]))
    assert json.dumps(TOOL["function"]) in text
    assert '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>' in text


def test_a_long_prompt_is_never_cut(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "cutting")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert len(Renderer.load(folder).completion("word " * 1000)) > 1000


def test_token_ids_pass_unchanged(renderer: Renderer) -> None:
    assert renderer.completion([5, 1, 0]) == [5, 1, 0]


@pytest.mark.parametrize(("prompt", "param"), [("", "prompt"), ([], "prompt"), ([1, -1], "prompt[1]"), ([10**6], "prompt[0]")])
def test_a_prompt_that_is_no_prompt_is_refused(renderer: Renderer, prompt: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        renderer.completion(prompt)
    assert caught.value.param == param


@pytest.mark.parametrize("token", [True, "1", 1.0, None])
def test_what_is_not_an_integer_is_no_token(renderer: Renderer, token: Any) -> None:
    with pytest.raises(RequestError, match="a token id is 0 to"):
        renderer.completion([token])


def test_a_lone_surrogate_is_refused(renderer: Renderer) -> None:
    with pytest.raises(RequestError, match="no character") as caught:
        renderer.chat([{"role": "user", "content": "a\ud800"}])
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="no character"):
        renderer.completion("\udfff")


def untouchable(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tokenising fail the test: what is refused must be refused before."""

    class Untouchable:
        def encode_batch_fast(self, *_: object, **__: object) -> None:
            raise AssertionError("the text was tokenised")

    monkeypatch.setattr(renderer, "_backend", Untouchable())


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = Renderer.load(tokenizer_folder)
    text = "The cache keeps. " * 10_000
    assert len(renderer.completion(text)) > 5000
    assert len(renderer.completion(text, context_tokens=200_000)) > 5000
    untouchable(renderer, monkeypatch)
    with pytest.raises(ContextLengthExceeded, match=r"has at least [0-9]+ tokens, but the context is 1000 tokens") as caught:
        renderer.completion(text, context_tokens=1000)
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthExceeded) as caught:
        renderer.chat([{"role": "user", "content": text}], context_tokens=1000)
    assert caught.value.param == "messages"


def test_the_bound_on_a_text_never_exceeds_its_tokens(renderer: Renderer) -> None:
    for text in ("the cache keeps what was computed once", " " * 500, "日本語😀" * 50, "computed " * 99):
        tokens = len(renderer.completion(text))
        assert renderer.completion(text, context_tokens=tokens)


def test_more_ids_than_the_context_holds_are_refused_before_they_are_looked_at(renderer: Renderer) -> None:
    with pytest.raises(ContextLengthExceeded, match="has 11 tokens"):
        renderer.completion([-1] * 11, context_tokens=10)


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {
            "added_tokens": [
                {
                    "id": 0,
                    "content": "<|endoftext|>",
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": True,
                    "normalized": False,
                    "special": True,
                }
            ]
        },
    ],
)
def test_a_text_is_not_judged_by_its_length_where_tokens_swallow_text(
    tokenizer_folder: Path, tmp_path: Path, part: dict[str, Any]
) -> None:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "swallowing")
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | part
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = "<|endoftext|>" + " " * 10_000 + "a"
    assert len(Renderer.load(folder).completion(text, context_tokens=20)) > 0


def with_template(tokenizer_folder: Path, tmp_path: Path, template: str | None) -> Renderer:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "changed")
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Renderer.load(folder)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[9].content }}", "refuses these messages"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{% if %}", "refuses these messages"),
        (None, "no chat template; use /v1/completions"),
    ],
)
def test_a_template_that_refuses_becomes_a_sentence(
    tokenizer_folder: Path, tmp_path: Path, template: str | None, said: str
) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        with_template(tokenizer_folder, tmp_path, template).chat([USER])
    assert caught.value.param == "messages"


def test_tools_nested_too_deeply_for_the_template_are_a_sentence(renderer: Renderer) -> None:
    parameters: dict[str, Any] = {}
    for _ in range(5000):
        parameters = {"properties": parameters}
    deep = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    with pytest.raises(RequestError, match="nested too deeply") as caught:
        renderer.chat([USER], tools=[deep])
    assert caught.value.__cause__ is None


def test_stop_ids_come_from_tokenizer_configuration_and_template(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "model")
    assert Renderer.load(folder).stop_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    (folder / "config.json").write_text('{"eos_token_id": 7, "vocab_size": 600}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    changed = Renderer.load(folder)
    assert changed.stop_ids == {0, 2, 7, 8, 9}
    assert changed.vocabulary == 600


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", b'{"version": "1.0", "mod', "tokenizer.json is not valid JSON"),
        ("tokenizer.json", b"{}", "tokenizer.json describes no tokenizer"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "Nonsense"}}', "cannot be loaded"),
        (
            "tokenizer.json",
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [{"id": "x"}]}',
            "cannot be loaded",
        ),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not valid JSON"),
        ("generation_config.json", b"\xff", "generation_config.json is not valid JSON"),
    ],
)
def test_a_damaged_tokenizer_is_refused_with_the_file_named(
    tokenizer_folder: Path, tmp_path: Path, file: str, content: bytes | None, said: str
) -> None:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "damaged")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(ModelError, match=said):
        Renderer.load(folder)


@pytest.mark.real_model
def test_the_demo_model_s_prompt_is_what_its_makers_publish(smollm2_folder: Path) -> None:
    renderer = Renderer.load(smollm2_folder)
    ids = renderer.chat([{"role": "user", "content": "In  2024, 1234"}])
    assert ids[:3] == [1, 9690, 198]  # <|im_start|>, system, newline
    # Every digit is a token of its own, and the spaces before one are not split.
    assert [renderer.decode([token]) for token in renderer.completion("In  2024")] == ["In", "  ", "2", "0", "2", "4"]
    assert renderer.stop_ids == {0, 2}
    assert renderer.vocabulary == 49152


def test_every_kind_of_model_folder_renders(tiny_model_folder: Callable[..., Path]) -> None:
    renderer = Renderer.load(tiny_model_folder("qwen2"))
    assert renderer.decode(renderer.chat([USER])) == "user\nGröße 😀?\nassistant\n"
    assert renderer.vocabulary == 512


def test_the_bytes_of_all_tokens_joined_are_the_text_s(renderer: Renderer) -> None:
    for text in ("plain words, and more", "añ — 漢字 \U0001f600\n\ttabs", "\x00\x7f\xad"):
        ids = renderer.completion(text)
        assert b"".join(renderer.token_bytes(token) for token in ids) == text.encode()
    (end,) = [token for token in renderer.stop_ids if renderer.token_bytes(token) == b"<|im_end|>"]
    assert renderer.decode([end]) == ""
    assert renderer.token_bytes(10**6) == b""


def test_the_bytes_of_sentencepiece_tokens_are_spaces_bytes_and_text() -> None:
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.BPE({"\u2581the": 0, "<0xE2>": 1, "n": 2, "<0x": 3}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert [TokenBytes(backend)[token] for token in range(4)] == [b" the", b"\xe2", b"n", b"<0x"]


def test_tokens_of_any_other_tokenizer_are_as_they_decode() -> None:
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.WordPiece({"the": 0, "##n": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    assert TokenBytes(backend)[0] == b"the"


def _as_transformers_writes(renderer: Renderer, messages: list[Any], **more: Any) -> str:
    tokenizer = renderer._tokenizer
    assert type(tokenizer).__module__.startswith("transformers.")
    assert renderer._writer is not tokenizer
    normal = normal_messages(messages)
    return str(tokenizer.apply_chat_template(normal, add_generation_prompt=True, tokenize=False, **more))


def test_a_tokenizer_that_writes_in_a_way_of_its_own_writes_itself(tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    class Own(PreTrainedTokenizerFast):
        def apply_chat_template(self, conversation: Any, *_: Any, **__: Any) -> Any:
            return "its own"

    own = Own.from_pretrained(tokenizer_folder)
    assert Renderer(own, stop_ids=frozenset(), vocabulary=1).write([USER]) == "its own"
    several = AutoTokenizer.from_pretrained(tokenizer_folder)
    several.chat_template = {"default": "one", "tool_use": "another"}
    assert Renderer(several, stop_ids=frozenset(), vocabulary=1).write([USER], tools=[TOOL]) == "another"


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_without_transformers_a_renderer_is_the_same(kind: str, tiny_model_folder: Callable[..., Path]) -> None:
    folder = tiny_model_folder(kind)
    light, full = Renderer.load(folder, light=True), Renderer.load(folder)
    assert type(light._tokenizer).__name__ == "PlainTokenizer"
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
        {"role": "tool", "content": "<é>"},
    ]
    assert light.chat(messages, tools=[TOOL]) == full.chat(messages, tools=[TOOL])
    assert full.write(messages, tools=[TOOL]) == _as_transformers_writes(full, messages, tools=[TOOL])
    assert light.completion("Größe <|im_end|> 😀") == full.completion("Größe <|im_end|> 😀")
    assert (light.begin_id, light.stop_ids, light.vocabulary) == (full.begin_id, full.stop_ids, full.vocabulary)


def test_templates_see_the_same_without_transformers(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "template")
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{%- for m in messages %}\n"
        "    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
        "{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.name is defined }}|"
        "{% generation %}{{ m.content }}{% endgeneration %}\n"
        "{%- endfor %}{{ tools | tojson(indent=1) }}{{ strftime_now('%Y') }}{% set ns = namespace(x=1) %}{{ ns.x }}"
    )
    messages = [
        {"role": "system", "content": "x"},
        {"role": "assistant", "content": "a\n", "reasoning": "r", "name": None},
        {"role": "user", "content": " <&>'"},
    ]
    light, full = Renderer.load(folder, light=True), Renderer.load(folder)
    assert light.write(messages, tools=[TOOL]) == full.write(messages, tools=[TOOL])
    arguments: dict[str, Any] = {"enable_thinking": False, "documents": [{"title": "x"}]}
    for more in ({}, arguments):
        assert full.write(messages, tools=[TOOL], arguments=more) == _as_transformers_writes(
            full, messages, tools=[TOOL], **more
        )
    (folder / "chat_template.jinja").write_text("{{ raise_exception('not me') }}")
    for renderer in (Renderer.load(folder, light=True), Renderer.load(folder)):
        with pytest.raises(RequestError, match="not me"):
            renderer.write(messages)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["role", "content", "items", "get", "__class__", "name", "update"]), st.text(max_size=3)
        ),
        max_size=4,
    )
)
def test_templates_find_what_they_find_in_the_plain_sandbox(messages: list[dict[str, str]]) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = (
        "{% for m in messages %}{{ m.role }}|{{ m.content }}|{{ m.items is callable }}|{{ m.get('name') }}|{{ m['get'] }}|"
        "{{ m.nothing is defined }}|{{ m.__class__ is defined }}|{{ loop.first }}{{ loop.last }}{{ loop.index0 }}"
        "{{ loop.index }}{{ loop.length }}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}"
        "{{ loop.changed(m.role) }}{{ loop.__init__ is defined }}\n{% endfor %}"
    )
    want = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template).render(messages=messages)
    assert _compiled(template).render(messages=messages) == want


@pytest.mark.parametrize(
    "settings",
    [{"tokenizer_class": "LlamaTokenizer"}, {"add_bos_token": True}, {"eos_token": "<none>"}, {"bos_token": {"content": 7}}],
)
def test_what_transformers_would_change_is_left_to_it(settings: dict[str, Any], tokenizer_folder: Path) -> None:
    told = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    assert load_plain(tokenizer_folder, told) is not None
    assert load_plain(tokenizer_folder, {**told, **settings}) is None


def test_where_each_token_begins_is_told_over_all_parts_of_a_long_text(renderer: Renderer) -> None:
    text = "the cache keeps what was computed once and reads it back. Größe 😀 " * 200
    tokens = renderer.tokenise(text, special_tokens=False)
    assert tokens.ids == renderer.completion(text)
    for token, begin, end in list(zip(tokens.ids, tokens.begins, [*tokens.begins[1:], len(text)], strict=True))[-500:]:
        if end > begin:
            assert renderer.token_bytes(token) in text[begin:end].encode()


@pytest.mark.real_model
def test_the_demo_model_renders_the_same_without_transformers(smollm2_folder: Path) -> None:
    light, full = Renderer.load(smollm2_folder, light=True), Renderer.load(smollm2_folder)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Größe 😀? " + "the handbook says so " * 300},
    ]
    assert light.chat(messages) == full.chat(messages)
    assert full.write(messages) == _as_transformers_writes(full, messages)
    assert light.begin_id == full.begin_id
