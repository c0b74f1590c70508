"""Steps launched ahead of their tokens, with a real model: whatever disturbs them, tokens are those of one step at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from ahead_executor import AheadExecutor, running_ahead
from rig import Rig, RigModel, tiny_model
from test_model_runner import PoisonedWeights

from baton.protocol.request import FinishReason
from baton.protocol.thinking import Thinking


@pytest.fixture(scope="module")
def model() -> RigModel:
    return tiny_model()


@pytest.fixture(scope="module")
def ahead(model: RigModel) -> RigModel:
    return RigModel(model.config, running_ahead(model.loaded))


def requests(seed: int, *, on_host: bool = False) -> dict[str, dict[str, Any]]:
    """Prompts, some of which share their beginning. `on_host`: some are sampled in ways that do not run ahead."""
    rng = random.Random(seed)
    shared = [rng.randrange(97) for _ in range(10)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "top_p": 0.9, "seed": 6},
    ]
    if on_host:
        kinds += [{"presence_penalty": 0.8, "frequency_penalty": 0.2}, {"logprobs": 2}, {"bad_words": ((3,), (4, 5))}]
        kinds += [{"thinking": Thinking(end=96, budget=5, is_open=True), "temperature": 0.7, "seed": 3}]
    made = {}
    for number in range(14):
        prompt = shared * (number % 2) + [rng.randrange(97) for _ in range(rng.randint(1, 40))]
        made[f"r{number}"] = {"prompt": prompt, "max_tokens": rng.randint(1, 24), **kinds[number % len(kinds)]}
    return made


def run(model: RigModel, wanted: dict[str, dict[str, Any]], disturb=None, **settings: Any) -> Rig:
    rig = Rig(model, **settings)
    for name, asked in wanted.items():
        rig.submit(name, **asked)
    rig.run(None if disturb is None else lambda number: disturb(rig, number))
    return rig


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "settings", [{}, {"chunk": 5}, {"blocks": 40, "chunk": 7, "slots": 6}, {"steps_in_flight": 4}], ids=str
)
def test_tokens_are_those_of_one_step_at_a_time(model, ahead, seed, settings, on_host):
    wanted = requests(seed, on_host=on_host)
    expected = run(model, wanted, steps_in_flight=1)
    rig = run(ahead, wanted, **settings)
    assert rig.tokens == expected.tokens
    assert isinstance(rig.runner.executor, AheadExecutor)
    assert on_host or rig.runner.executor.fed_back > 20
    assert {key: [row.sampled for row in rows] for key, rows in rig.logprobs.items()} == {
        key: [row.sampled for row in rows] for key, rows in expected.logprobs.items()
    }


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_that_dies_with_steps_under_way(model, ahead, seed):
    wanted, chance = requests(seed), random.Random(seed)
    deaths = [chance.randint(2, 12), chance.randint(15, 30)]
    rig = run(ahead, wanted, lambda rig, number: rig.kill_worker() if number in deaths else None, chunk=9)
    assert rig.tokens == run(model, wanted, steps_in_flight=1).tokens


def test_a_failure_that_is_known_late_ends_one_sequence_only():
    """Nothing that was computed of it, before or after it was known, is used by anybody."""
    sick = tiny_model(weights=PoisonedWeights(50))
    sound = tiny_model()
    prompts = {"well": [1, 2, 3, 4, 5, 6], "sick": [1, 2, 3, 50, 4, 5, 6], "other": [9, 8, 7], "late": [1, 2, 3, 50]}
    wanted = {name: {"prompt": prompt, "max_tokens": 8, "bad_words": ((50,),)} for name, prompt in prompts.items()}
    rig = run(RigModel(sick.config, running_ahead(sick.loaded)), wanted, chunk=3)
    healthy = run(sound, {name: wanted[name] for name in ("well", "other")})
    for name in ("sick", "late"):
        assert rig.ended[name, 0].reason is FinishReason.ERROR
        assert (name, 0) not in rig.tokens
    assert {key: tokens for key, tokens in rig.tokens.items() if tokens} == dict(healthy.tokens)
