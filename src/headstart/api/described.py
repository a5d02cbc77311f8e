"""The forms of what is answered, for the OpenAPI description. Dialects write the answers; tests hold them against these."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct):
    error: Error


class MessagesError(msgspec.Struct):
    type: str
    message: str


class MessagesErrorAnswer(msgspec.Struct):
    type: Literal["error"]
    error: MessagesError
    request_id: str | None


class CachedDetails(msgspec.Struct):
    cached_tokens: int
    cached_memory_tokens: int
    cached_disk_tokens: int
    cache_write_tokens: int


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int
    kept_tokens: int


class CompletionUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails
    completion_tokens_details: OutputDetails
    prompt_cache_hit_tokens: int
    prompt_cache_miss_tokens: int


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ToldLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ToldLogprob]
    refusal: None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: CompletionUsage


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: CachedDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[ToldLogprob]


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    status: str
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: str
    summary: list[Any]
    content: list[ReasoningText]


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseDiagnostics(msgspec.Struct):
    type: Literal["comparison_response_not_found", "cache_hit", "unavailable", "cache_miss"]
    reason: str | msgspec.UnsetType = msgspec.UNSET
    cache_missed_tokens: int | msgspec.UnsetType = msgspec.UNSET
    comparison_reusable_tokens: int | msgspec.UnsetType = msgspec.UNSET


class ResponseAnswer(msgspec.Struct):
    """What a request said of itself is repeated: `instructions` and all that follows it."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[MessageItem | ReasoningItem | CallItem]
    usage: ResponseUsage
    prompt_cache_diagnostics: ResponseDiagnostics | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float | None
    truncation: str


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class CacheCreation(msgspec.Struct):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(msgspec.Struct):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    cached_memory_tokens: int
    cached_disk_tokens: int
    kept_tokens: int


class MissReason(msgspec.Struct):
    type: str
    cache_missed_input_tokens: int | msgspec.UnsetType = msgspec.UNSET


class MessageDiagnostics(msgspec.Struct):
    cache_miss_reason: MissReason


class MessageAnswer(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    diagnostics: MessageDiagnostics | None


class CountAnswer(msgspec.Struct):
    input_tokens: int


class Rendered(msgspec.Struct):
    object: Literal["render"]
    model: str
    prompt: str
    prompt_token_ids: list[int]
    offsets: list[int] | None
    count: int
    max_model_len: int


class Tokenised(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenised(msgspec.Struct):
    prompt: str


class Health(msgspec.Struct):
    """Of a model that is loading its stage, of one that is served what it is."""

    status: Literal["ok", "loading", "failed", "closing"]
    error: str | msgspec.UnsetType = msgspec.UNSET
    stage: str | msgspec.UnsetType = msgspec.UNSET
    progress: float | msgspec.UnsetType | None = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET
    note: str | msgspec.UnsetType | None = msgspec.UNSET
    device: str | msgspec.UnsetType = msgspec.UNSET
    dtype: str | msgspec.UnsetType = msgspec.UNSET
    context_tokens: int | msgspec.UnsetType = msgspec.UNSET
    tiering: str | msgspec.UnsetType = msgspec.UNSET
    cache: str | msgspec.UnsetType = msgspec.UNSET


class Ready(msgspec.Struct):
    ready: bool
    status: str


class Version(msgspec.Struct):
    version: str


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class ReceiptUsage(msgspec.Struct):
    prompt: int
    cached_memory: int
    cached_disk: int
    computed: int
    written: int
    output: int
    kept_output: int


class Seconds(msgspec.Struct):
    tokenise: float
    queue: float
    match: float
    load: float
    compute: float | None
    first_token: float | None
    decode: float | None
    total: float


class Decision(msgspec.Struct):
    choice: Literal["miss", "load", "compute", "mixed"]
    matched_tokens: int
    estimated_load_s: float | None
    estimated_compute_s: float | None


class ReceiptAnswer(msgspec.Struct):
    id: str
    object: Literal["headstart.request"]
    ended: float
    model: str
    endpoint: str
    session: str
    # The retention class.
    class_: str = msgspec.field(name="class")
    finish: str
    status: int
    usage: ReceiptUsage
    seconds: Seconds | None
    load_decision: Decision
    bytes_read: int
    preemptions: int
    longest_gap_s: float
    notes: list[str]
    answers: int


class Reused(msgspec.Struct):
    """By tier, or together where it is not told from which."""

    memory: int | msgspec.UnsetType = msgspec.UNSET
    disk: int | msgspec.UnsetType = msgspec.UNSET
    untold: int | msgspec.UnsetType = msgspec.UNSET


class WhyAnswer(msgspec.Struct):
    id: str
    object: Literal["headstart.why"]
    asked: float
    session: str
    block_tokens: int
    exact: bool
    prompt_tokens: int
    reused: Reused
    compared_with: dict[str, Any] | None
    common_tokens: int
    lost: list[dict[str, Any]]
    parted: dict[str, Any] | None
    new_tokens: int
    notes: list[str]


class TokensAnswer(msgspec.Struct):
    id: str
    object: Literal["headstart.tokens"]
    prompt_token_ids: list[int]
