"""A device without arithmetic, for tests: its "model" is a hash of everything a row can see through its block table.

Why: whatever the actors do wrong with blocks, copies, chunks or slots (a stale block, a lost copy, a wrong position)
changes what a row sees, and with it the tokens; so does a wrong mask, mu, forced token or sampler's state. It honours
the step seam to the letter: copies first, then all writes, then all reads. ``expected`` computes the same answer from
the tokens alone, without blocks: the independent truth (sim_oracle.py knows the rest).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import ClassVar, cast

import numpy as np

from offbook.actors.events import ModelCard
from offbook.actors.execution import Executor
from offbook.actors.loading import Loaded
from offbook.actors.resolve import Limits
from offbook.actors.steps import Step, fill_masks
from offbook.actors.tokens import Tokenizer
from offbook.kernels.params import SamplingParams
from offbook.kernels.spec import ModelSpec, RopeSpec
from offbook.kernels.step import BLOCK_TOKENS, ERROR_EMPTY, SAMPLE, StepBatch, StepResult

VOCABULARY = 71
EOS, OTHER, THINK, END_THINK = 0, 63, 69, 70


def digest(tokens: Sequence[int], *extra: object) -> int:
    """A 64-bit hash of a token prefix and what else decides."""
    data = repr((list(tokens), extra)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def logprob_of(prefix: Sequence[int], token: int) -> float:
    """The made-up raw log-probability of a token after a prefix."""
    return -float(np.float32((digest(prefix, "lp", token) % 9973) / 1000.0))


def alternatives_of(prefix: Sequence[int], n: int) -> list[tuple[int, float]]:
    """The made-up best raw alternatives after a prefix, best first."""
    return [(digest(prefix, "top", t) % VOCABULARY, -t / 8) for t in range(n)]


def kept_of(prefix: Sequence[int], params: SamplingParams) -> int:
    """How many tokens the made-up filters leave."""
    return 1 if params.temperature == 0 else 1 + digest(prefix, "kept") % 50


def slot_state(params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """What penalties and biases know of a sequence."""
    if not params.uses_slot:
        return []
    return [len(params.logit_bias), *(t for t, _ in params.logit_bias), len(prompt), *prompt, *output]


def draw(
    prefix: Sequence[int], params: SamplingParams, counter: int, state: Sequence[int] = (), mu: float = 0.0
) -> int:
    """The made-up draw: of the prefix and the slot's state alone when greedy, else also of seed, choice and counter,
    and of mu under mirostat."""
    if params.temperature == 0:
        key = digest(prefix, "greedy", *state)
    elif params.mirostat_target is None:
        key = digest(prefix, params.seed, params.choice, counter, *state)
    else:
        key = digest(prefix, params.seed, params.choice, counter, *state, "mu", mu)
    token = key % (VOCABULARY + 9)  # special tokens come more often than others: much depends on them
    return token if token < VOCABULARY else (EOS, THINK, END_THINK)[token % 3]


def next_mu(mu: float, params: SamplingParams, token: int) -> float:
    """Mirostat's made-up memory after a token that was drawn (not forced)."""
    on = params.mirostat_target is not None and params.temperature > 0
    return mu + (token % 7 - 3) / 8 if on else mu


def expected(
    prompt: Sequence[int], params: SamplingParams, max_tokens: int, eos: frozenset[int] = frozenset({EOS})
) -> tuple[list[int], str]:
    """The lone cold answer, from the tokens alone."""
    tokens = list(prompt)
    for i in range(max_tokens):
        token = draw(tokens, params, i, slot_state(params, prompt, tokens[len(prompt) :]))
        tokens.append(token)
        if token in eos:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


class SimDevice:
    """See the module. ``fault`` is called with each batch before it runs, and may raise or change it."""

    name = "simulated"
    vocabulary_size = VOCABULARY
    weight_bytes = 0
    kv_bytes = 0

    def __init__(self, blocks: int = 64, slots: int = 64, context: int = 4096) -> None:
        self.context_length = context
        self.blocks_total = blocks
        self.slots_total = slots
        self.kv = np.full((blocks, BLOCK_TOKENS), -1, np.int64)
        self.slots: dict[int, list[int]] = {}
        self.fault: Callable[[StepBatch], None] | None = None
        self.rows_run = 0
        self.steps_run = 0
        self._prefixes: dict[int, list[int]] = {}

    def forward(self, batch: StepBatch) -> None:
        if self.fault is not None:
            self.fault(batch)
        self.steps_run += 1
        self.rows_run += len(batch.token_ids)
        for source, target in batch.copies.tolist():
            self.kv[target] = self.kv[source]
        for opening in batch.slot_opens:
            prompt, output = opening.prompt_ids.tolist(), opening.output_ids.tolist()
            self.slots[opening.slot] = slot_state(opening.params, prompt, output)
        for token, position, s in zip(batch.token_ids, batch.positions, batch.row_sequence, strict=True):
            block = batch.block_tables[s, position // BLOCK_TOKENS]
            self.kv[block, position % BLOCK_TOKENS] = token
        self._prefixes = {m: self._read(batch, m) for m in set(batch.logit_rows.tolist())}

    def _read(self, batch: StepBatch, row: int) -> list[int]:
        n = int(batch.positions[row]) + 1
        table = batch.block_tables[batch.row_sequence[row]]
        seen = self.kv[table[: -(-n // BLOCK_TOKENS)]].reshape(-1)[:n]
        return [int(t) for t in seen]

    def sample(self, batch: StepBatch, masks: np.ndarray[tuple[int, int], np.dtype[np.uint32]] | None) -> StepResult:
        result = blank(batch)
        for r, params in enumerate(batch.run_params):
            mu = float(batch.run_mu[r])
            for j, k in enumerate(range(batch.run_start[r], batch.run_start[r + 1])):
                prefix = self._prefixes[int(batch.logit_rows[k])]
                forced = int(batch.row_forced[k])
                token = forced if forced >= 0 else self._draw(batch, r, j, prefix, mu, masks)
                result.token[k] = token
                if token < 0:
                    result.error[k] = ERROR_EMPTY
                    break
                self._report(result, k, prefix, params, forced)
                if batch.run_kind[r] == SAMPLE:
                    mu = next_mu(mu, params, token) if forced < 0 else mu
                    if params.uses_slot:
                        self.slots[int(batch.run_slot[r])].append(token)
                    if token != batch.row_draft[k]:
                        break
            result.run_mu[r] = mu
        return result

    def _draw(
        self, batch: StepBatch, r: int, j: int, prefix: list[int], mu: float,
        masks: np.ndarray[tuple[int, int], np.dtype[np.uint32]] | None,
    ) -> int:  # fmt: skip
        params = batch.run_params[r]
        state = self.slots[int(batch.run_slot[r])] if params.uses_slot else []
        token = draw(prefix, params, int(batch.run_draw[r]) + j, state, mu)
        return self._allowed(token, masks, int(batch.row_mask[int(batch.run_start[r]) + j]))

    @staticmethod
    def _report(result: StepResult, k: int, prefix: list[int], params: SamplingParams, forced: int) -> None:
        result.logprob[k] = logprob_of(prefix, int(result.token[k]))
        greedy = forced >= 0 or params.temperature == 0
        result.sampling_logprob[k] = 0.0 if greedy else result.logprob[k] / 2
        result.kept[k] = kept = 1 if forced >= 0 else kept_of(prefix, params)
        if kept <= params.kept_ids_max:
            result.kept_ids[k] = np.arange(kept, dtype=np.int32)
        for t, (token, logprob) in enumerate(alternatives_of(prefix, params.top_logprobs)):
            result.top_ids[k, t], result.top_logprobs[k, t] = token, logprob

    @staticmethod
    def _allowed(token: int, masks: np.ndarray[tuple[int, int], np.dtype[np.uint32]] | None, row: int) -> int:
        if masks is None or row < 0:
            return token
        for step in range(VOCABULARY):
            t = (token + step) % VOCABULARY
            if masks[row, t >> 5] >> np.uint32(t & 31) & np.uint32(1):
                return t
        return -1

    def close(self) -> None:
        self.kv = np.empty((0, BLOCK_TOKENS), np.int64)


def blank(batch: StepBatch) -> StepResult:
    """A result with nothing in it yet."""
    k, r = len(batch.logit_rows), len(batch.run_params)
    top = max((p.top_logprobs for p in batch.run_params), default=0)
    return StepResult(
        step_id=batch.step_id, token=np.full(k, -1, np.int32), error=np.zeros(k, np.uint8),
        logprob=np.zeros(k, np.float32), sampling_logprob=np.zeros(k, np.float32), kept=np.zeros(k, np.int32),
        run_mu=np.zeros(r, np.float32), top_ids=np.full((k, top), -1, np.int32),
        top_logprobs=np.zeros((k, top), np.float32),
    )  # fmt: skip


def run_on(device: SimDevice, step: Step) -> StepResult:
    """One step on the simulated device, masks included."""
    masks = fill_masks(step, VOCABULARY)
    device.forward(step.batch)
    return device.sample(step.batch, masks)


class LetterTokenizer:
    """One token per character of an alphabet in which some JSON can be written, and three special tokens."""

    letters = '\0abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 {}":,'
    specials: ClassVar = {EOS: "<end>", THINK: "<think>", END_THINK: "</think>"}
    vocabulary_size = VOCABULARY
    eos_ids = (EOS,)
    bos_id: int | None = None

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        return [self.letters.index(c) if c in self.letters else OTHER for c in text]

    def token_bytes(self, token_id: int) -> bytes:
        return (self.specials.get(token_id) or self.letters[token_id]).encode()

    def is_special(self, token_id: int) -> bool:
        return token_id in self.specials

    def id_of(self, text: str) -> int | None:
        return next((i for i, special in self.specials.items() if special == text), None)


SPEC = ModelSpec(
    architecture="llama", name="simulated", n_layers=1, hidden=32, n_heads=1, n_kv_heads=1, head_dim=32, ffn=32,
    vocabulary_size=VOCABULARY, context_length=4096, norm_eps=1e-5, rope=RopeSpec(), tied_head=True, eos_ids=(EOS,),
)  # fmt: skip


def loaded_with(executor: Executor, device: SimDevice) -> Loaded:
    """What open_engine needs to run on an executor of our own."""
    context = min(device.context_length, device.blocks_total * BLOCK_TOKENS)
    card = ModelCard(id="simulated", aliases=(), context_length=context, vocabulary_size=VOCABULARY, created=0,
                     device=device.name, weight_bytes=0, kv_bytes=0, kv_tokens=device.blocks_total * BLOCK_TOKENS,
                     load_s=0.0)  # fmt: skip
    return Loaded(
        card=card,
        tokenizer=cast(Tokenizer, LetterTokenizer()),
        limits=Limits(context, VOCABULARY, {}),
        executor=executor,
        blocks_total=device.blocks_total,
        slots_total=device.slots_total,
    )
