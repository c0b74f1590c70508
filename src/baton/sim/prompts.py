"""Shared by all generators: named random streams, and prompts with common prefixes."""

from __future__ import annotations

from random import Random

from baton.sim.scenario import VOCAB


def stream(seed: int, name: str) -> Random:
    """A named random stream. Text seeds do not depend on PYTHONHASHSEED."""
    return Random(f"baton/{seed}/{name}")


class PromptTree:
    """Tree of prompts with three levels: a few openings, a few continuations, own words. Lengths often end on a block's
    edge."""

    def __init__(self, rng: Random, block_size: int) -> None:
        def words(count: int) -> list[int]:
            return [rng.randrange(VOCAB) for _ in range(count)]

        self._size = block_size
        self._openings = [words(rng.choice((0, block_size, 2 * block_size, 13))) for _ in range(2)]
        self._middles = [words(rng.choice((0, block_size, 5))) for _ in range(2)]

    def prompt(self, rng: Random) -> list[int]:
        prompt = rng.choice(self._openings) + rng.choice(self._middles)
        if rng.random() < 0.6 or not prompt:
            prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, self._size, rng.randint(1, 24))))]
        return prompt[:80]
