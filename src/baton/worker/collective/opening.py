"""The part of a model that this rank computes, and its exchange with the other ranks. One rank: the whole model, and none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from baton.config import WorkerConfig
from baton.errors import InvalidConfig
from baton.models.config import ModelConfig
from baton.models.encoders.config import EncoderConfig
from baton.models.loaders.sharded import sharded
from baton.models.open import Opened, OpenedEncoder
from baton.models.shard import Shard
from baton.native.balance import TOKENS
from baton.native.build import NoCompiler
from baton.native.exchange import RankExchange
from baton.native.library import load_best
from baton.worker.collective.base import Collective

WAIT_SHARE: Final = 0.5
"""Share of start_seconds_max that a rank waits for another one. A wait that begins in the first half of the start ends before
the engine's limit for all of it, so that the waiting rank can name the one that hangs."""


def part_of_rank(opened: Opened, config: WorkerConfig) -> Opened:
    """The model that this rank computes. Reads no weights; raises InvalidConfig if the model or a setting does not allow
    several ranks."""
    if config.ranks == 1:
        return opened
    option = f"--tensor-parallel-size {config.ranks}"
    if isinstance(opened, OpenedEncoder):
        raise InvalidConfig(f"{option}: the model is an encoder, which one rank computes")
    if config.speculate != "none":  # whether a draft pays is measured, and ranks would measure differently
        raise InvalidConfig(f"{option}: --speculate {config.speculate} is not supported with several ranks")
    if config.device == "cpu" and config.blocks is None and config.memory_utilization is not None:
        raise InvalidConfig(
            f"{option}: --gpu-memory-utilization is not supported with several ranks on a CPU: each would count the memory "
            "that the others take at the same time, or not, as it happens: give --kv-memory-gib, which they divide"
        )
    part, weights = sharded(opened.config, opened.weights, Shard(config.rank, config.ranks))
    # Labels of pairs are read from single rows of the head, which is divided; a tied one is also the embedding.
    scoring = opened.scoring if opened.config.tied_embeddings or config.device == "cpu" else ""
    return replace(opened, config=part, weights=weights, scoring=scoring)


def open_collective(config: WorkerConfig, model: ModelConfig | EncoderConfig, fd: int | None) -> Collective | None:
    """The exchange with the other ranks. `fd`: memory that the ranks share, empty at first; belongs to the caller. None: one
    rank."""
    if config.ranks == 1 or fd is None or isinstance(model, EncoderConfig):
        return None
    shard, wait_seconds = Shard(config.rank, config.ranks), config.start_seconds_max * WAIT_SHARE
    if config.device == "cpu":
        try:
            return RankExchange(load_best(), fd, shard, exchanged_numbers(config, model), wait_seconds)
        except NoCompiler:
            pass
    from baton.worker.collective.distributed import DistributedCollective  # importing torch takes a second and 200 MiB

    folder, ordered = Path(config.rendezvous), config.deterministic
    return DistributedCollective(shard, folder, config.device, ordered=ordered, wait_seconds=wait_seconds)


def agreed_steps(
    config: WorkerConfig, steps: dict[str, int | float], collective: Collective | None
) -> tuple[WorkerConfig, dict[str, int | float]]:
    """Step sizes that were chosen by a device's memory: the smallest of all ranks."""
    if collective is None:
        return config, steps
    slots, tokens = collective.least(config.slots), collective.least(config.tokens_per_step)
    agreed = {"slots": slots, "tokens_per_step": tokens}
    chosen = steps | {name: size for name, size in agreed.items() if name in steps}
    return replace(config, slots=slots, tokens_per_step=tokens), chosen


def exchanged_numbers(config: WorkerConfig, model: ModelConfig) -> int:
    """Count the numbers in the largest exchange of a step, the same on every rank: hidden rows, or the logits of a row."""
    rows = max(config.tokens_per_step, config.slots, TOKENS)
    return max(rows * model.hidden_size, model.vocab_size)
