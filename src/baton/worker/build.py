"""Builds a runner from settings: model, pool, and the maximum length of a sequence in the pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from baton.config import WorkerConfig, draft_model_of
from baton.config.device_defaults import steps_for
from baton.errors import InvalidConfig
from baton.grammar.vocabulary import Vocabulary
from baton.kvpool.base import Pool
from baton.kvpool.layout import KVLayout
from baton.kvpool.memory import GIB
from baton.kvpool.pool import pool_bytes
from baton.models.encoders.config import EncoderConfig
from baton.models.generation import sampling_defaults
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.weights import Progress
from baton.models.names import resolve
from baton.models.open import Opened, OpenedEncoder, open_any
from baton.models.pooling import UNSTATED
from baton.models.shapes import SHAPES
from baton.native.build import compilation_announced
from baton.text.tokenizer import Tokenizer
from baton.worker.collective.base import Collective
from baton.worker.collective.opening import agreed_steps, open_collective, part_of_rank
from baton.worker.draft_model import DraftModel, MainModel, draft_model, draft_settings, warn_of_context
from baton.worker.drafters import drafter_of
from baton.worker.drafters.price import DraftPrice
from baton.worker.encoders import encoder_kind, encoder_settings, load_encoder
from baton.worker.executors.base import LoadedExecutor
from baton.worker.grammar_masks import GrammarMasks
from baton.worker.identity import identity_of
from baton.worker.kv_layout import kv_layout
from baton.worker.model_runner import ModelRunner
from baton.worker.platforms.base import Platform, RankedPlatform
from baton.worker.platforms.choose import CPU_KV_GIB, choose
from baton.worker.platforms.cpu import usable_cores
from baton.worker.profile import MemoryProfile, blocks_that_fit, measure
from baton.worker.weights_digest import Digest, DigestInProgress
from baton.worker.weights_text import weights_text

CONTEXT_TOKENS_MIN = 2
"""Tokens of the smallest request: a prompt and an answer of one token each."""


@dataclass(frozen=True, slots=True)
class BuiltWorker:
    runner: ModelRunner
    context_tokens: int
    "Maximum length of a sequence, prompt and output. A sequence of this length always fits the pool."
    sampling_defaults: dict[str, int | float]
    "Default sampling of requests (models/generation.py)."
    identity: bytes
    "KVIdentity.digest() of the loaded model."
    weights_digest: Digest
    pool_plan: dict[str, int | float | str]
    "How the size of the pool was determined, for operators."
    identity_parts: dict[str, str]
    "KVIdentity.parts(), and in words what two of them are digests of."
    steps: dict[str, int | float] = field(default_factory=dict)
    "Step sizes that were chosen for the device (config/device_defaults.py)."
    pooling: str = UNSTATED
    "Default pooling of embeddings (models/pooling.py)."
    scoring: str = ""
    "How the model scores a pair of texts (models/scoring.py)."
    generates: bool = True
    "Whether the model generates. False: an encoder."
    labels: tuple[str, ...] = ()
    "Names of the classes of a model that classifies."


@dataclass(frozen=True, slots=True)
class PoolSize:
    blocks: int
    context_tokens: int


PoolSource = Callable[[Platform, KVLayout, int], Pool]
"""Creates a pool with this number of blocks, or attaches to an existing pool."""


def own_pool(platform: Platform, layout: KVLayout, blocks: int) -> Pool:
    return platform.create_pool(layout, blocks)


def layout_of(config: WorkerConfig) -> KVLayout:
    """The KV layout of a worker with these settings. Reads no weights."""
    path = resolve(config.model)
    platform, config = choose(config, path)
    return _layout(platform, part_of_rank(opened_as(config, path), config), config)


def _layout(platform: Platform, opened: Opened, config: WorkerConfig) -> KVLayout:
    kind = encoder_kind(platform) if isinstance(opened, OpenedEncoder) else platform.kv_kind(opened.config, config)
    return kv_layout(opened.config, config.block_size, kind)


def _loaded(
    platform: Platform, opened: Opened, config: WorkerConfig, progress: Progress | None, collective: Collective | None
) -> LoadedExecutor:
    if isinstance(opened, OpenedEncoder):
        return load_encoder(platform, opened, config, progress)
    if collective is None:
        return platform.load(opened, config, progress)
    assert isinstance(platform, RankedPlatform)
    return platform.load_part(opened, config, progress, collective)


def opened_as(config: WorkerConfig, path: Path) -> Opened:
    """The model's files, or random weights in their place."""
    opened = open_any(path)
    if config.load_format == "auto":
        if config.model_shape:
            raise InvalidConfig("--model-shape is for random weights: give --load-format dummy too")
        return opened
    if isinstance(opened, OpenedEncoder):
        if config.model_shape:
            raise InvalidConfig("--model-shape is for decoders, and the model is an encoder")
        return replace(opened, weights=DummyWeights(opened.config), files=())
    shape = opened.config
    if config.model_shape:
        if config.model_shape not in SHAPES:
            raise InvalidConfig(f"--model-shape {config.model_shape}: no such shape; there are {', '.join(SHAPES)}")
        shape = replace(SHAPES[config.model_shape], bos_id=shape.bos_id, eos_ids=shape.eos_ids)
    return replace(opened, config=shape, weights=DummyWeights(shape), files=())


def build_worker(
    config: WorkerConfig,
    progress: Progress | None = None,
    pool_source: PoolSource = own_pool,
    tokenizer: Tokenizer | None = None,
    announce: Callable[[str], None] | None = None,
    collective_fd: int | None = None,
) -> BuiltWorker:
    """Builds the runner. Raises for wrong settings before any weights are read. `tokenizer`: if it is already loaded.
    `announce`: called with a sentence before kernels are compiled or prepared. `collective_fd`: the memory file that all ranks
    of the set share."""
    if config.ranks > 1 and collective_fd is None:
        raise InvalidConfig(f"--tensor-parallel-size {config.ranks} needs as many processes: use baton serve")
    with compilation_announced(announce) if announce is not None else nullcontext():
        return _built_worker(config, progress, pool_source, tokenizer, announce or (lambda stage: None), collective_fd)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Everything that is known before weights are read."""

    config: WorkerConfig
    platform: Platform
    opened: Opened
    part: Opened
    "The rank's part of the model."
    draft: DraftModel | None
    collective: Collective | None
    steps: dict[str, int | float]
    layout: KVLayout

    def size(self, blocks: int | None = None) -> PoolSize:
        """`blocks`: those that a measurement found room for."""
        draft_bytes = 0 if self.draft is None else self.draft.layout.block_bytes
        return fit_pool(self.config, self.layout, self.opened.config.context_tokens_max, blocks, beside=draft_bytes)


def _choose(config: WorkerConfig, path: Path, tokenizer: Tokenizer | None, collective_fd: int | None) -> _Chosen:
    """Raises for settings that the model or the platform does not support."""
    platform, config = choose(config, path)
    config, steps = with_steps(platform, config)
    opened = opened_as(config, path)
    part = part_of_rank(opened, config)
    if config.ranks > 1 and not isinstance(platform, RankedPlatform):
        raise InvalidConfig(f"--tensor-parallel-size {config.ranks}: --device {platform.name} computes with one rank")
    refuse_speculation(config, generates=not isinstance(opened, OpenedEncoder))
    draft = draft_of(platform, config, opened, tokenizer)
    collective = open_collective(config, part.config, collective_fd)
    config, steps = agreed_steps(config, steps, collective)
    if isinstance(opened, OpenedEncoder):
        config = encoder_settings(config, opened.config.context_tokens_max - 1)
    return _Chosen(config, platform, opened, part, draft, collective, steps, _layout(platform, part, config))


def _built_worker(
    config: WorkerConfig,
    progress: Progress | None,
    pool_source: PoolSource,
    tokenizer: Tokenizer | None,
    announce: Callable[[str], None],
    collective_fd: int | None,
) -> BuiltWorker:
    """Loads the model, sizes and opens its pool, and binds both to a runner."""
    path = resolve(config.model)
    chosen = _choose(config, path, tokenizer, collective_fd)
    config, platform, opened, draft = chosen.config, chosen.platform, chosen.opened, chosen.draft
    defaults = sampling_defaults(opened.recommended, config.generation_config, str(opened.path))
    size = chosen.size()  # raises before the weights are read; a profile needs them
    grammars = _grammars(chosen, path, tokenizer)
    loaded, loaded_draft, weights = _weights(chosen, progress, announce)
    size, profile = _measured(chosen, loaded, loaded_draft, size)
    pool = pool_source(platform, chosen.layout, size.blocks)
    executor = loaded.with_pool(pool, size.context_tokens)
    drafter, plan = None, pool_plan(config, pool, profile)
    if draft is not None and loaded_draft is not None:
        drafter = draft.drafter(platform, loaded_draft, MainModel(pool.blocks, size.context_tokens, opened.config.vocab_size))
        plan |= draft.plan(pool.blocks)
        warn_of_context(draft, size.context_tokens)
    runner = ModelRunner(
        executor,
        pool,
        slots=config.slots,
        grammars=grammars,
        drafter=drafter_of(config.speculate),
        draft_model=drafter,
        price=DraftPrice(executor.row_cost, waits=executor.steps_ahead > 1) if config.speculate != "none" else None,
    )
    if config.device == "cuda":
        announce("preparing kernels for this GPU (the first start takes longer)")
    runner.prepare()
    if chosen.collective is not None:
        chosen.collective.start_is_over()
    return _described(chosen, runner, size, defaults, weights, plan)


def _grammars(chosen: _Chosen, path: Path, tokenizer: Tokenizer | None) -> GrammarMasks:
    """Masks of grammars, whose preparation begins: it runs in parallel with the weights."""
    tokens = chosen.opened.config.vocab_size  # a variable of its own: a closure over `chosen` would keep the files mapped
    generates = not isinstance(chosen.opened, OpenedEncoder)
    vocabulary = (lambda: Vocabulary.of(tokenizer or Tokenizer.from_path(path), tokens)) if generates else None
    grammars = GrammarMasks(vocabulary, timed=chosen.config.ranks == 1)
    grammars.prepare()
    return grammars


def _weights(
    chosen: _Chosen, progress: Progress | None, announce: Callable[[str], None]
) -> tuple[LoadedExecutor, LoadedExecutor | None, Digest]:
    """The loaded model, the loaded draft model, and the digest of the model's files."""
    config, collective = chosen.config, chosen.collective
    with DigestInProgress(chosen.opened.files, config.threads or usable_cores(), collective=collective) as digesting:
        loaded = _loaded(chosen.platform, chosen.part, config, progress, collective)
        weights = digesting.result()
        if chosen.draft is None:
            return loaded, None, weights
        announce("loading the draft model")
        return loaded, chosen.draft.load(chosen.platform, progress), weights


def _measured(
    chosen: _Chosen, loaded: LoadedExecutor, loaded_draft: LoadedExecutor | None, size: PoolSize
) -> tuple[PoolSize, MemoryProfile | None]:
    """The size of the pool. If its bound is a share of the memory, a step with the loaded weights is measured first."""
    config, draft = chosen.config, chosen.draft
    if config.blocks is not None or config.memory_utilization is None:
        return size, None
    draft_bytes, with_drafter = 0, None
    if draft is not None and loaded_draft is not None:
        draft_bytes, with_drafter = draft.layout.block_bytes, partial(draft.drafter, chosen.platform, loaded_draft)
    profile = measure(chosen.platform, loaded.with_pool, chosen.layout, config, size.context_tokens, with_drafter)
    blocks = agreed_blocks(profile, chosen.layout, config, config.memory_utilization, chosen.collective, draft_bytes)
    return chosen.size(blocks), profile


def _described(
    chosen: _Chosen,
    runner: ModelRunner,
    size: PoolSize,
    defaults: dict[str, int | float],
    weights: Digest,
    plan: dict[str, int | float | str],
) -> BuiltWorker:
    config, opened, layout = chosen.config, chosen.opened, chosen.layout
    identity = identity_of(opened, weights.value, config, layout, runner.executor.arithmetic)
    quantization = weights_text(opened.weights.stored(), config)
    return BuiltWorker(
        runner,
        size.context_tokens,
        defaults,
        identity.digest(),
        weights,
        plan | {"weights": quantization},
        identity.parts() | {"quantization": quantization, "kv_dtype": f"{layout.dtype} {layout.format}"},
        chosen.steps,
        opened.pooling or UNSTATED,
        chosen.part.scoring,
        not isinstance(opened, OpenedEncoder),
        opened.config.head.labels if isinstance(opened.config, EncoderConfig) and opened.config.head is not None else (),
    )


def refuse_speculation(config: WorkerConfig, *, generates: bool) -> None:
    """Raises InvalidConfig if drafts are wanted of a model without any."""
    if config.speculate != "none" and not generates:
        raise InvalidConfig(f"--speculate {config.speculate} is for models that generate text, and this is an encoder")


def draft_of(platform: Platform, config: WorkerConfig, main: Opened, tokenizer: Tokenizer | None) -> DraftModel | None:
    """The draft model of the settings. None: no model drafts."""
    name = draft_model_of(config.speculate)
    if not name or isinstance(main, OpenedEncoder):
        return None
    settings = draft_settings(config, name)
    return draft_model(platform, settings, opened_as(settings, resolve(name)), main, tokenizer)


def with_steps(platform: Platform, config: WorkerConfig) -> tuple[WorkerConfig, dict[str, int | float]]:
    """The settings with default step sizes filled in, and these sizes. Instances on one GPU share its memory."""
    if not config.by_device:
        return config, {}
    defaults = platform.step_defaults(config.device_sharers)
    steps = steps_for(defaults, config.by_device, slots=config.slots, tokens_per_step=config.tokens_per_step)
    slots, tokens = int(steps.get("slots", config.slots)), int(steps.get("tokens_per_step", config.tokens_per_step))
    return replace(config, slots=slots, tokens_per_step=tokens, by_device=()), steps


def pool_plan(config: WorkerConfig, pool: Pool, profile: MemoryProfile | None) -> dict[str, int | float | str]:
    plan: dict[str, int | float | str] = {
        "device": config.device,
        "dtype": config.dtype,
        "kv_blocks": pool.blocks,
        "kv_blocks_by": knob_of(config),
        "kv_cache_dtype": pool.layout.dtype,
        "kv_block_bytes": pool.layout.block_bytes * config.ranks,
        "kv_pool_gib": round(pool_bytes(pool.layout, pool.blocks) * config.ranks / GIB, 3),
    }
    if profile is None:
        return plan
    measured = {"memory": profile.total_bytes, "memory_used": profile.used_bytes, "memory_step": profile.step_bytes}
    return plan | {f"{name}_gib": round(count / GIB, 3) for name, count in measured.items()}


def knob_of(config: WorkerConfig) -> str:
    """The setting that determines the number of blocks."""
    if config.blocks is not None:
        return "kv_blocks"
    return "kv_memory_gib" if config.memory_utilization is None else "gpu_memory_utilization"


def agreed_blocks(
    profile: MemoryProfile,
    layout: KVLayout,
    config: WorkerConfig,
    share: float,
    collective: Collective | None,
    beside: int = 0,
) -> int:
    """Blocks that fit on every rank: a block has a part on each. `beside`: as in blocks_that_fit."""
    blocks = blocks_that_fit(profile, layout, config, share, beside=beside)
    return blocks if collective is None else collective.least(blocks)


def fit_pool(
    config: WorkerConfig, layout: KVLayout, model_context: int, profiled: int | None = None, *, beside: int = 0
) -> PoolSize:
    """The given number of blocks, or as many as fit, but no more than all slots could fill with whole contexts. A default
    context is lowered to what the pool holds: a longer sequence could never finish. A requested context that does not fit
    raises InvalidConfig. `profiled`: blocks that fit by memory_utilization; None: not known yet. `beside`: bytes that a block
    has in the draft model's pool, which come on top of a given number of blocks."""
    asked, size, option = config.context_tokens_max, config.block_size, knob_of(config)
    block_bytes = layout.block_bytes * config.ranks + beside  # each rank has a part of every block
    if asked is not None and asked > model_context:
        raise InvalidConfig(f"max_model_len is {asked}, and the model was made for {model_context}: lower it")
    if option == "kv_blocks":
        fit, given = config.blocks or 0, f"kv_blocks is {config.blocks}"
    elif option == "kv_memory_gib":
        gib = config.kv_memory_gib or CPU_KV_GIB
        fit = int(gib * GIB) // block_bytes
        given = f"kv_memory_gib is {gib:g}: that is {fit} KV blocks"
    elif profiled is None:
        return PoolSize(0, asked or model_context)
    else:
        fit, given = profiled, f"gpu_memory_utilization is {config.memory_utilization:g}: that leaves {profiled} KV blocks"
    held = fit * size
    if held < max(asked or 0, CONTEXT_TOKENS_MIN):
        wanted = asked or CONTEXT_TOKENS_MIN
        needed = -(-wanted // size)
        instead = f", or lower max_model_len to {held}" if asked and held >= CONTEXT_TOKENS_MIN else ""
        raise InvalidConfig(
            f"{given}, and a context of {wanted} tokens needs {needed} blocks of {size} tokens "
            f"({needed * block_bytes / GIB:.2g} GiB): raise {option}{instead}"
        )
    context = min(asked or model_context, held)
    return PoolSize(fit if config.blocks is not None else min(fit, config.slots * -(-context // size)), context)
