"""LangChain and LiteLLM as they are: chat, streams, tools, formats, usage."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.serving import Running, running
from headstart.testing.fake_engine import FakeEngine

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'

# In a process of its own: these libraries warn, keep connections and change global settings as they please.
PROGRAM = """
import json, os, sys
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
url, found = sys.argv[1], {}
city = {"type": "object", "properties": {"city": {"type": "string"}}}
tool = {"type": "function", "function": {"name": "weather", "parameters": city}}
messages = [{"role": "user", "content": "Rom?"}]

from langchain_openai import ChatOpenAI
chat = ChatOpenAI(base_url=url + "/v1", api_key="none", model="any", max_retries=0, stream_usage=True)
answer = chat.bind_tools([tool]).invoke("Rom?")
found["langchain call"] = [answer.tool_calls[0]["name"], answer.tool_calls[0]["args"]]
found["langchain usage"] = answer.usage_metadata
whole = None
for chunk in chat.bind_tools([tool]).stream("Rom?"):
    whole = chunk if whole is None else whole + chunk
found["langchain stream"] = [whole.tool_calls[0]["name"], whole.tool_calls[0]["args"], whole.usage_metadata["output_tokens"]]
form = {"title": "place", "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
found["langchain format"] = sorted(chat.with_structured_output(form, method="json_schema").invoke("Rom?"))

import litellm
litellm.telemetry = False
for model, base in (("openai/any", url + "/v1"), ("anthropic/any", url)):
    said = litellm.completion(model=model, api_base=base, api_key="none", messages=messages, tools=[tool], max_tokens=400)
    call = said.choices[0].message.tool_calls[0].function
    usage = said.usage
    found[model] = [call.name, json.loads(call.arguments), said.choices[0].finish_reason, usage.prompt_tokens > 0]
    parts = litellm.completion(
        model=model, api_base=base, api_key="none", messages=messages, max_tokens=400, stream=True
    )
    found[model + " stream"] = "".join(part.choices[0].delta.content or "" for part in parts)
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    program = Path(tmp_path_factory.mktemp("clients")) / "program.py"
    program.write_text(PROGRAM)
    with running(FakeEngine(answer=CALL.encode()), family="hermes") as server:
        yield told(program, server)


def told(program: Path, server: Running) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), server.url], capture_output=True, text=True, timeout=240
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND")), None)
    assert line is not None, done.stderr[-4000:]
    found: dict[str, object] = json.loads(line.removeprefix("FOUND"))
    return found


def test_langchain_reads_calls_streams_formats_and_usage(found: dict[str, object]) -> None:
    assert found["langchain call"] == ["weather", {"city": "Rom"}]
    assert found["langchain stream"] == ["weather", {"city": "Rom"}, len(CALL)]
    assert found["langchain format"] == ["city"]
    usage = found["langchain usage"]
    assert isinstance(usage, dict)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_token_details"]["cache_read"] == 0


@pytest.mark.parametrize("model", ["openai/any", "anthropic/any"])
def test_litellm_reads_calls_and_streams_in_both_dialects(found: dict[str, object], model: str) -> None:
    assert found[model] == ["weather", {"city": "Rom"}, "tool_calls", True]
    assert found[model + " stream"] == CALL  # no tools, no calls
