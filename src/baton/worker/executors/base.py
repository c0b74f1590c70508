"""The interface of executors to the model runner: one call launches a step, another collects its tokens.

    launch(N)   launch(N+1)              collect(N)   launch(N+2) ...
       |-- device computes N --|-- device computes N+1 --|

On a GPU launch returns at once, and the next step is launched before the host has the tokens of the previous one: a row whose
token is not known yet is FEEDBACK (flat_batch.py). On a CPU launch computes, and steps_ahead is 1.
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
from baton.worker.drafters.passes import DraftPasses
from baton.worker.failure import Failure
from baton.worker.flat_batch import FlatBatch
from baton.worker.input_batch import InputBatch
from baton.worker.sampling_batch import SamplingBatch

PromptLogprobs = tuple[int, tuple[TokenLogprob, ...]]
"""Log-probabilities of a part of a prompt: position of the first token, and the values from there on."""


@dataclass(slots=True)
class Sampled:
    """Results of a step, by batch index of the sequence."""

    tokens: Int64s
    "[sequences] sampled tokens. Undefined for a sequence that is not due or has failed."
    failed: dict[int, Failure] = field(default_factory=dict)
    "The reason for each failed sequence. A sequence that is not due may fail too: its blocks in the pool must not be used."
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    "Log-probabilities, for sequences that requested them."
    accepted: dict[int, list[int]] = field(default_factory=dict)
    "Draft tokens that were accepted, before the sequence's entry of `tokens`. The sampling states have consumed them."
    consumed: set[int] = field(default_factory=set)
    "Sequences whose sampling state has consumed the entry of `tokens` too: the position behind it failed."
    accepted_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    "Log-probabilities of `accepted`, one by one, for sequences that requested them."
    prompts: dict[int, PromptLogprobs] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)
    "Embeddings, for complete prompts that requested them (../pooling.py)."


class Launched(Protocol):
    """A launched step."""

    def wait(self) -> None:
        """Returns when collect() would not wait. Callable from another thread, and while other steps are launched."""
        ...


class Executor(Protocol):
    """A model with its weights, bound to the pool that holds its keys and values."""

    name: str
    arithmetic: str
    "Name of the arithmetic. Executors with different names may round differently: neither can use the other's keys and values."
    steps_ahead: int
    "Maximum of launched and uncollected steps."
    draft_rows_max: int
    "Maximum of drafts in a batch that launch() accepts. 0: none."
    row_cost: float
    "Assumed cost of one more decoded row, as a share of a step with one row, until steps are measured."
    samples_on_host: bool
    """Whether penalties and the like are computed on the host: such a sequence's next step is launched when its tokens are
    known."""

    @property
    def config(self) -> ModelConfig | EncoderConfig: ...

    def prepare(self) -> None:
        """Does everything that would slow down the first step. Called once, before the first step."""
        ...

    def send_tables(self, sequences: InputBatch) -> None:
        """Copies changed block tables to the device, behind the steps that run. A call saves launch() the time, and changes
        nothing else."""
        ...

    def launch(self, batch: FlatBatch, sampling: SamplingBatch) -> Launched:
        """Starts a step. The caller may change the arrays of both arguments after the return."""
        ...

    def collect(self, launched: Launched) -> Sampled:
        """Results of the oldest launched and uncollected step; waits for it."""
        ...

    def report_progress(self, word: ProgressWord) -> None:
        """Sets the word to advance from now on, while there is progress."""
        ...

    def close(self) -> None:
        """Releases the pool: nothing can be computed afterwards. Waits for launched steps."""
        ...


class PoolBinder(Protocol):
    def __call__(self, pool: Pool, context_tokens: int | None = None, /) -> Executor:
        """Binds the model to a pool. `context_tokens`: maximum length of a served sequence. None: what fits the pool."""
        ...


class DraftBinder(Protocol):
    def __call__(self, pool: Pool, context_tokens: int, /) -> DraftPasses:
        """Binds the model to a pool, to draft for another one. `context_tokens`: of the main model's longest sequence."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedExecutor:
    """A model with loaded weights. The pool comes later, because its memory is known only then."""

    kv: KVKind
    "The KV type of the pool."
    with_pool: PoolBinder
    drafting: DraftBinder | None = None
    "None: the model cannot draft for another one."
