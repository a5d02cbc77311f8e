"""What a request must be to run at all on an engine. Pure."""

from __future__ import annotations

from headstart.engine.base import EngineInfo, GenerationRequest
from headstart.errors import ContextLengthExceeded, RequestError


def refuse_impossible(request: GenerationRequest, info: EngineInfo) -> None:
    """Raise ContextLengthExceeded or RequestError, naming the parameter, for a request that can never run."""
    prompt, context = len(request.prompt), info.context_tokens
    sampling = request.sampling
    if prompt == 0:
        raise RequestError("the prompt has no tokens; send at least one", param="prompt")
    if prompt + 1 > context:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens and the context of {info.model} holds {context}, "
            "one of which must be left for the answer; shorten the prompt",
            prompt_tokens=prompt,
            context_tokens=context,
        )
    if not 0 <= min(request.prompt) <= max(request.prompt) < info.vocabulary:
        raise RequestError(f"token ids must lie in 0 … {info.vocabulary - 1}", param="prompt")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}; ask for at least 1", param="max_tokens")
    if not 0 <= sampling.temperature < float("inf"):
        raise RequestError(f"temperature is {sampling.temperature}; use 0 or more", param="temperature")
    if not 0 < sampling.top_p <= 1:
        raise RequestError(f"top_p is {sampling.top_p}; use more than 0 and at most 1", param="top_p")
    if sampling.top_k < 0:
        raise RequestError(f"top_k is {sampling.top_k}; use 0 (all) or more", param="top_k")
