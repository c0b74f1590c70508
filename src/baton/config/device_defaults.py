"""Sizes of steps that were not set, by the device that computes.

A CPU is busy with a few hundred tokens at once, and a large step holds up every stream. A GPU is not busy with fewer than some
thousand, and keeps more sequences. The worker knows the device, so it asks here (worker/build.py) and says in its hello what
it took; the engine plans with these numbers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

BY_DEVICE = ("slots", "tokens_per_step", "prefill_tokens_beside_decodes", "decode_gap_seconds")
"""Fields of SchedulerConfig whose default depends on the device; WorkerConfig has the first two."""
OPTIONS = ("max_num_seqs", "max_num_batched_tokens", "prefill_tokens_beside_decodes", "decode_gap_ms")
"""Their options, in the same order."""


@dataclass(frozen=True, slots=True)
class StepDefaults:
    slots: int
    tokens_per_step: int
    prefill_tokens_beside_decodes: int
    decode_gap_seconds: float = 0.025
    "A reader's eye is the same on every device."


CPU = StepDefaults(64, 512, 128)
GPU = (
    (40.0, StepDefaults(256, 8192, 2048)),
    (16.0, StepDefaults(128, 4096, 1024)),
    (0.0, StepDefaults(64, 2048, 512)),
)
"""By the least memory of the GPU in GiB. bench/gpu_serving.py measures an H200 with the sizes of the first row, though without
a decode gap. The other rows are estimates: they keep what a step needs (activations, logits of every sequence, tables of
samplers) at about the same share of a smaller memory."""


def gpu_defaults(memory_gib: float) -> StepDefaults:
    return next(row for least, row in GPU if memory_gib >= least)


def steps_for(defaults: StepDefaults, chosen: Collection[str], *, slots: int, tokens_per_step: int) -> dict[str, int | float]:
    """Those of BY_DEVICE that are `chosen` and not given. Every sequence needs a token of a step: where one of `slots` and
    `tokens_per_step` was given, the other one fits it."""
    sizes = asdict(defaults)
    found = {name: sizes[name] for name in BY_DEVICE if name in chosen}
    if "slots" in found and "tokens_per_step" not in found:
        found["slots"] = min(found["slots"], tokens_per_step)
    if "tokens_per_step" in found:
        found["tokens_per_step"] = max(found["tokens_per_step"], found.get("slots", slots))
    return found


def as_options(scheduler: dict[str, int | float | None]) -> dict[str, int | float]:
    """Resolved sizes by the names that users know. 0: no bound."""
    gap = scheduler["decode_gap_seconds"]
    values = (scheduler["slots"], scheduler["tokens_per_step"], scheduler["prefill_tokens_beside_decodes"], gap and gap * 1000)
    return {name: value or 0 for name, value in zip(OPTIONS, values, strict=True)}
