"""Every limit and capacity of the engine, each with its reason.

Rules of this file: no queue, loop or mailbox anywhere has a bound that is not named here; channel capacities are
derived from budgets, so that a full mailbox is either the advertised refusal or an asserted bug.
"""

from __future__ import annotations

from typing import Literal

import msgspec

AT_LEAST_ONE = (
    "threads", "context_length", "kv_bytes", "running_max", "step_tokens_max", "queue_max", "queue_tokens_max",
    "prompts_max", "choices_max", "client_share_max", "default_max_tokens", "grammar_compilers", "applies_max",
    "grammar_token_ms",
)  # fmt: skip


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to open an engine. The defaults fit a small model on a small machine. Raises TypeError for a value of another
    kind, ValueError for a limit under 1: nothing would ever be served."""

    # what to load, and onto what
    model: str | None = None  # a GGUF file or a Hugging Face directory; None = the default model, fetched once
    model_id: str | None = None  # the name to serve it under; None = from the file
    model_aliases: tuple[str, ...] = ()
    device: Literal["auto", "cpu", "torch-cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    threads: int | None = None  # None = one per core
    context_length: int | None = None  # None = the model's own; never above it
    kv_bytes: int = 512 * 2**20  # KV pages; touched only as they fill

    # one step
    running_max: int = 64  # sequences in a step: above this, steps get slower faster than throughput grows
    step_tokens_max: int = 512  # rows of a step when nothing streams: prefill's best efficiency
    step_busy_ms: float = 120.0  # prefill beside running decodes stays near this: it bounds the gap between tokens

    # the door
    queue_max: int = 512  # requests waiting for a place, all tiers
    queue_tokens_max: int = 4_000_000  # prompt tokens (estimated from bytes before tokenizing) waiting
    prompts_max: int = 256  # prompts in one request
    choices_max: int = 1024  # prompts * n of one request
    client_share_max: int | None = None  # requests one client may have in flight; None = no limit
    priority_ageing_s: float = 30.0  # a default-tier request that waited so long counts as priority
    deadline_s: float | None = None  # default deadline of a request
    thread_tokenize_bytes: int = 16_384  # longer texts are tokenized in a worker thread
    default_max_tokens: int = 2048
    logprobs_max: int = 5

    # the cache
    prefix_cache: bool = True

    # constraints, drafts, thinking
    grammar_bytes_max: int = 256 * 1024
    grammar_compile_s: float = 5.0
    grammar_compilers: int = 2  # compilations at a time: the rest of the machine goes on serving
    grammars_kept: int = 128
    grammar_token_ms: float = 10.0  # a choice's grammar, on average a token: four times what the heaviest schemas take
    grammar_lenient: bool = False
    draft_tokens_max: int = 64  # draft rows a step, shared among the sequences that decode in it
    prompt_lookup: bool = False  # draft from the prompt for every request
    think_start: str | None = None  # think markers; None = the tokenizer's own <think>, </think> where it has them
    think_end: str | None = None

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            try:
                msgspec.convert(getattr(self, field.name), field.type)
            except msgspec.ValidationError:
                wanted = type(self).__annotations__[field.name]
                raise TypeError(f"{field.name}: wanted {wanted}, not {getattr(self, field.name)!r}") from None
        for name in AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is less than 1")

    @property
    def choices_running_max(self) -> int:
        """Sequences that batching may own at once: the running ones and as many admitted ahead, so that a step never
        waits for admission; one request's choices may exceed it only when it is alone."""
        return 2 * self.running_max

    applies_max: int = 4096  # requests that may ask for a place at the same instant

    @property
    def admission_mailbox(self) -> int:
        """The applies, an Enqueue per request in the queue, a Released per sequence of batching: nobody waits."""
        return self.applies_max + self.queue_max + self.choices_running_max + self.choices_max

    @property
    def batching_mailbox(self) -> int:
        """One Admitted per sequence, one stop notice per sequence, one step result: none of the senders ever waits."""
        return 2 * (self.choices_running_max + self.choices_max) + 2

    @property
    def execution_mailbox(self) -> int:
        """Batching keeps at most one step out, so a step never waits in the mailbox."""
        return 1

    @property
    def fanout_mailbox(self) -> int:
        """Openings and failures of every sequence, and two steps' tokens: fan-out never waits, so it always drains."""
        return self.batching_mailbox
