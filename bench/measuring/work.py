"""What every engine is asked. Token ids and never text: tokenisers stay out of the comparison.

Ids are drawn from the ordinary part of the vocabulary with a seed that depends on the round, the case and the try, and on
nothing else: every engine gets the same ids, and no engine gets the same ids twice, so no prefix cache helps.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

IDS = range(200, 48000)
LENGTHS_SEED = 7
BATCH_LENGTHS = (64, 256)

Prompt = list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How large the cases are."""

    requests: int = 32
    output: int = 128
    "New tokens a request. No engine may end earlier."
    decode_prompt: int = 128
    prefill: int = 1024
    prefill_prompts: int = 3
    "Prompts of that length, one after another; the median counts."
    clients: int = 16
    neighbour_requests: int = 8
    neighbour_output: int = 32
    "Beside a busy neighbour there is less to do: a spinning engine may be twenty times slower there."
    growth_running: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    growth_prompts: tuple[int, ...] = (128, 256)
    growth_contexts: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    growth_output: int = 24
    growth_sweeps: int = 3
    memory_sequences: int = 16
    memory_tokens: int = 2048
    "The KV cache has room for this many tokens of each of those sequences."


QUICK = Sizes(
    requests=16,
    output=64,
    prefill_prompts=2,
    clients=8,
    neighbour_requests=4,
    neighbour_output=16,
    growth_running=(1, 4, 16, 64),
    growth_prompts=(128,),
    growth_contexts=(256, 1024, 4096),
    growth_output=16,
    growth_sweeps=1,
    memory_sequences=8,
    memory_tokens=1024,
)


def prompt(length: int, *place: int | str) -> Prompt:
    """`place` says where in the run it is used; another place, other ids."""
    rng = Random("/".join(map(str, place)))
    return [rng.choice(IDS) for _ in range(length)]


def batch_lengths(requests: int) -> list[int]:
    """The same in every round: only ids change."""
    rng = Random(LENGTHS_SEED)
    return [rng.randint(*BATCH_LENGTHS) for _ in range(requests)]


def batch(requests: int, *place: int | str) -> list[Prompt]:
    return [prompt(length, *place, number) for number, length in enumerate(batch_lengths(requests))]


def alike(count: int, length: int, *place: int | str) -> list[Prompt]:
    """Prompts of one length."""
    return [prompt(length, *place, number) for number in range(count)]
