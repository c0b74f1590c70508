"""Drafts change the number of steps and nothing else: tokens and log-probabilities are those of a run without drafts.

The oracle is the same rig without a drafter. Drafts come from three drafters: the real one (ngram), one that knows the right
answer and spoils a share of it, and one that guesses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ahead_executor import running_ahead
from rig import TINY, TINY_SEED, Rig, RigModel, tiny_model
from test_grammar_runs import END, GRAMMARS, TOKENS

from baton.core.events import EvictSome, PreemptSome
from baton.grammar.vocabulary import Vocabulary
from baton.models.loaders.dummy import DummyWeights
from baton.models.parameters import LM_HEAD
from baton.models.raw_tensor import RawTensor
from baton.protocol.repetition import RepetitionStop
from baton.protocol.request import FinishReason
from baton.protocol.step import BatchRows
from baton.protocol.thinking import Thinking
from baton.worker.drafters import drafter_of
from baton.worker.drafters.base import Drafter
from baton.worker.drafters.grammar import GrammarDrafter
from baton.worker.drafters.model_price import ModelPrice
from baton.worker.drafters.ngram import NgramDrafter
from baton.worker.drafters.passes import UNBOUNDED
from baton.worker.drafters.price import DraftPrice
from baton.worker.in_flight_step import BatchMembers

MODES = {
    "none": {"compute": "native"},
    "int8": {"compute": "native", "quantization": "int8"},
    "int4": {"compute": "native", "quantization": "int4"},
    "torch": {"compute": "torch"},
}


class Recorded:
    """Proposes the right continuation, of which each token is spoiled with a probability."""

    def __init__(self, answers: Sequence[list[int]], spoilt: float, seed: int = 0) -> None:
        """`answers`: prompts with their outputs."""
        self._answers, self._spoilt, self._rng = answers, spoilt, random.Random(seed)
        self.drafted = self.accepted_count = 0

    def assign_slot(self, slot: int, grammar: Any = None) -> None:
        pass

    def propose(self, slot: int, tokens: np.ndarray, most: int) -> list[int]:
        known = tokens.tolist()
        answer = next((answer for answer in self._answers if answer[: len(known)] == known), known)
        draft = [*answer[len(known) :], *(self._rng.randrange(97) for _ in range(most))][:most]
        return [self._rng.randrange(97) if self._rng.random() < self._spoilt else token for token in draft]

    def accepted(self, slot: int, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted_count += accepted

    def drop(self, slot: int) -> None:
        pass


@pytest.fixture(scope="module", params=MODES)
def mode(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(mode) -> RigModel:
    vocabulary = Vocabulary(TOKENS, [END], len(TOKENS))
    return replace(tiny_model(**MODES[mode]), vocabulary=lambda: vocabulary)


@pytest.fixture(scope="module")
def draft(mode) -> RigModel:
    """A draft model that is often right, computed as the main model is."""
    return tiny_model(weights=NearlyTheSame(TINY, TINY_SEED), **MODES[mode])


class NearlyTheSame(DummyWeights):
    """Weights of a draft model that is often right."""

    def raw(self, name: str) -> RawTensor:
        tensor = super().raw(name)
        if name != LM_HEAD:
            return tensor
        noise = np.random.default_rng(2).standard_normal(tensor.shape, np.float32)
        return RawTensor.of_floats(tensor.data.view(np.float32).reshape(tensor.shape) + 0.1 * noise)


class Whims(ModelPrice):
    """Runs some drafts, looks at others, and computes prompts for the draft model in parts, as a clock might decide."""

    def __init__(self, seed: int) -> None:
        super().__init__(float)
        self._rng = random.Random(seed)

    def choose(
        self, sequences: int, rows: int, lacking: Mapping[int, int], most: Mapping[int, int], room: int = UNBOUNDED
    ) -> dict[int, int]:
        each = room // max(1, len(lacking))
        return {slot: self._rng.randint(1, min(each, most[slot])) for slot in lacking if each and self._rng.random() < 0.8}

    def catch_up_rows(self, sequences: int) -> int:
        return self._rng.choice((0, 3, 16))


def drawn(rng: random.Random) -> dict[str, Any]:
    """A request with any of the sampling features."""

    def some(chance: float, **settings: Any) -> dict[str, Any]:
        return settings if rng.random() < chance else {}

    settings = {
        "max_tokens": rng.randint(1, 24),
        "n": rng.choice((1, 1, 1, 3)),
        "seed": rng.randrange(1000),
        **some(0.6, temperature=rng.choice((0.3, 0.8, 1.2)), top_p=rng.choice((1.0, 0.9)), top_k=rng.choice((-1, 5, 40))),
        **some(0.2, min_p=0.05),
        **some(0.5, logprobs=rng.choice((0, 2))),
        **some(0.1, prompt_logprobs=1),
        **some(0.2, repetition_penalty=1.3),
        **some(0.2, presence_penalty=0.6, frequency_penalty=rng.choice((0.4, -0.4))),
        **some(0.2, logit_bias=((rng.randrange(97), rng.choice((3.0, -3.0))), (rng.randrange(97), -100.0))),
        **some(0.2, bad_words=((rng.randrange(97),), (rng.randrange(97), rng.randrange(97)))),
        **some(0.3, stop_token_ids=tuple(rng.sample(range(97), 6))),
        **some(0.2, min_tokens=rng.randint(1, 8)),
        **some(0.1, thinking=Thinking(end=94, budget=rng.randint(0, 6), start=93, is_open=rng.random() < 0.7)),
        **some(0.1, repetition_stop=RepetitionStop(pattern_min=1, pattern_max=3, count_min=2)),
    }
    if rng.random() < 0.2:
        settings |= {"grammar": GRAMMARS[rng.choice(list(GRAMMARS))], "stop_token_ids": (END,), "max_tokens": 40}
    settings["min_tokens"] = min(settings.get("min_tokens", 0), settings["max_tokens"])
    return settings


def prompt(rng: random.Random) -> list[int]:
    """Often repeats itself, so that an n-gram is found."""
    part = [rng.randrange(97) for _ in range(rng.randint(1, 12))]
    return part * rng.choice((1, 2, 3))


Requests = dict[str, tuple[list[int], dict[str, Any]]]


def requests(seed: int, count: int) -> Requests:
    rng = random.Random(seed)
    return {f"p{i}": (prompt(rng), drawn(rng)) for i in range(count)}


def said(rig: Rig) -> dict[tuple[str, int], Any]:
    """Everything that a client gets. In torch a row's bits depend on the batch: tokens and ends only."""
    ends = {key: (end.reason, end.error, end.detail, end.output_tokens) for key, end in rig.ended.items()}
    if rig.runner.executor.name == "torch":
        return {key: (rig.tokens[key], ends[key]) for key in ends}
    words = {key: [row.sampled for row in rig.logprobs[key] if row.sampled is not None] for key in ends}
    return {key: (rig.tokens[key], words[key], ends[key]) for key in ends}


def run(
    model: RigModel,
    asked: Requests,
    disturb: Callable[[Rig], Callable[[int], None]] | None = None,
    *,
    whims: int | None = None,
    **rig: Any,
) -> Rig:
    """`whims`: a seed; the price of the draft model decides by chance. None: all its drafts run."""
    one = Rig(model, **rig)
    if whims is not None:
        one.runner._draft_model._price = Whims(whims)
    for name, (tokens, sampling) in asked.items():
        one.submit(name, tokens, **sampling)
    one.run(None if disturb is None else disturb(one))
    one.close()
    return one


def check(model: RigModel, draft: RigModel, seed: int, count: int, **rig: Any) -> int:
    """Number of accepted drafts of the draft model; few short answers may have none."""
    asked = requests(seed, count)
    plain = run(model, asked, slots=4)
    expected = said(plain)
    answers = [asked[name][0] + tokens for (name, _), tokens in plain.tokens.items()]
    for spoilt, most in ((0.0, 8), (0.2, 4), (0.5, 2), (1.0, 3)):
        drafter = Recorded(answers, spoilt, seed)
        one = run(model, asked, slots=4, drafter=lambda drafter=drafter: drafter, drafts_max=most, **rig)
        assert said(one) == expected
        assert drafter.drafted
        assert drafter.accepted_count or spoilt == 1.0
    for name in ("ngram", "grammar", "auto"):
        assert said(run(model, asked, slots=4, drafter=lambda name=name: drafter_of(name), **rig)) == expected
    accepted = 0
    for whims in (None, seed):
        one = run(model, asked, slots=4, drafter=GrammarDrafter, draft_model=draft, whims=whims, **rig)
        assert said(one) == expected
        assert sum(one.instance.stats.accepted_drafts) < one.instance.stats.drafts
        accepted += sum(one.instance.stats.accepted_drafts)
    return accepted


def test_drawn_requests_get_the_same_tokens_and_logprobs(model, draft, mode):
    """Other requests in each mode."""
    assert check(model, draft, [*MODES].index(mode), 8)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 225, 25))
def test_a_thousand_drawn_requests(model, draft, first):
    for seed in range(first, first + 25):
        check(model, draft, seed, 8, steps_in_flight=1 + seed % 3, chunk=(None, 3)[seed % 2])


def test_preempted_evicted_and_killed(model, draft, mode):
    seed = [*MODES].index(mode)
    asked = requests(50 + seed, 6)
    for _, sampling in asked.values():  # a prompt that is computed twice is told twice
        sampling.pop("prompt_logprobs", None)
    plain = run(model, asked)
    answers = [asked[name][0] + tokens for (name, _), tokens in plain.tokens.items()]

    def disturb(rig: Rig) -> Callable[[int], None]:
        rng = random.Random(seed)

        def at(step: int) -> None:
            if rng.random() < 0.3:
                rig.dispatch(rng.choice([PreemptSome(1), PreemptSome(3), EvictSome(4)]))
            if step in (5, 11):
                rig.kill_worker()

        return at

    for blocks, whims in ((24, None), (60, seed)):
        drafter = Recorded(answers, 0.3, seed)
        one = run(model, asked, disturb, blocks=blocks, block_size=4, drafter=lambda drafter=drafter: drafter)
        assert said(one) == said(plain)
        assert one.instance.stats.preemptions
        assert drafter.accepted_count
        one = run(model, asked, disturb, blocks=blocks, block_size=4, draft_model=draft, whims=whims)
        assert said(one) == said(plain)
        assert one.instance.stats.preemptions
        assert any(one.instance.stats.accepted_drafts)


def test_steps_that_run_ahead(model, draft):
    """As on a GPU: a step with drafts is collected before the next one is launched, and others run ahead."""
    asked = requests(70, 6) | {"plain": ([5, 3, 60], {"max_tokens": 30, "drafts_max": 0})}
    expected = run(model, asked)
    drafter = Recorded([asked[name][0] + tokens for (name, _), tokens in expected.tokens.items()], 0.4)
    ahead = replace(model, loaded=running_ahead(model.loaded))
    one = run(ahead, asked, draft_model=draft, steps_in_flight=2)
    assert said(one) == said(expected)
    assert any(one.instance.stats.accepted_drafts)
    one = run(ahead, asked, drafter=lambda: drafter, steps_in_flight=2)
    assert said(one) == said(expected)
    assert drafter.accepted_count
    assert one.ended["plain", 0].drafted_tokens == 0


class AllPay(DraftPrice):
    """Runs all drafts, whatever the clock says."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def choose(self, sequences: int, drafts: Mapping[int, int], *, waits: bool = True) -> dict[int, int]:
        return dict(drafts)

    def worth_waiting(self, step: int) -> bool:
        self.waits.append(super().worth_waiting(step))
        return self.waits[-1]


@pytest.mark.parametrize("found", [True, False])
def test_steps_run_ahead_where_no_drafts_are_found(model, found):
    asked = {"a": ([5, 3, 60], {"max_tokens": 60})}
    expected = run(model, asked)
    answers = [[5, 3, 60, *expected.tokens["a", 0]]] if found else []
    ahead = replace(model, loaded=running_ahead(model.loaded))
    one = Rig(ahead, drafter=lambda: Recorded(answers, 0.0) if found else GrammarDrafter(), steps_in_flight=2)
    one.runner._price = price = AllPay()
    one.submit("a", [5, 3, 60], **asked["a"][1])
    one.run()
    one.close()
    assert one.tokens == expected.tokens
    assert all(price.waits) if found else sum(price.waits) < len(price.waits) / 4


def test_drafts_are_not_charged_for_a_wait_that_a_grammar_needs(model):
    """Every step of a sequence with a grammar waits for its last token. What the device is idle then is no cost of drafts."""
    form = {"max_tokens": 40, "grammar": GRAMMARS["schema"], "stop_token_ids": (END,)}
    one = Rig(replace(model, loaded=running_ahead(model.loaded)), drafter=GrammarDrafter, steps_in_flight=2)
    watched: list[bool] = []

    class Watched(AllPay):
        def choose(self, sequences: int, drafts: Mapping[int, int], *, waits: bool = True) -> dict[int, int]:
            watched.append(waits)
            return dict(drafts)

        def waited_for_nothing(self, rows: int, seconds: float) -> None:
            raise AssertionError("the step would have waited without drafts too")

        def measured(self, rows: int, seconds: float, *, waited: bool = False) -> None:
            assert not waited
            super().measured(rows, seconds)

    one.runner._price = Watched()
    one.submit("a", [5, 3, 60], **form)
    one.run()
    one.close()
    assert watched
    assert not any(watched)


def test_a_batch_is_prepared_once_whatever_room_its_drafts_have(model, monkeypatch):
    made: list[BatchRows] = []

    class Counted(BatchMembers):
        def __init__(self, run: BatchRows, *others: Any) -> None:
            made.append(run)
            super().__init__(run, *others)

    monkeypatch.setattr("baton.worker.model_runner.BatchMembers", Counted)
    one = run(model, {"a": ([5, 3, 60], {"max_tokens": 30})}, drafter=NgramDrafter, drafts_max=4, steps_in_flight=1)
    assert len({plan.run.drafts for plan, _ in one.history}) > 2
    assert len({(run.slots, run.counts) for run in made}) == len(made)


def test_accepted_drafts_save_steps(model):
    asked = {"a": ([5, 3, 60], {"max_tokens": 41})}
    plain = run(model, asked)
    answers = [[5, 3, 60, *plain.tokens["a", 0]]]
    fast = run(model, asked, drafter=lambda: Recorded(answers, 0.0), drafts_max=4, steps_in_flight=1)
    assert fast.tokens == plain.tokens
    assert len(fast.history) == 1 + 8 + 1  # the prompt, 40 tokens by fives, the drop
    assert fast.instance.stats.accepted_drafts == [8, 8, 8, 8]


def test_several_sequences_of_other_lengths_in_one_step(model):
    """Rows with many drafts, with few and with none lie side by side."""
    asked = {f"p{i}": ([7 * i + 1, 3, i], {"max_tokens": 6 + 5 * i, "logprobs": 1}) for i in range(6)}
    plain = run(model, asked)
    answers = [asked[name][0] + tokens for (name, _), tokens in plain.tokens.items()]
    one = run(model, asked, drafter=lambda: Recorded(answers, 0.3), tokens_per_step=17, drafts_max=6)
    assert said(one) == said(plain)
    assert any(len(set(plan.run.drafts)) > 1 for plan, _ in one.history)


@pytest.mark.parametrize("mode", ["none", "torch"])
@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_draft_whose_row_is_not_finite_is_only_refused(mode, most):
    """Token 50's embedding is NaN. No answer contains it, and drafts of it must not end one: in one pass of the attention its
    NaN reaches the rows before it."""

    class OneNaN(DummyWeights):
        def raw(self, name: str) -> RawTensor:
            if "embed" not in name:
                return super().raw(name)
            values = np.random.default_rng(1).standard_normal(self._shapes[name], np.float32)
            values[50] = np.nan
            return RawTensor.of_floats(values)

    model = tiny_model(weights=OneNaN(TINY, TINY_SEED), **MODES[mode])
    asked = {"a": ([5, 3, 60], {"max_tokens": 20, "logit_bias": ((50, -100.0),)}), "b": ([9, 8], {"max_tokens": 20})}
    plain = run(model, asked)

    class Bad(Recorded):
        def propose(self, slot: int, tokens: np.ndarray, most: int) -> list[int]:
            return [*super().propose(slot, tokens, most)[: most - 1], 50]

    answers = [asked[name][0] + tokens for (name, _), tokens in plain.tokens.items()]
    one = run(model, asked, drafter=lambda: Bad(answers, 0.0), drafts_max=most)
    assert said(one) == said(plain)
    assert {end.reason for end in one.ended.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("kind", GRAMMARS)
def test_forced_text_is_drafted(model, kind):
    asked = {
        f"p{i}": ([i + 1, 2 * i], {"max_tokens": 60, "grammar": GRAMMARS[kind], "stop_token_ids": (END,)}) for i in range(4)
    }
    plain, one = run(model, asked), run(model, asked, drafter=GrammarDrafter, steps_in_flight=1)
    assert said(one) == said(plain)
    drafts, accepted = one.instance.stats.drafts, sum(one.instance.stats.accepted_drafts)
    if kind == "regex":  # nothing but the last digit's neighbours is forced there
        return
    assert 0 < accepted <= drafts
    assert accepted == drafts or kind == "schema", "only white space is guessed"
    assert len(one.history) < len(plain.history)


def test_ngram_repeats_what_followed():
    drafter: Drafter = NgramDrafter()
    drafter.assign_slot(0)
    tokens = np.array([1, 2, 3, 4, 5, 6, 9, 2, 3, 4], np.int32)
    assert list(drafter.propose(0, tokens, 3)) == [5, 6, 9]
    assert list(drafter.propose(0, np.append(tokens, np.int32(5)), 2)) == [6, 9]
    assert list(drafter.propose(0, np.append(tokens, np.int32([5, 7])), 2)) == []
    drafter.drop(0)


def test_ngram_indices_have_one_bound_for_all_sequences(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("baton.worker.drafters.ngram.TOKENS_MAX", 12)
    drafter, tokens = NgramDrafter(), np.array([1, 2, 3, 4, 5, 1, 2, 3], np.int32)
    for slot in (0, 1):
        drafter.assign_slot(slot)
    assert list(drafter.propose(0, tokens, 2)) == [4, 5]
    assert list(drafter.propose(1, tokens, 2)) == []
    assert list(drafter.propose(0, np.append(tokens, np.int32(4)), 2)) == [5, 1]
    drafter.assign_slot(0)  # without a drop
    assert list(drafter.propose(1, tokens, 2)) == [4, 5]
    for slot in (0, 1):
        drafter.drop(slot)
        drafter.assign_slot(slot)
    assert list(drafter.propose(0, tokens, 2)) == [4, 5]


def test_ngram_goes_on_with_a_repetition():
    drafter = NgramDrafter()
    drafter.assign_slot(3)
    assert list(drafter.propose(3, np.array([8, 1, 2, 1, 2, 1, 2], np.int32), 5)) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("seed", range(20))
def test_ngram_index_equals_a_search(seed):
    """The longest of 4, 3, 2 last tokens that occurred before, most recently: found by looking everywhere."""
    rng, drafter, tokens = random.Random(seed), NgramDrafter(), list[int]()
    drafter.assign_slot(0)
    for _ in range(12):
        tokens += [rng.randrange(4) for _ in range(rng.choice((1, 2, 40)))]
        known, expected = tokens, list[int]()
        for length in (4, 3, 2):
            places = [at for at in range(length, len(known)) if known[at - length : at] == known[-length:]]
            if places and len(known) >= length:
                expected = known[places[-1] : places[-1] + 3]
                while len(expected) < 3:
                    expected.append(expected[len(expected) + places[-1] - len(known)])
                break
        assert list(drafter.propose(0, np.array(tokens, np.int32), 3)) == expected
