"""With the noise of clients a request hits all the same; with the rule off it misses. A real tokenizer, engine, cache
and server; the model is tiny, since what it says is written for it here."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.serving import listening
from headstart.api.served import Served
from headstart.api.service import Service
from headstart.cli.opening import open_model
from headstart.config import CANONICAL_RULES, load_config
from headstart.engine.serving.ending import Endings
from headstart.render.answers import FAMILIES

pytestmark = pytest.mark.real_model

LONG = "You are an agent that helps with the handbook of a small town, and you answer in one short line. " * 4
HEADER = "x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch={};\n"
MARK = {"type": "ephemeral"}
# SmolLM2's template with what it lacks: tools, calls, reasoning in history, and parts where a client sends parts.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Server:
    """One engine behind two addresses: all rules, and all but one."""

    def __init__(self, served: Served, url: str, off: dict[str, str]) -> None:
        self.served = served
        self.url = url
        self.off = off

    def ask(self, url: str, body: dict[str, Any]) -> tuple[int, int, str, dict[str, Any], int]:
        """Return cached tokens, the most that can be, the rules that acted, the answer and the tokens stored now."""
        body = {"max_tokens": 1, "temperature": 0, **body}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        deadline = time.monotonic() + 60
        assert self.served.cache is not None
        while (counters := self.served.cache.statistics().counters).get("saves_done", 0) < counters.get("save_calls", 0):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        said = answer.json()
        usage = said["usage"]
        full = (usage["prompt_tokens"] - 1) // 64 * 64
        acted = answer.headers.get("x-headstart-canonical", "")
        stored = (usage["prompt_tokens"] + usage["completion_tokens"]) // 64 * 64
        return usage["prompt_cache_hit_tokens"], full, acted, said["choices"][0]["message"], stored


@pytest.fixture(scope="module")
def server(
    smollm2_folder: Path, tiny_model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("canonical")
    real = json.loads((smollm2_folder / "config.json").read_text())
    its = {name: real[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    model = shutil.copytree(tiny_model_folder("llama", **its), home / "model")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_folder / file, model / file)
    config = load_config(
        overrides={
            "model": str(model),
            "models_directory": home,
            "cache.directory": home / "kv",
            "cache.capacity": "1GiB",
            "cache.memory": "64MiB",
            "engine.kv_memory": "256MiB",
            "engine.context": 2048,
        }
    )
    served = open_model(config, on_progress=lambda stage, fraction: None)
    served.renderer._tokenizer.chat_template = served.renderer._writer.chat_template = TEMPLATE
    served = replace(served, answers=FAMILIES["hermes"])
    services: list[Service] = []

    def service(rules: tuple[str, ...]) -> Service:
        services.append(Service(canonical=rules))
        services[-1].ready(served)
        return services[-1]

    try:
        with ExitStack() as stack:
            url = stack.enter_context(listening(service(CANONICAL_RULES)))
            off = {
                rule: stack.enter_context(listening(service(tuple(one for one in CANONICAL_RULES if one != rule))))
                for rule in CANONICAL_RULES
            }
            yield Server(served, url, off)
    finally:
        served.engine.close()


def test_rules_that_need_no_memory(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "Looks. " * 20, "parameters": {"type": "object"}}}
    user = {"role": "user", "content": "Go on."}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "billing-header": (
            {"messages": [{"role": "system", "content": HEADER.format("fa690") + LONG}, user]},
            {"messages": [{"role": "system", "content": HEADER.format("65abc") + LONG}, user]},
        ),
        "cache-control": (
            {"messages": [{"role": "system", "content": LONG}, user], "tools": [{**tool, "cache_control": MARK}]},
            {"messages": [{"role": "system", "content": LONG}, user], "tools": [tool]},
        ),
        "text-parts": (
            {"messages": [{"role": "system", "content": [{"type": "text", "text": LONG}]}, user]},
            {"messages": [{"role": "system", "content": LONG}, user]},
        ),
    }
    for rule, (first, second) in cases.items():
        for url, hits in ((server.url, True), (server.off[rule], False)):
            salt = {"cache_salt": f"{rule} {hits}"}
            cold, _, acted, *_ = server.ask(url, first | salt)
            warm, full, *_ = server.ask(url, second | salt)
            assert cold == 0
            assert (rule in acted) is hits, rule
            assert full >= 64
            assert (warm == full) is hits, (rule, warm, full)


@pytest.fixture
def script(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], None]:
    """Have the next answers be these tokens, as a larger model would write them: computed and kept like any others."""
    deliver = Endings.deliver
    stop = min(server.served.renderer.stop_ids)

    def script(tokens: list[int]) -> None:
        def scripted(self: Any, sequence: Any, choice: Any) -> None:
            at = sequence.generated
            deliver(self, sequence, replace(choice, token=tokens[at] if at < len(tokens) else stop))

        monkeypatch.setattr(Endings, "deliver", scripted)

    return script


def test_generated_tokens(server: Server, script: Callable[[list[int]], None]) -> None:
    renderer = server.served.renderer
    text = "The town hall opens at nine in the morning on every day but Sunday, and the library at ten."
    tokens = [token for character in text for token in renderer.completion(character)]  # not as a tokenizer would
    assert len(tokens) == len(text) > 64
    script(tokens)
    for url, hits in ((server.url, True), (server.off["generated-tokens"], False)):
        first: Any = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 400, "cache_salt": f"generated {hits}"}
        _, _, _, said, stored = server.ask(url, first)
        assert said["content"] == text
        history = [*first["messages"], {"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
        cached, *_ = server.ask(url, first | {"messages": history})
        assert (cached == stored) is hits, (cached, stored)
        assert cached >= 64


TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}, "how": {}}}},
}


@pytest.mark.parametrize("rule", ["tool-arguments", "reasoning"])
def test_what_was_generated_comes_back_as_clients_write_it(
    server: Server, script: Callable[[list[int]], None], rule: str
) -> None:
    """A call whose JSON a client has read and written again, and an answer without the reasoning that led to it."""
    calls = rule == "tool-arguments"
    how = "as closely as you can, for the record of the town, and then once more from the other side of the road " * 2
    wrote = (
        f'<tool_call>\n{{"name":"look", "arguments":{{"how":"{how}","at":1}}}}\n</tool_call>'
        if calls
        else f"<think>\n{how}\n</think>\nYes."
    )
    script(server.served.renderer.completion(wrote))
    for url, hits in ((server.url, True), (server.off[rule], False)):
        first: Any = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 200, "cache_salt": f"{rule} {hits}"}
        first |= {"tools": [TOOL]} if calls else {}
        *_, message, stored = server.ask(url, first)
        if calls:
            call = message["tool_calls"][0]
            again = {"at": 1, "how": json.loads(call["function"]["arguments"])["how"]}
            call = {**call, "function": {**call["function"], "arguments": json.dumps(again)}}
            said = {"role": "assistant", "content": None, "tool_calls": [call]}
            follows = {"role": "tool", "tool_call_id": call["id"], "content": "seen"}
        else:
            assert message["content"] == "Yes."
            said, follows = {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}
        cached, _, acted, *_ = server.ask(url, first | {"messages": [*first["messages"], said, follows]})
        assert (rule in acted) is hits
        assert (cached == stored) is hits, (cached, stored)
