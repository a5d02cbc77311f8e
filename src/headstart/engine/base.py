"""What a server needs of an engine: submit a prompt of token ids, get tokens back one by one, abort, health, close.

An engine speaks token ids only; text belongs to `render`. Callbacks run on the engine's thread and must not block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from headstart.block.identity import Identity
from headstart.engine.speeds import Speeds
from headstart.transfer.load import KVView

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 is greedy. `top_p` in (0, 1], `top_k` 0 means all, `min_p` in [0, 1]: tokens with less than that share of
    the best one's probability are never drawn. Equal seeds give equal tokens for equal logits.

    Penalties act on logits before anything else and hold for greedy answers too. `presence_penalty` and `frequency_penalty`
    (-2 … 2, 0 is none) count the answer's tokens, as OpenAI defines them; `repetition_penalty` (above 0, 1 is none) divides
    positive and multiplies negative logits of every token of prompt and answer, as Hugging Face defines it. `logit_bias`:
    (token, what is added to its logit)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


class Constraint(Protocol):
    """What one answer may be, token by token. Asked and told on the engine's thread; one object an answer."""

    def allowed(self) -> bytes | None:
        """Return which tokens may come next, bit i % 8 of byte i // 8 for token i, none beyond; None: any.

        At least one may. Where the answer may end, tokens that end it are among them."""
        ...

    def accept(self, token: int) -> None:
        """Go on behind `token`, which was chosen. Raises ValueError for one that was not allowed."""
        ...


class KVSink(Protocol):
    """Who is told of a prompt's KV while it is computed. Told on the engine's thread, and must not block."""

    @property
    def done(self) -> bool:
        """Whether it holds no KV any more."""
        ...

    def computed(self, kv: CountedKV, *, layers: int, tokens: int, first_tokens: int = 0) -> None:
        """Of the first `tokens` tokens, the first `layers` layers that keep KV are in `kv`, which begins with token
        `first_tokens` of the prompt. What is to be read later needs a reference of its own."""
        ...

    def begins_at(self) -> int:
        """Return the token from which on anything is wanted yet."""
        ...


class CountedKV(KVView, Protocol):
    """KV that may be read for as long as a reference is held."""

    def retain(self) -> None: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`prompt`: u32 token ids, at least one. `stop_ids` end the answer and are not emitted; none of them is chosen before
    `min_tokens` others were. `salt` keeps tenants apart behind the first `shared_tokens` tokens, which all may have in common.
    With `max_tokens` 0 nothing is generated: the prompt is computed, as far as it is not stored, and kept; it ends with
    "length".

    `logprobs`: how many of the likeliest tokens are told beside each token's own log probability, None for nothing at all.
    `priority`: higher goes first, and may take the place of lower ones. `tenant` and `session`: who asks and in which
    conversation, by any name; tenants of one priority are served in fair turns. `retention`: the class in which what is
    computed is kept. `deadline_s`: seconds from submit after which the request ends with finish "abort". `adapter`: name of
    one of `EngineInfo.adapters`, None for the plain model. `constraint`: what the answer is held to, which goes before
    `min_tokens`.

    `use_cache` False: nothing stored is looked for, and nothing is kept. `keep_tokens`: only so many tokens from the start are
    kept, None for all. `memory_only`: nothing of it is written to a medium. `keep_s`: what is kept is promised for at least so
    long, whatever its class promises. `progress`: whether it is told how far the prompt is.

    `prefill_at`: addresses of a worker that computes the prompt and hands its KV over (`engine.handoff`); None: it is computed
    here. `continued`: tokens of the answer that were chosen and told elsewhere; they count as the answer's and are not told
    again. `sink`: who is told of the prompt's KV as it is computed."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    salt: str | bytes | None = None
    shared_tokens: int = 0
    use_cache: bool = True
    min_tokens: int = 0
    logprobs: int | None = None
    priority: int = 0
    tenant: str = ""
    session: str = ""
    retention: str = "default"
    deadline_s: float | None = None
    adapter: str | None = None
    keep_tokens: int | None = None
    keep_s: float = 0.0
    memory_only: bool = False
    progress: bool = False
    prefill_at: str | None = None
    continued: tuple[int, ...] = ()
    constraint: Constraint | None = field(default=None, compare=False)
    sink: KVSink | None = field(default=None, compare=False)


LoadChoice = Literal["miss", "load", "compute", "mixed"]


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """What was decided for a stored prefix before anything was read, and by which estimates, in seconds until the suffix may
    begin. "mixed": its beginning is computed while its end is loaded. None: nothing was measured yet, or nothing matched."""

    choice: LoadChoice
    matched_tokens: int = 0
    load_s: float | None = None
    compute_s: float | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """Where a request's time and tokens went. cached_tokens = cached_memory_tokens + cached_disk_tokens: verified and used.

    `written_tokens`: of the prompt, in whole pieces, not stored as far as was known and accepted for writing; with the cached
    ones never more than the prompt. `kept_output_tokens`: of the answer, accepted for writing. `taken`: whether its turn came;
    only then do the engine's counters have its prompt. `tiers_told`: False where the engine does not know what came from where;
    all that was cached then counts as from memory."""

    prompt_tokens: int
    completion_tokens: int
    cached_memory_tokens: int
    cached_disk_tokens: int
    bytes_read: int
    queue_s: float
    match_s: float
    load_s: float  # from the start of the load until its last byte was verified; overlaps computing
    first_token_s: float | None  # from submit to the first token
    total_s: float
    notes: tuple[str, ...] = field(default=())
    decision: LoadDecision = LoadDecision("miss")
    preemptions: int = 0  # how often it gave its place to another and went on later
    longest_gap_s: float = 0.0  # between two of its tokens
    written_tokens: int = 0
    kept_output_tokens: int = 0
    taken: bool = True
    tiers_told: bool = True

    @property
    def cached_tokens(self) -> int:
        return self.cached_memory_tokens + self.cached_disk_tokens


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logs of probabilities under the model's own distribution, before temperature, penalties and cuts: the token's,
    and those of the likeliest ones, best first."""

    token: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt is: of `total_tokens` so many are there, those that were found stored (`cached_tokens`) among them."""

    total_tokens: int
    cached_tokens: int
    processed_tokens: int
    seconds: float  # since the request's turn came


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One step of an answer. `token` is None on a last event that carries no token, and while the prompt is computed. The last
    event has `finish` and the receipt; `error` is one sentence when finish is "error". `logprobs`: where the request asked for
    them and a token is there. `so_far`: with the first of several tokens, the receipt as it is by then, in which what was
    cached is settled. `progress`: where the request asked for it and a part of its prompt was computed."""

    token: int | None
    finish: FinishReason | None = None
    receipt: Receipt | None = None
    error: str | None = None
    logprobs: Logprobs | None = None
    so_far: Receipt | None = None
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    model: str
    context_tokens: int
    vocabulary: int
    device: str
    dtype: str
    layers: int
    kv_bytes_per_token: int
    cache: str  # one sentence: what is cached where, or why not
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot for metrics: requests running and waiting, KV memory used and bound in bytes, and monotone counters
    (prompt_tokens, cached_memory_tokens, cached_disk_tokens, generated_tokens, steps, …)."""

    running: int
    waiting: int
    kv_used_bytes: int
    kv_capacity_bytes: int
    counters: dict[str, int]


class Engine(Protocol):
    info: EngineInfo

    @property
    def failed(self) -> str | None:
        """One sentence once the engine can serve nothing any more."""
        ...

    def submit(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        """Queue a request. Raises ContextLengthExceeded or RequestError at once for what can never run."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request soon, in any state; its last event has finish="abort". Unknown ids are ignored."""
        ...

    def load(self) -> EngineLoad: ...

    def close(self) -> None:
        """End every request, finish saving, free everything. Twice is fine."""
        ...


@runtime_checkable
class MeasuredEngine(Protocol):
    """What ours can be asked besides."""

    def measure_floor(self, prompt: Sequence[int], cached_tokens: int, rounds: int) -> list[float]:
        """Return, for each round, the seconds from a prompt to its first token when the KV of the first `cached_tokens`
        already lies in memory: what no cache can beat. For an engine that is otherwise idle."""
        ...

    def next_logits(self, tokens: Sequence[int]) -> Any:
        """Return float32 logits [vocabulary] for the token after `tokens`, computed without the cache: the reference."""
        ...


@runtime_checkable
class PacedEngine(Protocol):
    """What an engine that measures itself can be asked besides."""

    @property
    def speeds(self) -> Speeds:
        """How fast prompts are computed and tiers are read."""
        ...

    def waiting_tokens(self) -> int:
        """Return how many tokens of prompts are still to be computed, as far as is known."""
        ...


@runtime_checkable
class StoringEngine(Protocol):
    """What an engine with adapters over a prefix cache can be asked besides."""

    def identity(self, adapter: str | None) -> Identity | None:
        """Return the identity by which an adapter's prompts are stored; None: the cache's own."""
        ...


Role = Literal["both", "prefill", "decode"]


@runtime_checkable
class RoledEngine(Protocol):
    """An engine that hands prompts' KV to others, or takes it. `addresses`: where it is asked to compute prompts; `takes`:
    whether it can take what others computed."""

    role: Role
    addresses: tuple[str, ...]
    takes: bool
