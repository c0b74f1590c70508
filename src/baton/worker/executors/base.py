"""What the model runner asks of what computes: one call that starts a step, one that takes its tokens.

    launch(N)   launch(N+1)              collect(N)   launch(N+2) ...
       |-- device computes N --|-- device computes N+1 --|

On a GPU launch returns at once, and the next step is launched before the tokens of the one before are known here: a row whose
token the host does not have yet is FEEDBACK (flat_batch.py). On a CPU launch computes, and steps_ahead is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from baton.kvpool.base import Pool
from baton.kvpool.layout import KVKind
from baton.models.config import ModelConfig
from baton.models.encoders.config import EncoderConfig
from baton.protocol.progress import ProgressWord
from baton.protocol.step import TokenLogprob
from baton.worker.arrays import Int64s
from baton.worker.failure import Failure
from baton.worker.flat_batch import FlatBatch
from baton.worker.sampling_batch import SamplingBatch

PromptLogprobs = tuple[int, tuple[TokenLogprob, ...]]
"""(position of the first, what the model thought of it and of those behind it)."""


@dataclass(slots=True)
class Sampled:
    """What came of a step. Everything by sequence: its place in the batch."""

    tokens: Int64s
    "[sequences]. Means nothing for one that is not due or has failed."
    failed: dict[int, Failure] = field(default_factory=dict)
    "Why, of each that cannot go on. One that is not due may fail too: what it left in the pool must not be used."
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    "Of those that asked."
    prompts: dict[int, PromptLogprobs] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)
    "Of prompts that asked for it and are complete (../pooling.py)."


class Launched(Protocol):
    """A step that is under way."""

    def wait(self) -> None:
        """Returns when collect() need not wait. May be called from another thread, and while other steps are launched."""
        ...


class Executor(Protocol):
    """A model with its weights, bound to the pool that holds its keys and values."""

    name: str
    arithmetic: str
    "Two that differ in it may round differently: neither goes on with the keys and values of the other."
    steps_ahead: int
    "How many steps may be launched and not collected."
    samples_on_host: bool
    "Penalties and the like are worked out on the host: such a sequence's next step is launched when its tokens are known."

    @property
    def config(self) -> ModelConfig | EncoderConfig: ...

    def prepare(self) -> None:
        """Whatever would make a first step slow. Called once, before the first step."""
        ...

    def launch(self, batch: FlatBatch, sampling: SamplingBatch) -> Launched:
        """Starts a step. The arrays of both are the caller's again when it returns."""
        ...

    def collect(self, launched: Launched) -> Sampled:
        """Of the oldest step that was launched and not collected; waits for it."""
        ...

    def report_progress(self, word: ProgressWord) -> None:
        """Advance the word from now on, while anything gets on."""
        ...

    def close(self) -> None:
        """Let go of the pool: nothing can be computed any more. Steps under way have ended when it returns."""
        ...


class PoolBinder(Protocol):
    def __call__(self, pool: Pool, context_tokens: int | None = None, /) -> Executor:
        """`context_tokens`: of the longest sequence that will be served. None: what fits the pool."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedExecutor:
    """A model whose weights are loaded. The pool comes after them: only then is it known what memory is left for it."""

    kv: KVKind
    "What it wants the pool to hold."
    with_pool: PoolBinder
