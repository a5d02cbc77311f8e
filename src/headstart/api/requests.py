"""What the engine is asked for an `Ask`: a request for each answer, as its caller may have it. Pure."""

from __future__ import annotations

from dataclasses import replace

from headstart.api.answering import Answering
from headstart.api.ask import Ask
from headstart.api.prompting import Prompt
from headstart.api.served import Served
from headstart.engine.base import GenerationRequest


def requests_of(
    ask: Ask,
    served: Served,
    prompt: Prompt,
    answering: Answering,
    *,
    id: str,
    deadline_s: float | None,
    longest_promise_s: float,
) -> list[GenerationRequest]:
    """Return a request for each answer; equal seeds would make all answers equal. Of what is kept no more than
    `longest_promise_s` is promised. Raises RequestError where the prompt does not fit."""
    first = served.request(id, prompt.ids, max_tokens=ask.max_tokens, sampling=ask.sampling, prompt_param=ask.prompt_param)
    caching = ask.caching
    # What is held to a form ends with it.
    ends: frozenset[int] = frozenset() if ask.ignore_eos and not answering.held else first.stop_ids
    first = replace(
        first,
        stop_ids=ends | ask.stop_ids,
        max_tokens=0 if caching.prewarm else first.max_tokens,  # what is only to be kept has no answer
        min_tokens=0 if caching.prewarm else ask.min_tokens,
        logprobs=ask.logprobs,
        salt=ask.caller.salt(ask.salt),
        shared_tokens=served.shared.tokens(prompt.ids),
        adapter=served.adapter_of(ask.model),
        priority=ask.caller.priority(ask.handling.priority),
        tenant=ask.caller.tenant,
        session=ask.caller.session(ask.handling.session) or ask.caller.session(caching.session),
        retention=ask.caller.retention if ask.handling.retention == "default" else ask.handling.retention,
        use_cache=prompt.keep_tokens != 0,
        keep_tokens=prompt.keep_tokens,
        memory_only=caching.memory_only,
        keep_s=min(caching.keep_s, longest_promise_s),
        progress=ask.progress,
        deadline_s=deadline_s,
        # Whoever may say where this worker connects to: a router, or whoever runs the server.
        prefill_at=ask.handling.prefill_at if (ask.caller.operator or ask.caller.routed) and ask.n == 1 else None,
        constraint=answering.constraint(),
    )
    if ask.n == 1:
        return [first]
    seed = first.sampling.seed
    return [
        replace(
            first,
            id=f"{id}-{index}",
            sampling=replace(first.sampling, seed=None if seed is None else seed + index),
            constraint=answering.constraint(),
        )
        for index in range(ask.n)
    ]
