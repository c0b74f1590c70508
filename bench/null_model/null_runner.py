"""The real runner on a forward pass that computes nothing: valid logits for every plan, after a fixed amount of work.

The work is hashing: it needs no Python lock, so `threads` threads can do it as a kernel's threads would, and it is an amount
and not a time, so that whoever takes a core from it makes the step longer.

What it should be is JSON in $BATON_NULL_MODEL, which only this file reads:

step_bytes   hashed by each thread in a step; 0: nothing
threads      that do it
notes        file for the times of all steps, written on SIGUSR1 (null_worker.py)
"""

from __future__ import annotations

import json
import os
from array import array
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import numpy as np

from baton.config import WorkerConfig
from baton.kvpool.layout import KVKind
from baton.kvpool.pool import KVPool
from baton.models.config import ModelConfig, RopeConfig
from baton.protocol.progress import ProgressWord
from baton.protocol.request import OPENAI_SAMPLING
from baton.worker.arrays import Floats, Int64s
from baton.worker.draws import Draws, choose
from baton.worker.executors.stepwise import Stepwise
from baton.worker.flat_batch import FlatBatch
from baton.worker.kv_layout import kv_layout
from baton.worker.model_runner import ModelRunner
from baton.worker.token_masks import Masks
from baton.worker.weights_digest import Digest

ORDERS: dict[str, Any] = json.loads(os.environ.get("BATON_NULL_MODEL", "{}"))
BLOCKS = 8192
MODEL = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    layers=1,
    hidden_size=576,
    heads=1,
    kv_heads=1,
    head_dim=2,
    intermediate_size=2,
    rope=RopeConfig(theta=10000.0),
    norm_eps=1e-5,
    tied_embeddings=False,
    context_tokens_max=8192,
)
"""As wide as SmolLM2 where the runner looks; its keys and values take no room."""


class Notes:
    """One row a step: when the plan was asked for, when it was there, and the CPU time of the work, of all threads."""

    def __init__(self) -> None:
        self.asked, self.got, self.worked = array("d"), array("d"), array("d")

    def save(self) -> None:
        """Whole or not at all: someone waits for the file."""
        rows = {"asked": list(self.asked), "got": list(self.got), "worked": list(self.worked)}
        written = Path(ORDERS["notes"] + ".new")
        written.write_text(json.dumps(rows))
        written.rename(ORDERS["notes"])


class NullForward:
    name = arithmetic = "null"
    config = MODEL

    def __init__(self, slots: int, notes: Notes) -> None:
        self._notes = notes
        self._hidden: Floats = np.zeros((0, MODEL.hidden_size), np.float32)
        self._logits: Floats = np.zeros((slots, MODEL.vocab_size), np.float32)
        self._likely: Any = (0, 0)
        self._work = bytes(ORDERS.get("step_bytes", 0))
        self._helpers = ORDERS.get("threads", 1) - 1
        self._threads = ThreadPoolExecutor(max(1, self._helpers))

    def hidden(self, flat: FlatBatch) -> Floats:
        self._compute()
        if len(flat.token_ids) > len(self._hidden):
            self._hidden = np.zeros((len(flat.token_ids), MODEL.hidden_size), np.float32)
        return self._hidden[: len(flat.token_ids)]

    def logits(self, hidden: Floats) -> Floats:
        """One token a row stands out, another one in every step."""
        self._logits[self._likely] = 0.0
        tokens = 300 + (len(self._notes.worked) * 7 + np.arange(len(hidden))) % 40_000
        self._likely = np.arange(len(hidden)), tokens
        self._logits[self._likely] = 1.0
        return self._logits[: len(hidden)]

    def likeliest(self, hidden: Floats, masks: Masks | None = None) -> Int64s:
        return 300 + (len(self._notes.worked) * 7 + np.arange(len(hidden), dtype=np.int64)) % 40_000

    def choose(self, logits: Floats, draws: Draws, masks: Masks | None = None) -> Int64s:
        return choose(logits, draws, masks)

    def report_progress(self, word: ProgressWord) -> None:
        pass

    def close(self) -> None:
        self._threads.shutdown()

    def _compute(self) -> None:
        begin = process_time()
        if self._work:
            helping = [self._threads.submit(sha256, self._work) for _ in range(self._helpers)]
            sha256(self._work)
            for helper in helping:
                helper.result()
        self._notes.worked.append(process_time() - begin)


class NullRunner(ModelRunner):
    def __init__(self, config: WorkerConfig) -> None:
        self.notes = Notes()
        pool = KVPool.create(kv_layout(MODEL, config.block_size, KVKind("float32")), BLOCKS)
        super().__init__(Stepwise(NullForward(config.slots, self.notes)), pool, slots=config.slots)


def build_null(config: WorkerConfig, **_: Any) -> SimpleNamespace:
    """In place of baton.worker.build.build_worker, which is not imported here."""
    return SimpleNamespace(
        runner=NullRunner(config),
        context_tokens=MODEL.context_tokens_max,
        sampling_defaults=dict(OPENAI_SAMPLING),
        identity=b"null",
        identity_parts={},
        pooling="",
        weights_digest=Digest(b"", 0.0, 0),
        pool_plan={},
        steps={},
        scoring="",
        generates=True,
        labels=(),
    )


def work_bytes(step_ms: float, tries: int = 20) -> int:
    """How much can be hashed in that time, on a core that nobody else wants: the best of some tries."""
    if not step_ms:
        return 0
    sample, times = bytes(1 << 20), []
    for _ in range(tries):
        begin = perf_counter()
        sha256(sample)
        times.append(perf_counter() - begin)
    return int(len(sample) * step_ms / 1000 / min(times))
