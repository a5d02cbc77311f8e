"""Traces: a span for each request by OpenTelemetry's GenAI conventions, sent by OTLP over HTTP, its stages inside.

    chat MODEL ── queue │ match │ prefill (load inside) │ decode

A request's span is made when it has ended, with the times that its receipt tells. No text of prompts or answers is in it.
"""

from __future__ import annotations

import importlib
from threading import Thread
from typing import TYPE_CHECKING, Any

from headstart import __version__
from headstart.api.receipts import Times
from headstart.errors import MissingExtra
from headstart.ledger.entry import Entry

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from headstart.api.accounts import Account

_OPERATIONS = {"/v1/completions": "text_completion"}
_NS = 1_000_000_000
_SEND_S = 5  # that sending one batch may take, tries included
_CLOSE_S = 3.0


class Tracing:
    """Told of every request (`Accounts.on_ended`). `endpoint`: where traces go, such as http://127.0.0.1:4318/v1/traces. Sends
    behind the caller, at most a few thousand spans late, and drops what a collector does not take. Raises MissingExtra."""

    def __init__(self, endpoint: str, *, exporter: SpanExporter | None = None) -> None:
        try:
            trace, sdk, export, resources, propagation = (
                importlib.import_module(f"opentelemetry.{name}")
                for name in ("trace", "sdk.trace", "sdk.trace.export", "sdk.resources", "trace.propagation.tracecontext")
            )
            if exporter is None:
                otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
                exporter = otlp.OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_S)
        except ImportError as error:
            raise MissingExtra("traces need OpenTelemetry; pip install 'headstart[otel]'", extra="otel") from error
        self._exporter = exporter
        self._trace: Any = trace
        self._propagator: Any = propagation.TraceContextTextMapPropagator()
        resource = resources.Resource.create({"service.name": "headstart", "service.version": __version__})
        self._provider: Any = sdk.TracerProvider(resource=resource)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer: Any = self._provider.get_tracer("headstart", __version__)

    def __call__(self, account: Account, entry: Entry, times: Times | None) -> None:
        """Tell of a request that has ended."""
        carrier = {name: account.headers.get(name, "") for name in ("traceparent", "tracestate") if name in account.headers}
        begun_ns = int(account.arrived * _NS)
        span = self._tracer.start_span(
            f"{_OPERATIONS.get(entry.endpoint, 'chat')} {entry.model}".rstrip(),
            context=self._propagator.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            start_time=begun_ns,
            attributes=_attributes(account, entry, times),
        )
        if entry.finish in ("error", "refused") or entry.status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
            span.set_attribute("error.type", str(entry.status))
        if times is not None:
            inside = self._trace.set_span_in_context(span)
            for name, first_s, seconds in _stages(times):
                start_ns = begun_ns + int(first_s * _NS)
                stage = self._tracer.start_span(f"headstart.{name}", context=inside, start_time=start_ns)
                stage.end(end_time=start_ns + int(seconds * _NS))
        span.end(end_time=begun_ns + int(max(entry.total_s, 0.0 if times is None else times.total) * _NS))

    def close(self) -> None:
        """Send what waits, and end the sender. A collector that is not there holds nobody up for longer than some seconds."""
        ending = Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)
        if ending.is_alive():
            self._exporter.shutdown()


def _stages(times: Times) -> list[tuple[str, float, float]]:
    """Return name, beginning and length of each stage, in seconds from the request's arrival."""
    stages = [("tokenise", 0.0, times.tokenise), ("queue", times.tokenise, times.queue)]
    ready_s = times.tokenise + times.queue
    stages.append(("match", ready_s, times.match))
    if times.load:
        stages.append(("load", ready_s + times.match, times.load))
    if times.compute is not None and times.first_token is not None and times.decode is not None:
        stages += [("prefill", ready_s + times.match, times.compute), ("decode", times.first_token, times.decode)]
    return stages


def _attributes(account: Account, entry: Entry, times: Times | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATIONS.get(entry.endpoint, "chat"),
        "gen_ai.provider.name": "headstart",
        "gen_ai.request.model": entry.model,
        "gen_ai.response.id": entry.id,
        "gen_ai.response.model": entry.model,
        "gen_ai.response.finish_reasons": [entry.finish],
        "gen_ai.usage.input_tokens": entry.prompt,  # what was cached included
        "gen_ai.usage.cache_read.input_tokens": entry.cached_memory + entry.cached_disk,
        "gen_ai.usage.cache_write.input_tokens": entry.written,
        "gen_ai.usage.output_tokens": entry.output,
        "http.response.status_code": entry.status,
        "url.path": entry.endpoint,
        "headstart.cached_memory_tokens": entry.cached_memory,
        "headstart.cached_disk_tokens": entry.cached_disk,
        "headstart.tenant": entry.tenant,
        "headstart.key": entry.key,
        "headstart.class": entry.retention,
    }
    if entry.session:
        found["gen_ai.conversation.id"] = entry.session
    if account.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = account.max_tokens
    if entry.answers > 1:
        found["gen_ai.request.choice.count"] = entry.answers
    if times is not None and times.first_token is not None:
        found["gen_ai.response.time_to_first_chunk"] = times.first_token
    return found
