"""What watches over the server sees: the names that dashboards ask for, and spans as a collector receives them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from api.serving import running
from headstart.api import tracing
from headstart.api.accounts import Accounts
from headstart.api.tracing import Tracing
from headstart.errors import MissingExtra
from headstart.testing.fake_engine import FakeEngine

ROOT = Path(__file__).parent.parent.parent


def test_every_metric_of_the_dashboard_exists() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana" / "headstart.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for one in expressions for name in re.findall(r"(?:vllm:|headstart_)[a-z_0-9]+", one)}
    assert len(asked) > 30
    with running(FakeEngine()) as server:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 3})
        shown = set(re.findall(r"^([a-z_0-9:]+)[{ ]", httpx.get(f"{server.url}/metrics").text, re.MULTILINE))
    told = set(re.findall(r"`((?:headstart_|vllm:)[a-z_0-9]+)", (ROOT / "docs" / "reference.md").read_text()))
    of_a_cache = (
        "headstart_cache_",
        "headstart_tier_",
        "headstart_engine_",
        "headstart_load_",
        "headstart_saves_",
        "vllm:prefix_cache",
        "vllm:external",
    )
    unknown = {
        name
        for name in asked - shown
        if not (name.startswith(of_a_cache) and re.sub(r"_(total|bucket|sum|count)$", "", name) in told)
    }
    assert unknown == set(), "the reference is held against the code; the rest has to be there"
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A collector of OTLP over HTTP: its address, and what it was sent."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
        finally:
            server.shutdown()
            thread.join()


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [value_of(one) for one in found.values] if kind == "array_value" else found


def test_a_request_is_a_span_of_its_callers_trace_with_its_stages_inside() -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with collector() as (endpoint, received):
        accounts = Accounts(on_ended=Tracing(endpoint))
        with running(FakeEngine(), accounts=accounts) as server:
            body = {"messages": [{"role": "user", "content": "x" * 100}], "max_tokens": 3}
            headers = {"traceparent": f"00-{trace}-{parent}-01", "x-headstart-session": "s"}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers)
            refused = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": "none"}, headers=headers)
        assert (answer.status_code, refused.status_code) == (200, 400)
    spans = [
        span for one in received for resource in one.resource_spans for scope in resource.scope_spans for span in scope.spans
    ]
    wholes = [span for span in spans if span.parent_span_id.hex() == parent]
    whole, failed = sorted(wholes, key=lambda span: span.start_time_unix_nano)
    assert {span.trace_id.hex() for span in spans} == {trace}
    said = {one.key: value_of(one.value) for one in whole.attributes}
    assert whole.name == "chat fake"
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.response.id"] == answer.json()["id"]
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert said["gen_ai.usage.input_tokens"] == 106
    assert said["gen_ai.usage.cache_read.input_tokens"] == 0
    assert said["gen_ai.usage.cache_write.input_tokens"] == 64
    assert said["gen_ai.usage.output_tokens"] == 3
    assert said["gen_ai.conversation.id"] == "s"
    assert "xxx" not in str(spans)
    stages = {span.name: span for span in spans if span.parent_span_id == whole.span_id}
    assert set(stages) == {f"headstart.{name}" for name in ("tokenise", "queue", "match", "prefill", "decode")}
    assert all(whole.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano for span in stages.values())
    assert failed.status.code == 2
    assert {one.key: value_of(one.value) for one in failed.attributes}["error.type"] == "400"


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(tracing.importlib, "import_module", missing)
    with pytest.raises(MissingExtra, match=r"headstart\[otel\]"):
        Tracing("http://127.0.0.1:1/v1/traces")
