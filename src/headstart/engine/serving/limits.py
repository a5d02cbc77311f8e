"""What a request must be to run at all on an engine. Pure."""

from __future__ import annotations

from headstart.block.layout import encode_retention
from headstart.engine.base import EngineInfo, GenerationRequest, Sampling
from headstart.errors import ContextLengthExceeded, RequestError

LOGPROBS_MOST = 20
BIASES_MOST = 1024
KEEP_S_MOST = 366 * 86400


def refuse_impossible(request: GenerationRequest, info: EngineInfo) -> None:
    """Raise ContextLengthExceeded or RequestError, naming the parameter, for a request that can never run."""
    prompt, context = len(request.prompt), info.context_tokens
    if request.continued:
        _refuse_continued(request, info)
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
    if request.adapter is not None and request.adapter not in info.adapters:
        raise RequestError(f"there is no adapter {request.adapter!r} here", param="model")
    if request.max_tokens < 0:
        raise RequestError(
            f"max_tokens is {request.max_tokens}; ask for 1 or more, or 0 to compute the prompt", param="max_tokens"
        )
    if request.min_tokens < 0:
        raise RequestError(f"min_tokens is {request.min_tokens}; use 0 or more", param="min_tokens")
    if request.logprobs is not None and not 0 <= request.logprobs <= LOGPROBS_MOST:
        raise RequestError(f"logprobs is {request.logprobs}; at most {LOGPROBS_MOST} tokens are told", param="logprobs")
    if request.keep_tokens is not None and request.keep_tokens < 0:
        raise RequestError(f"keep_tokens is {request.keep_tokens}; use 0 or more", param="keep_tokens")
    if not 0 <= request.keep_s <= KEEP_S_MOST:
        raise RequestError(f"keep_s is {request.keep_s}; use 0 to {KEEP_S_MOST} seconds", param="keep_s")
    if request.deadline_s is not None and not request.deadline_s > 0:
        raise RequestError(f"deadline_s is {request.deadline_s}; use more than 0 seconds", param="deadline_s")
    try:
        encode_retention(request.retention)
    except ValueError as error:
        raise RequestError(f"{error}; use one of those in cache.retention", param="retention") from error
    refuse_wrong(request.sampling, info)


def _refuse_continued(request: GenerationRequest, info: EngineInfo) -> None:
    """Raise RequestError where nothing can follow what was chosen elsewhere."""
    if not 0 <= min(request.continued) <= max(request.continued) < info.vocabulary:
        raise RequestError(f"token ids must lie in 0 … {info.vocabulary - 1}", param="continued")
    if len(request.continued) >= min(request.max_tokens, info.context_tokens - len(request.prompt)):
        raise RequestError("the answer is as long as it may become already; nothing can follow it", param="continued")


def refuse_wrong(sampling: Sampling, info: EngineInfo) -> None:
    """Raise RequestError for a value that a setting cannot have. NaN is none."""
    if not 0 <= sampling.temperature < float("inf"):
        raise RequestError(f"temperature is {sampling.temperature}; use 0 or more", param="temperature")
    if not 0 < sampling.top_p <= 1:
        raise RequestError(f"top_p is {sampling.top_p}; use more than 0 and at most 1", param="top_p")
    if sampling.top_k < 0:
        raise RequestError(f"top_k is {sampling.top_k}; use 0 (all) or more", param="top_k")
    if not 0 <= sampling.min_p <= 1:
        raise RequestError(f"min_p is {sampling.min_p}; use 0 to 1", param="min_p")
    for param in ("presence_penalty", "frequency_penalty"):
        if not -2 <= (value := getattr(sampling, param)) <= 2:
            raise RequestError(f"{param} is {value}; use -2 to 2", param=param)
    if not 0.01 <= sampling.repetition_penalty <= 100:
        raise RequestError(f"repetition_penalty is {sampling.repetition_penalty}; use 0.01 to 100", param="repetition_penalty")
    if len(sampling.logit_bias) > BIASES_MOST:
        raise RequestError(
            f"logit_bias has {len(sampling.logit_bias)} tokens; at most {BIASES_MOST} can have one", param="logit_bias"
        )
    for token, added in sampling.logit_bias:
        if not 0 <= token < info.vocabulary:
            raise RequestError(f"logit_bias names token {token}; ids lie in 0 … {info.vocabulary - 1}", param="logit_bias")
        if not -100 <= added <= 100:
            raise RequestError(f"logit_bias of token {token} is {added}; use -100 to 100", param="logit_bias")
