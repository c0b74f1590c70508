"""Default step sizes, by compute device.

A few hundred tokens saturate a CPU, and a large step delays every stream. A GPU needs some thousand, and holds more sequences.
The worker knows the device, so it chooses (worker/build.py) and reports the sizes in its hello; the engine plans with them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

BY_DEVICE = ("slots", "tokens_per_step", "prefill_tokens_beside_decodes", "decode_gap_seconds")
"""Fields of SchedulerConfig whose default depends on the device; WorkerConfig has the first two."""
OPTIONS = ("max_num_seqs", "max_num_batched_tokens", "prefill_tokens_beside_decodes", "decode_gap_ms")
"""Options for these fields, in the same order."""


@dataclass(frozen=True, slots=True)
class StepDefaults:
    slots: int
    tokens_per_step: int
    prefill_tokens_beside_decodes: int
    decode_gap_seconds: float = 0.025
    "Seconds between tokens beside prompts, independent of the device: people read the streams."


CPU = StepDefaults(64, 512, 128)
GPU = (
    (40.0, StepDefaults(256, 8192, 2048)),
    (16.0, StepDefaults(128, 4096, 1024)),
    (0.0, StepDefaults(64, 2048, 512)),
)
"""Default step sizes, by the GPU's minimum memory in GiB. bench/gpu_serving.py measures an H200 with the sizes of the first
row, though without a decode gap. The other rows are estimates: they keep the memory of a step (activations, logits of every
sequence, tables of samplers) at about the same share."""


def gpu_defaults(memory_gib: float) -> StepDefaults:
    return next(row for least, row in GPU if memory_gib >= least)


def steps_for(defaults: StepDefaults, chosen: Collection[str], *, slots: int, tokens_per_step: int) -> dict[str, int | float]:
    """Defaults of the `chosen` fields of BY_DEVICE. Every sequence needs a token per step: if only one of `slots` and
    `tokens_per_step` was given, the other is adjusted to it."""
    sizes = asdict(defaults)
    found = {name: sizes[name] for name in BY_DEVICE if name in chosen}
    if "slots" in found and "tokens_per_step" not in found:
        found["slots"] = min(found["slots"], tokens_per_step)
    if "tokens_per_step" in found:
        found["tokens_per_step"] = max(found["tokens_per_step"], found.get("slots", slots))
    return found


def as_options(scheduler: dict[str, int | float | None]) -> dict[str, int | float]:
    """Resolved sizes under the names of options. 0: no limit."""
    gap = scheduler["decode_gap_seconds"]
    values = (scheduler["slots"], scheduler["tokens_per_step"], scheduler["prefill_tokens_beside_decodes"], gap and gap * 1000)
    return {name: value or 0 for name, value in zip(OPTIONS, values, strict=True)}
