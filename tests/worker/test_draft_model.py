"""A draft model with the weights of its main model is always right: a draft that is refused shows KV that is not its tokens'.

Pools of the rig are full of NaN, so KV that was never written gives no draft at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ahead_executor import running_ahead
from rig import TINY, TINY_SEED, Rig, RigModel, tiny_model
from test_speculation import NearlyTheSame

from baton.core.events import EvictSome, PreemptSome
from baton.models.config import ModelConfig
from baton.testing.step_rig import make_model_drafter
from baton.worker.drafters.draft_kv import DraftKV
from baton.worker.drafters.model import ModelDrafter
from baton.worker.drafters.price import DraftPrice
from baton.worker.flat_batch import FlatBatch
from baton.worker.input_batch import InputBatch

MODES = {"none": {"compute": "native"}, "int8": {"compute": "native", "quantization": "int8"}}


@pytest.fixture(scope="module", params=MODES)
def model(request) -> RigModel:
    return tiny_model(**MODES[request.param])


def prompts(count: int, seed: int = 1) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {f"p{i}": [rng.randrange(97) for _ in range(rng.randint(1, 30))] for i in range(count)}


def other_weights(model: RigModel, config: ModelConfig = TINY) -> RigModel:
    """A draft model that is often right."""
    mode = {"compute": "native", "quantization": "none" if model.loaded.kv.dtype == "float32" else "int8"}
    return tiny_model(config, NearlyTheSame(config, TINY_SEED), **mode)


class Watched(Rig):
    """Records the rows of the draft model's passes, and whether drafts were right."""

    def __init__(self, model: RigModel, *, draft: RigModel | None = None, **rig: object) -> None:
        self.rows: list[int] = []
        super().__init__(model, draft_model=draft or model, **rig)

    def step(self) -> bool:
        drafting = self.runner._draft_model
        assert drafting is not None
        drafting._drafter.passed = lambda rows, seconds: self.rows.append(rows)
        return super().step()

    @property
    def all_right(self) -> bool:
        stats = self.instance.stats
        return sum(stats.accepted_drafts) == stats.drafts > 0


Disturb = Callable[[Rig], Callable[[int], None]]


def run(
    model: RigModel, disturb: Disturb | None = None, *, asked: dict[str, list[int]] | None = None, **rig: object
) -> Watched:
    one = Watched(model, **rig)
    for name, prompt in (asked or prompts(6)).items():
        one.submit(name, prompt, max_tokens=30)
    one.run(None if disturb is None else disturb(one))
    one.close()
    return one


def plain_tokens(model: RigModel, asked: dict[str, list[int]] | None = None) -> dict[tuple[str, int], list[int]]:
    plain = Rig(model)
    for name, prompt in (asked or prompts(6)).items():
        plain.submit(name, prompt, max_tokens=30)
    tokens = plain.run()
    plain.close()
    return tokens


def test_the_same_weights_are_always_right(model):
    one = run(model)
    assert one.all_right
    assert one.tokens == plain_tokens(model)
    assert len(one.history) < 15, "30 tokens by fives, a prompt and a drop"


@pytest.mark.parametrize("seed", range(3))
def test_preempted_evicted_and_killed(model, seed):
    def disturb(rig: Rig) -> Callable[[int], None]:
        rng = random.Random(seed)

        def at(step: int) -> None:
            if rng.random() < 0.3:
                rig.dispatch(rng.choice([PreemptSome(1), PreemptSome(3), EvictSome(4)]))
            if step in (5, 11):
                rig.kill_worker()

        return at

    for blocks in (24, 60):
        one = run(model, disturb, blocks=blocks, block_size=4)
        assert one.all_right
        assert one.tokens == plain_tokens(model)
        assert one.instance.stats.preemptions


def test_equal_prompts_at_once_share_blocks(model):
    """Blocks of the second sequence are folded into those of the first, which the draft model may not have computed."""
    asked = {f"p{i}": [*range(20), 30 + i] for i in range(4)}
    one = run(model, asked=asked, chunk=8)
    assert one.all_right
    assert one.tokens == plain_tokens(model, asked)
    assert any(plan.deduplicated for plan, _ in one.history)


def test_a_prefix_hit_is_one_for_the_draft_model_too(model):
    one, prompt = Watched(model), list(range(40, 83))
    rows = []
    for name in ("first", "second"):
        one.rows.clear()
        one.submit(name, [*prompt, len(name)], max_tokens=11)
        one.run()
        rows.append(one.rows[0])
    assert one.all_right
    assert rows == [45, 45 - 40], "the prompt and a token, without its whole blocks"
    one.close()


class Checked(Rig):
    """Compares every draft with that of a draft model that computes the whole sequence."""

    def __init__(self, model: RigModel, draft: RigModel, *, oracle: RigModel | None = None, **rig: Any) -> None:
        """`oracle`: computes the same draft model; None: as the drafts are computed."""
        self._model, self._oracle, self.checked = model, oracle or draft, 0
        super().__init__(model, draft_model=draft, **rig)

    def step(self) -> bool:
        used = self.runner._draft_model._drafter
        if "propose_all" not in vars(used):
            layout, slots = self.runner.pool.layout, len(self.runner.batch.lengths)
            naive, proposed = make_model_drafter(self._oracle, self._model, self.runner.pool, slots=slots), used.propose_all

            def propose_all(wanted: Mapping[int, int], batch: InputBatch, rows: int = 256) -> dict[int, list[int]]:
                found = proposed(wanted, batch, rows)
                naive._kv = DraftKV(slots=slots, blocks=self.runner.pool.blocks, block_size=layout.block_size)
                expected = naive.propose_all({slot: wanted[slot] for slot in found}, batch, 1 << 20)
                assert found == expected
                self.checked += len(found)
                return found

            used.propose_all = propose_all
        return super().step()


@pytest.mark.parametrize("seed", range(3))
def test_every_draft_is_that_of_the_whole_sequence(model, seed):
    """Also where drafts are refused, and their KV lies where that of other tokens was."""
    rng = random.Random(seed)
    one = Checked(model, other_weights(model), blocks=30, block_size=4, slots=4)
    shared = [rng.randrange(97) for _ in range(9)]
    for number in range(10):
        one.submit(f"p{number}", [*shared, *prompts(10)[f"p{number}"]], max_tokens=30, temperature=0.7, seed=number % 3)

    def disturb(step: int) -> None:
        if rng.random() < 0.3:
            one.dispatch(rng.choice([PreemptSome(1), EvictSome(4)]))

    one.run(disturb)
    one.close()
    accepted = sum(one.instance.stats.accepted_drafts)
    assert one.checked > 50
    assert 0 < accepted < one.instance.stats.drafts


def seen_by(drafter: ModelDrafter) -> list[FlatBatch]:
    """The batches that the draft model computes from now on."""
    seen, forward = list[FlatBatch](), drafter._passes._forward  # type: ignore[attr-defined]
    hidden = forward.hidden

    def recorded(flat: FlatBatch) -> Any:
        seen.append(flat)
        return hidden(flat)

    forward.hidden = recorded
    return seen


def sequence_in(one: Rig, tokens: list[int]) -> dict[int, int]:
    """Puts a sequence into a slot, and returns how many drafts it may have."""
    one.submit("a", tokens, max_tokens=40)
    one.step()
    return {int(np.flatnonzero(one.runner.batch.lengths)[0]): 4}


@pytest.mark.parametrize("width", [80, 120])
def test_heads_of_other_widths(width):
    """Drafts that the main model has no token for are cut; tokens that the draft model lacks are read as another."""
    model = tiny_model(compute="native")
    draft = other_weights(model, replace(TINY, vocab_size=width))
    lengths = set()
    for first in range(20):
        one = Rig(model, draft_model=draft, block_size=16)
        wanted, drafter = sequence_in(one, [first, 96]), one.runner._draft_model._drafter
        seen = seen_by(drafter)
        found = [draft for drafts in drafter.propose_all(wanted, one.runner.batch).values() for draft in drafts]
        assert all(draft < 97 for draft in found)
        assert all(flat.token_ids.max() < width for flat in seen)
        lengths.add(len(found))
        one.close()
    assert lengths == ({4} if width < 97 else {0, 1, 2, 3, 4})


def test_a_draft_can_be_asked_for_again():
    """Where every token is computed already, the last one is computed again."""
    model = tiny_model(compute="native")
    one = Rig(model, draft_model=model, block_size=16)
    wanted, drafter, batch = sequence_in(one, [*range(11)]), one.runner._draft_model._drafter, one.runner.batch
    first = drafter.propose_all(wanted, batch)
    (slot,) = wanted
    assert len(first[slot]) == 4
    assert drafter.behind(slot, batch) == 1
    assert drafter.propose_all(wanted, batch) == first
    one.close()


def test_accepted_drafts_are_not_computed_again(model):
    one = Watched(model)
    one.submit("a", [*range(10)], max_tokens=21)
    one.run()
    one.close()
    assert one.rows == [11, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1], "the last draft and the token behind it, then drafts"


def test_a_prompt_is_computed_in_parts():
    model, prompt = tiny_model(compute="native"), list(range(90)) * 4
    one = Watched(model, blocks=400)
    one.submit("long", prompt, max_tokens=30)
    one.run()
    one.close()
    assert one.rows[:2] == [256, 361 + 1 - 256], "the first part, then the rest with the token of the step beside it"
    assert one.all_right


def test_no_more_drafts_than_the_executor_takes(model):
    """A GPU has memory for some rows of drafts."""
    one = Watched(model)
    one.runner.executor.draft_rows_max = 7
    for name, prompt in prompts(6).items():
        one.submit(name, prompt, max_tokens=30)
    one.run()
    one.close()
    assert max(sum(result.drafted) for _, result in one.history) == 7
    assert one.tokens == plain_tokens(model)


def test_the_time_of_the_draft_model_is_not_that_of_the_step(model, monkeypatch):
    """Where steps run ahead, time counts from the tokens before a step on, and the draft model computes in between."""
    clock = [0.0]
    monkeypatch.setattr("baton.worker.model_runner.perf_counter", lambda: clock[0])
    one = Watched(replace(model, loaded=running_ahead(model.loaded)), draft=model, steps_in_flight=2)
    measured: list[float] = []

    class Price(DraftPrice):
        def measured(self, rows: int, seconds: float, *, waited: bool = False) -> None:
            measured.append(seconds)

        def waited_for_nothing(self, rows: int, seconds: float) -> None:
            measured.append(seconds)

    one.runner._price = price = Price()
    drafting = one.runner._draft_model
    proposed = drafting._drafter.propose_all

    def slowly(*given: Any) -> dict[int, list[int]]:
        clock[0] += 100.0
        return proposed(*given)

    drafting._drafter.propose_all = slowly
    submit = one.runner.submit

    def step(plan: Any) -> Any:
        launched = submit(plan)
        clock[0] += 1.0
        return launched

    one.runner.submit = step
    one.submit("a", [5, 3, 60], max_tokens=40)
    one.run()
    one.close()
    assert clock[0] > 100.0
    assert measured
    assert max(measured) < 10.0
    assert price.has_waited


def test_longer_sequences_than_the_draft_models_context_have_no_drafts():
    model = tiny_model(compute="native")
    one = Rig(model, draft_model=tiny_model(replace(TINY, context_tokens_max=20), compute="native"))
    seen = seen_by(one.runner._draft_model._drafter)
    one.submit("a", list(range(10)), max_tokens=30)
    assert len(one.run()["a", 0]) == 30
    assert max(flat.positions.max() for flat in seen) == 18, "position 19 is that of the last draft"
    one.close()
    assert sum(one.instance.stats.accepted_drafts) == one.instance.stats.drafts > 0
