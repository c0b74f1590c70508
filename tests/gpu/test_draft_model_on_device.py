"""A draft model on the device: its drafts are those of a plain forward pass, and they change no token.

On a GPU, and elsewhere in Triton's interpreter with fewer requests, as in test_drafts_on_device.py. Pools are full of NaN, so
KV that was never written gives no draft at all.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")

for folder in ("worker", "conformance"):
    sys.path.append(str(Path(__file__).parent.parent / folder))

from rig import TINY, TINY_SEED, Rig, RigModel, tiny_model  # noqa: E402
from test_draft_model import Checked, Watched, sequence_in  # noqa: E402
from test_drafts_on_device import FEW, HAS_GPU, interpreted, on_gpu  # noqa: E402
from test_speculation import NearlyTheSame, requests, run, said  # noqa: E402

from baton.core.events import EvictSome, PreemptSome  # noqa: E402
from baton.models.loaders.dummy import DummyWeights  # noqa: E402
from baton.protocol.progress import ProgressWord  # noqa: E402
from baton.worker.cuda.draft_passes import UNREAD_MAX  # noqa: E402
from baton.worker.drafters.grammar import GrammarDrafter  # noqa: E402

MODES = ["interpreted", "float32", "bfloat16"]


@pytest.fixture(scope="module", params=MODES)
def mode(request) -> str:
    if (request.param == "interpreted") == HAS_GPU:
        pytest.skip("Triton's interpreter and compiler do not share a process" if HAS_GPU else "no GPU here")
    return request.param


def made(mode: str, weights: Any = None, **settings: Any) -> RigModel:
    return interpreted(weights) if mode == "interpreted" else on_gpu(mode, weights, **settings)


def nearly_the_same(mode: str) -> DummyWeights:
    return NearlyTheSame(FEW if mode == "interpreted" else TINY, TINY_SEED)


@pytest.fixture(scope="module")
def model(mode) -> RigModel:
    return made(mode)


@pytest.fixture(scope="module")
def draft(mode) -> RigModel:
    """A draft model that is often right, as a server loads it: without deterministic results, but where they are compared."""
    return made(mode, nearly_the_same(mode), deterministic=mode == "bfloat16", speculate="none")


@pytest.fixture(scope="module")
def oracle(mode) -> RigModel | None:
    """The draft model in torch on the host. None: it rounds differently; then a pass over the whole sequence is compared."""
    config = FEW if mode == "interpreted" else TINY
    return None if mode == "bfloat16" else tiny_model(config, nearly_the_same(mode), compute="torch")


def disturbing(seed: int) -> Callable[[Rig], Callable[[int], None]]:
    def disturb(rig: Rig) -> Callable[[int], None]:
        rng = random.Random(seed)

        def at(step: int) -> None:
            if rng.random() < 0.3:
                rig.dispatch(rng.choice([PreemptSome(1), PreemptSome(3), EvictSome(4)]))
            if step in (5, 11):
                rig.kill_worker()

        return at

    return disturb


@pytest.mark.slow  # a quarter of a minute in the interpreter
def test_every_draft_is_that_of_the_whole_sequence(mode, model, draft, oracle):
    """With shared prefixes, refused drafts, evicted blocks and preempted sequences, with 1 to 4 at once."""
    few = mode == "interpreted"
    one, rng = Checked(model, draft, oracle=oracle, blocks=26, block_size=4, slots=4), random.Random(1)
    shared = [rng.randrange(97) for _ in range(9)]
    for number in range(4 if few else 16):
        tokens = [*shared, *(rng.randrange(97) for _ in range(rng.randint(1, 12)))]
        one.submit(f"p{number}", tokens, max_tokens=8 if few else 30, temperature=0.7 * (number % 2), seed=number % 3)
    disturb = random.Random(2)

    def at(step: int) -> None:
        if disturb.random() < 0.3:
            one.dispatch(disturb.choice([PreemptSome(1), EvictSome(4)]))

    one.run(at)
    one.close()
    accepted = sum(one.instance.stats.accepted_drafts)
    assert one.checked > 8
    assert 0 < accepted < one.instance.stats.drafts


@pytest.mark.slow
def test_the_same_weights_are_always_right(mode, model):
    """One pass for a prompt and one per draft, without rows that were computed before; more rounds than pinned buffers."""
    one = Watched(model, draft=made(mode), drafts_max=6, steps_in_flight=1, slots=4)
    one.submit("a", [*range(10)], max_tokens=15)
    one.run()
    one.close()
    assert one.all_right
    assert sorted(one.rows) == [1] * 10 + [2, 11], "a prompt, the last draft and the token behind it, then drafts"
    plain = run(model, {"a": ([*range(10)], {"max_tokens": 15})}, slots=4)
    assert one.tokens == plain.tokens


@pytest.mark.slow
def test_prompts_in_parts(model, draft, oracle):
    """A prompt of more rows than a pass has room for, beside a short one that gets drafts at once."""
    one = Checked(model, draft, oracle=oracle, blocks=64, block_size=4, slots=4)
    one.submit("long", [number % 97 for number in range(50)], max_tokens=3)
    one.submit("short", [5, 3, 60], max_tokens=12)
    one.runner._draft_model._drafter._passes.rows_max = 24
    one.run()
    one.close()
    assert one.checked
    assert one.instance.stats.drafts


def test_progress_is_reported_in_every_round(model, draft):
    one = Rig(model, draft_model=draft, block_size=16, slots=4, steps_in_flight=1)
    wanted, drafter, batch = sequence_in(one, [*range(11)]), one.runner._draft_model._drafter, one.runner.batch
    word = ProgressWord.create()
    drafter.report_progress(word)
    before = word.value
    assert len(drafter.propose_all(wanted, batch)[next(iter(wanted))]) == 4
    assert word.value >= before + 4
    one.close()


def test_other_work_is_done_while_the_device_drafts(model, draft):
    """Once, and after as many launches as the host does not wait for."""
    one = Rig(model, draft_model=draft, block_size=16, slots=4, steps_in_flight=1)
    wanted, drafter = sequence_in(one, [*range(11)]), one.runner._draft_model._drafter
    steps, rounds, seen = drafter._passes._steps, list[Any](), list[int]()
    launch = steps.launch
    steps.launch = lambda batch: (rounds.append(batch), launch(batch))[1]
    one.runner.call_before_waits(lambda: seen.append(len(rounds)))
    drafter.propose_all(wanted, one.runner.batch)
    assert len(rounds) == 4
    assert seen == [UNREAD_MAX]
    one.close()


def test_a_round_that_is_not_finite_ends_the_drafts(mode, model):
    """Its sequence has those before it, and the others all of theirs."""

    class OneNaN(DummyWeights):
        def raw(self, name: str) -> Any:
            tensor = super().raw(name)
            if "embed" not in name:
                return tensor
            values = tensor.data.view(np.float32).reshape(tensor.shape).copy()
            values[token] = np.nan
            return type(tensor).of_floats(values)

    config = FEW if mode == "interpreted" else TINY
    asked, known = {"a": [5, 3, 60], "b": [9, 8]}, set[int]()

    def drafts(weights: DummyWeights) -> list[list[int]]:
        one = Rig(model, draft_model=made(mode, weights), block_size=16, slots=4, drafts_max=0, steps_in_flight=1)
        for name, tokens in asked.items():
            one.submit(name, tokens, max_tokens=40)
        while not (one.runner.batch.lengths[:2] > 2).all():
            one.step()
        slots, drafter = range(2), one.runner._draft_model._drafter
        known.update(one.runner.batch.tokens[:2, :16].ravel().tolist())
        found = drafter.propose_all(dict.fromkeys(slots, 4), one.runner.batch)
        one.close()
        return [found.get(slot, []) for slot in slots]

    plain = drafts(DummyWeights(config, TINY_SEED))
    token = next(token for token in plain[0][:3] if token not in {*plain[1], *known})
    cut = drafts(OneNaN(config, TINY_SEED))
    assert cut == [plain[0][: plain[0].index(token) + 1], plain[1]]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_drawn_requests_get_the_same_tokens_and_logprobs(model, draft, seed):
    asked = requests(300 + 2 * seed, 2 if model.config is FEW else 8)
    plain = run(model, asked, slots=4)
    whims = None if seed % 2 else seed
    one = run(model, asked, slots=4, drafter=GrammarDrafter, draft_model=draft, whims=whims, steps_in_flight=2)
    assert said(one) == said(plain)
    assert one.instance.stats.drafts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_many_drawn_requests(model, draft, seed):
    if model.config is FEW and seed > 1:
        pytest.skip("for a GPU: the interpreter takes minutes")
    asked = requests(400 + seed, 2 if model.config is FEW else 8)
    plain = run(model, asked, slots=4)
    rig: dict[str, Any] = {"steps_in_flight": 1 + seed % 3, "chunk": (None, 3)[seed % 2], "drafts_max": 1 + seed % 8}
    one = run(model, asked, slots=4, drafter=GrammarDrafter, draft_model=draft, whims=(None, seed)[seed % 2], **rig)
    assert said(one) == said(plain)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_preempted_evicted_and_killed(model, draft, seed):
    asked = requests(50 + seed, 2 if model.config is FEW else 6)
    for _, sampling in asked.values():  # a prompt that is computed twice is delivered twice
        sampling.pop("prompt_logprobs", None)
    plain = run(model, asked, slots=4)
    blocks = {"blocks": 40, "block_size": 4, "steps_in_flight": 2}
    one = run(model, asked, disturbing(seed), slots=4, draft_model=draft, whims=(None, seed)[seed % 2], **blocks)
    assert said(one) == said(plain)
    assert any(one.instance.stats.accepted_drafts)
