"""What golden digests are taken of: every way to compute on a GPU that has kernels of its own, with a small model.

    steps       prompts, chunks, single tokens, several sequences, long contexts: all logits, and the blocks that they leave
    drafts      several rows per sequence, through the executor, some right and some wrong: all logits, and the tokens
    ranks       the steps, by two processes that exchange through gloo
    encoders    states of texts of several lengths, and logits of classes

Weights and tokens are those of tests/native/golden_model.py. A case runs where its `Place` says: on a GPU (GPU), or without one
in Triton's interpreter (golden_interpreted.py), which shows that it runs at all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "native"))
from golden_model import BLOCK, CONFIG, LONG, MIXTURES, OSS_ROPE, OSS_TRAITS, SHORT, GoldenWeights, Part, words

from baton.config import WorkerConfig
from baton.kvpool.base import Pool
from baton.models.config import NO_ROPE, Experts, LinearScaling, ModelConfig, RopeConfig, Traits, YarnScaling
from baton.models.encoders.config import ClassHead, EncoderConfig
from baton.models.encoders.torch_encoder import Encoder
from baton.models.loaders.sharded import sharded
from baton.models.loaders.weights import RawWeights, WeightSource
from baton.models.open import OpenedEncoder, OpenedModel
from baton.models.shard import Shard
from baton.models.tensor_types import F8_E4M3, F32, MXFP4, Q4_0, Q4_1, Q4_K, TensorType
from baton.protocol.ids import BlockId, Incarnation, Slot, StepNo, WorkerEpoch
from baton.protocol.request import SamplingParams
from baton.protocol.step import BatchRows, NewSequence, StepPlan
from baton.worker.arithmetic import CUDA, CUDA_FLOAT32, TORCH
from baton.worker.collective.base import Collective
from baton.worker.cuda.executor import CudaExecutor
from baton.worker.cuda.step_inputs import StepBatch
from baton.worker.kv_layout import kv_layout
from baton.worker.model_runner import ModelRunner

DECODERS, FLOAT32_DECODERS, ENCODERS = "", ", float32", ", encoders"
NUMBERS = {DECODERS: CUDA, FLOAT32_DECODERS: CUDA_FLOAT32, ENCODERS: TORCH}
"""Arithmetic of each kind of case (worker/arithmetic.py): encoders run in torch."""
SLOTS, ROWS = 8, 512
SCRIPT = Path(__file__).with_name("golden_on_gpu.py")
LONG_LATER: list[list[Part]] = [[(slot + 4, at, count) for slot, at, count in part] for part in LONG]


@dataclass(frozen=True)
class Started:
    """An executor with its pool, which is all zeros."""

    executor: CudaExecutor
    pool: Pool
    kv: torch.Tensor
    "The content of the pool."

    def close(self) -> None:
        self.executor.close()
        self.pool.close()


class Place(Protocol):
    """Where a case runs."""

    name: str
    device: str
    steps: Sequence[list[Part]]
    "Steps of the cases that have no others."

    def start(self, case: Case, config: ModelConfig, source: WeightSource, collective: Collective | None = None) -> Started: ...

    def encoder(self, case: Case, config: EncoderConfig, source: WeightSource) -> Encoder: ...


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    config: ModelConfig | EncoderConfig = CONFIG
    stored: tuple[TensorType, ...] = (F32,)
    "What matrices are stored as; they take them in turns."
    settings: dict[str, Any] = field(default_factory=dict)
    "Of WorkerConfig."
    run: Callable[[Case, Place], str] = field(default=lambda case, place: digest_of_steps(case, place))

    @property
    def kind(self) -> str:
        """One of NUMBERS."""
        if isinstance(self.config, EncoderConfig):
            return ENCODERS
        return FLOAT32_DECODERS if self.worker().dtype == "float32" else DECODERS

    def worker(self) -> WorkerConfig:
        given = {"dtype": "bfloat16", "quantization": "none", **self.settings}
        return WorkerConfig(device="cuda", block_size=BLOCK, slots=SLOTS, tokens_per_step=ROWS, **given)


# Steps


def digest_of_steps(case: Case, place: Place) -> str:
    config = case.config
    assert isinstance(config, ModelConfig)
    return run_steps(place.start(case, config, GoldenWeights(config, case.stored)), place.steps)


def run_steps(started: Started, parts_of_steps: Sequence[list[Part]]) -> str:
    steps, digest = started.executor._steps, sha256()
    width = steps.step.tables.shape[1]
    tables = np.arange(SLOTS * width)[::-1].reshape(SLOTS, width)
    slots, places = np.divmod(np.arange(SLOTS * width), width)
    with torch.inference_mode():
        steps.write_tables(slots, places, tables.reshape(-1).copy())
        for parts in parts_of_steps:
            batch = step_of(parts, steps.step.config.vocab_size)
            steps.launch(batch).done.synchronize()
            digest.update(bits_of(steps.step.logits(len(parts))))
    digest.update(started.kv.view(torch.uint8).cpu().numpy().tobytes())
    started.close()
    return digest.hexdigest()[:24]


def bits_of(logits: torch.Tensor) -> bytes:
    assert torch.isfinite(logits).all()
    return logits.cpu().numpy().tobytes()


def step_of(parts: list[Part], vocabulary: int) -> StepBatch:
    token_ids = np.concatenate([tokens_of(slot, at + count, vocabulary)[at:] for slot, at, count in parts])
    return StepBatch(
        token_ids.astype(np.int32),
        np.array([slot for slot, _, _ in parts], np.int64),
        np.cumsum([0, *(count for _, _, count in parts)]),
        np.array([at for _, at, _ in parts], np.int64),
        np.ones(len(parts), np.bool_),
        np.zeros(len(parts), np.int64),
    )


def tokens_of(slot: int, count: int, vocabulary: int) -> np.ndarray:
    return words(f"tokens {slot}", count) % np.uint64(vocabulary)


# Drafts

PROMPT_TOKENS = (70, 5, 33)
DRAFTS = (3, 1, 2)
"""Drafts per step of each sequence."""
DRAFTED_STEPS = 4
SAMPLING = (
    SamplingParams(max_tokens=64),
    SamplingParams(max_tokens=64, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(max_tokens=64, temperature=0.75, top_p=0.9, seed=7),
)


def digest_of_drafts(case: Case, place: Place) -> str:
    """The tokens must be those of a run without drafts: a case with drafts is deterministic."""
    config, digest = case.config, sha256()
    assert isinstance(config, ModelConfig)
    plain = run_plans(case, place, None, DRAFTED_STEPS * (1 + max(DRAFTS)))
    answers = [known[count:] for known, count in zip(plain, PROMPT_TOKENS, strict=True)]
    drafted = run_plans(case, place, Spoilt(answers, config.vocab_size), DRAFTED_STEPS, digest.update)
    for tokens, wanted in zip(drafted, plain, strict=True):
        assert tokens == wanted[: len(tokens)], "drafts changed tokens"
    assert sum(map(len, drafted)) > sum(PROMPT_TOKENS) + len(PROMPT_TOKENS) * (1 + DRAFTED_STEPS), "no draft was right"
    digest.update(np.array([token for tokens in drafted for token in tokens], np.int32).tobytes())
    return digest.hexdigest()[:24]


def run_plans(
    case: Case, place: Place, drafter: Spoilt | None, steps: int, record: Callable[[bytes], object] | None = None
) -> list[list[int]]:
    """The tokens of each slot after its prompt and this many steps. record: gets the logits of all rows."""
    assert isinstance(case.config, ModelConfig)
    started = place.start(case, case.config, GoldenWeights(case.config, case.stored))
    if record is not None:
        started.executor._steps = Recorded(started.executor._steps, record)  # type: ignore[assignment]
    runner = ModelRunner(started.executor, started.pool, slots=SLOTS, drafter=drafter)
    slots, vocabulary = range(len(PROMPT_TOKENS)), case.config.vocab_size
    width = -(-(max(PROMPT_TOKENS) + DRAFTED_STEPS * (2 + max(DRAFTS))) // BLOCK)
    new = [new_sequence(slot, tokens_of(slot, PROMPT_TOKENS[slot], vocabulary).tolist(), width) for slot in slots]
    runner.execute(plan(1, PROMPT_TOKENS, new=tuple(new), sampling=SAMPLING))
    for number in range(steps):
        runner.execute(plan(2 + number, (1, 1, 1), DRAFTS if drafter is not None else ()))
    found = [runner.batch.tokens[slot, : runner.batch.lengths[slot]].tolist() for slot in slots]
    runner.close()
    return found


def plan(number: int, counts: tuple[int, ...], drafts: tuple[int, ...] = (), **more: Any) -> StepPlan:
    run = BatchRows(tuple(map(Slot, range(len(counts)))), counts, drafts)
    return StepPlan(StepNo(number), WorkerEpoch(1), run=run, **more)


def new_sequence(slot: int, tokens: list[int], width: int) -> NewSequence:
    blocks = tuple(BlockId((slot + 1) * width - 1 - place) for place in range(width))
    return NewSequence(Slot(slot), Incarnation(1), tuple(tokens), len(tokens), 0, blocks, slot, 0)


class Spoilt:
    """A drafter that knows the answers, and spoils every fourth token."""

    def __init__(self, answers: Sequence[list[int]], vocabulary: int) -> None:
        self._answers, self._vocabulary = answers, vocabulary

    def assign_slot(self, slot: int, grammar: Any = None) -> None:
        pass

    def propose(self, slot: int, tokens: np.ndarray, most: int) -> list[int]:
        at = len(tokens) - PROMPT_TOKENS[slot]
        right = self._answers[slot][at : at + most]
        return [(token + (place % 4 == 3)) % self._vocabulary for place, token in enumerate(right, at)]

    def accepted(self, slot: int, drafted: int, accepted: int) -> None:
        pass

    def drop(self, slot: int) -> None:
        pass


class Recorded:
    """Steps of an executor, of which every step's logits are recorded."""

    def __init__(self, steps: Any, record: Callable[[bytes], object]) -> None:
        self._steps, self._record = steps, record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._steps, name)

    def launch(self, batch: StepBatch) -> Any:
        launched = self._steps.launch(batch)
        launched.done.synchronize()
        self._record(bits_of(self._steps.step.logits(int(batch.due.sum()))))
        return launched


# Ranks

RANKS = 2


def digest_of_ranks(case: Case, place: Place) -> str:
    """Of what both ranks computed. Each is a process, as in a server."""
    with TemporaryDirectory() as folder:
        start = [sys.executable, str(SCRIPT), "--rank", place.name, case.name, folder]
        ranks = [subprocess.Popen([*start, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(RANKS)]
        found = [child.communicate(timeout=560)[0].split() for child in ranks]
    assert [child.returncode for child in ranks] == [0] * RANKS
    return sha256(" ".join(words[-1] for words in found).encode()).hexdigest()[:24]


def digest_of_rank(case: Case, place: Place, folder: str, rank: int) -> str:
    from baton.worker.collective.distributed import DistributedCollective

    assert isinstance(case.config, ModelConfig)
    part, source = sharded(case.config, GoldenWeights(case.config, case.stored), Shard(rank, RANKS))
    collective = DistributedCollective(Shard(rank, RANKS), Path(folder), place.device, wait_seconds=300.0)
    assert collective.backend == "gloo"
    found = run_steps(place.start(case, part, source, collective), place.steps)
    collective.close()
    return found


# Encoders

TEXTS = (1, 5, 5, 40, 130, 300)
"""Tokens of texts, which share a step."""


def digest_of_encoder(case: Case, place: Place) -> str:
    config, digest = case.config, sha256()
    assert isinstance(config, EncoderConfig)
    encoder = place.encoder(case, config, GoldenWeights(config, case.stored))
    for lengths in (TEXTS, TEXTS[-1:]):
        ids = np.concatenate([tokens_of(slot, count, config.vocab_size) for slot, count in enumerate(lengths)])
        states = encoder.forward(torch.from_numpy(ids.astype(np.int32)).to(encoder.device), lengths)
        digest.update(bits_of(states.float()))
        if config.head is not None:
            firsts = np.cumsum([0, *lengths[:-1]])
            digest.update(bits_of(encoder.logits(states[torch.from_numpy(firsts).to(encoder.device)]).float()))
    return digest.hexdigest()[:24]


BERT = EncoderConfig(
    architecture="bert", vocab_size=203, layers=2, hidden_size=256, heads=4, intermediate_size=512, norm_eps=1e-5,
    activation="gelu", positions=400, types=2, head=ClassHead(labels=("a", "b"), activation="tanh"), context_tokens_max=401,
)  # fmt: skip
MODERN_BERT = EncoderConfig(
    architecture="modernbert", vocab_size=203, layers=3, hidden_size=256, heads=4, intermediate_size=512, norm_eps=1e-5,
    activation="gelu", modern=True, attention_bias=False, mlp_bias=False, norm_bias=False, windows=(None, 64, None),
    thetas=(160_000.0, 10_000.0, 160_000.0), context_tokens_max=401,
)  # fmt: skip


# The cases


def with_experts(name: str, **more: Any) -> ModelConfig:
    return replace(CONFIG, experts=MIXTURES[name], **more)


EXPERTS = replace(
    CONFIG,
    architecture="qwen3_moe",
    traits=Traits(qk_norm=True),
    experts=Experts(count=8, per_token=3, inner_size=256, normalised=True),
)
GPT_OSS = with_experts("gpt-oss", traits=OSS_TRAITS, rope=OSS_ROPE)
ROPES = (RopeConfig(theta=500.0, scaling=LinearScaling(factor=2.0), dimensions=32), NO_ROPE)
NORMED = Traits(qk_norm=True, qk_norm_across_heads=True, layer_norm=True, norm_bias=True)
BOTH_NORMS = replace(
    NORMED, norms="both", activation="gelu_tanh", embedding_scale=7.0, attention_scale=0.11, layer_ropes=ROPES,
    layer_windows=(None, 60), qkv_bias=True, output_bias=True, mlp_bias=True,
)  # fmt: skip
YARN = RopeConfig(scaling=YarnScaling(factor=4.0, original_context=256, attention_factor=1.2, truncate=False))
PARALLEL = replace(NORMED, parallel=True, activation="gelu_tanh", embedding_scale=7.0, layer_ropes=(YARN, ROPES[0]))
FIXED = {"deterministic": True}
FP8 = {"quantization": "fp8"}
_ALL = (
    Case(name="bfloat16"),
    Case(name="fp8 keys", settings={"kv_dtype": "fp8"}),
    Case(name="fp8", settings=FP8),
    Case(name="experts", config=EXPERTS),
    Case(name="experts, fp8", config=EXPERTS, settings=FP8),
    Case(name="deterministic", settings=FIXED),
    Case(name="float32", settings={"dtype": "float32"}),
    Case(name="4 bits, unpacked while they load", stored=(Q4_0, Q4_1, Q4_K)),
    Case(name="MXFP4 experts", config=GPT_OSS, stored=(MXFP4,)),
    Case(name="MXFP4 experts, deterministic", config=GPT_OSS, stored=(MXFP4,), settings=FIXED),
    Case(name="fp8 in blocks, as stored", stored=(F8_E4M3,)),
    Case(name="fp8, deterministic", settings=FP8 | FIXED),
    Case(name="experts, deterministic", config=EXPERTS, settings=FIXED),
    Case(name="shared expert", config=with_experts("sigmoid")),
    Case(name="sinks, a window and clamped SwiGLU", config=replace(CONFIG, traits=OSS_TRAITS, rope=OSS_ROPE)),
    Case(name="norms before and after, windows, ropes, scales", config=replace(CONFIG, traits=BOTH_NORMS)),
    Case(name="parallel LayerNorm", config=replace(CONFIG, traits=PARALLEL)),
    Case(name="drafts, deterministic", settings=FIXED | {"speculate": "auto"}, run=digest_of_drafts),
    Case(name="two ranks, shared expert", config=with_experts("sigmoid"), run=digest_of_ranks),
    Case(name="BERT with classes", config=BERT, run=digest_of_encoder),
    Case(name="ModernBERT", config=MODERN_BERT, run=digest_of_encoder),
    Case(name="ModernBERT, float32", config=MODERN_BERT, settings={"dtype": "float32"}, run=digest_of_encoder),
)
CASES = {case.name: case for case in _ALL}


class Gpu:
    """The first GPU."""

    name, device = "gpu", "cuda"
    steps = (*SHORT, *LONG_LATER)

    def start(self, case: Case, config: ModelConfig, source: WeightSource, collective: Collective | None = None) -> Started:
        from baton.worker.attention.pool_tensors import device_tensor
        from baton.worker.platforms.cuda import CudaPlatform

        platform, opened, worker = CudaPlatform(), OpenedModel(Path(), config, source), case.worker()
        if collective is None:
            loaded = platform.load(opened, worker)
        else:
            loaded = platform.load_part(opened, worker, None, collective)
        width = -(-config.context_tokens_max // BLOCK)
        pool = platform.create_pool(kv_layout(config, BLOCK, loaded.kv), SLOTS * width)
        kv = device_tensor(pool)
        kv.view(torch.uint8).zero_()
        executor = loaded.with_pool(pool, config.context_tokens_max)
        assert isinstance(executor, CudaExecutor)
        return Started(executor, pool, kv)

    def encoder(self, case: Case, config: EncoderConfig, source: WeightSource) -> Encoder:
        from baton.worker.platforms.cuda import CudaPlatform

        return CudaPlatform().encoder(OpenedEncoder(Path(), config, source), RawWeights(source, config), case.worker())
