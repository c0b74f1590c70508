"""Whole steps against transformers with the same random weights: prompts in chunks, decode, both in one step, feedback."""

import pytest
import torch

pytest.importorskip("transformers", reason="the oracle of this test")
from step_rig import TINY, StepRig, make_models

from baton.worker.cuda.step_inputs import MixedPadding


def relative(found, wanted):
    assert torch.isfinite(found).all()
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def bound(place, config=None):
    """In bfloat16 a row may get another expert than in transformers, where two are about equal."""
    mixture = config is not None and config.experts is not None
    return 1e-5 if place.dtype == torch.float32 else 0.2 if mixture else 0.04


def their_logits(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens], device=model.device)).logits[0].float()


SELDOM = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2", "qwen3", "qwen3_moe")]


@pytest.fixture(params=["llama", *SELDOM])
def models(request, place):
    torch.manual_seed(1)
    return make_models(request.param, place.device, place.dtype, **TINY)


def random_tokens(place, *counts):
    return [place.rng.integers(0, TINY["vocabulary"], count).tolist() for count in counts]


@pytest.mark.slow
def test_logits_of_prompts_and_decode(place, models):
    theirs, config, weights = models
    rig = StepRig(config, weights)
    one, two, three = random_tokens(place, 20, 12, 45)
    # A prompt in one go; another one in chunks, beside it and beside decode.
    tokens, logits = rig.run({3: (0, one[:15]), 5: (0, two[:6]), 0: (0, three[:36])}, due=[True, False, True])
    assert relative(logits[0], their_logits(theirs, one[:15])[-1]) < bound(place, config)
    assert relative(logits[1], their_logits(theirs, three[:36])[-1]) < bound(place, config)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    _, logits = rig.run({3: (15, [one[15]]), 5: (6, two[6:9]), 0: (36, [three[36]])})
    for row, wanted in enumerate((one[:16], two[:9], three[:37])):
        assert relative(logits[row], their_logits(theirs, wanted)[-1]) < bound(place, config)
    # Decode, padded: then alone.
    _, logits = rig.run({0: (37, [three[37]]), 3: (16, [one[16]])}, bucket=4)
    for row, wanted in enumerate((three[:38], one[:17])):
        assert relative(logits[row], their_logits(theirs, wanted)[-1]) < bound(place, config)
    _, logits = rig.run({3: (17, [one[17]])}, bucket=1)
    assert relative(logits[0], their_logits(theirs, one[:18])[-1]) < bound(place, config)


@pytest.mark.slow
def test_padding_of_a_step_with_prompts_changes_nothing(place):
    torch.manual_seed(1)
    _, config, weights = make_models("llama", place.device, place.dtype, **TINY)
    one, two = random_tokens(place, 20, 9)
    plain, padded = (StepRig(config, weights) for _ in range(2))
    # 24 rows, all of the slots, more rows that are decoded than there are, and more tiles.
    for work in ({3: (0, one[:15]), 5: (0, two)}, {3: (15, one[15:]), 5: (9, [7])}):
        _, wanted = plain.run(work)
        _, found = padded.run(work, padding=MixedPadding(24, 8, 4, 6))
        assert relative(found, wanted) < bound(place) / 10


@pytest.mark.slow
def test_tokens_feed_back_on_the_device(place):
    torch.manual_seed(2)
    theirs, config, weights = make_models("llama", place.device, place.dtype, **TINY)
    rig = StepRig(config, weights)
    one, two = random_tokens(place, 12, 30)
    found = {1: list(one), 6: list(two)}
    tokens, _ = rig.run({1: (0, one), 6: (0, two)})
    for slot, token in zip(found, tokens.tolist(), strict=True):
        found[slot].append(token)
    for _ in range(3):
        # Another order than that of the slots, and padding beside them.
        tokens, logits = rig.run({6: (len(found[6]) - 1, [-1]), 1: (len(found[1]) - 1, [-1])}, bucket=4)
        for row, slot in enumerate((6, 1)):
            assert relative(logits[row], their_logits(theirs, found[slot])[-1]) < bound(place)
            found[slot].append(int(tokens[row]))


@pytest.mark.slow
def test_deterministic_step_gives_the_same_bits_in_any_company(place):
    torch.manual_seed(3)
    theirs, config, weights = make_models("qwen3", place.device, place.dtype, **TINY)
    prompts = random_tokens(place, 12, 9, 34)
    alone, together = (StepRig(config, weights, deterministic=True, seed=4) for _ in range(2))
    together.run({slot: (0, prompt) for slot, prompt in enumerate(prompts)})
    _, crowd = together.run({slot: (len(prompts[slot]), [7 + slot]) for slot in (1, 2, 0)}, bucket=4)
    for row, slot in enumerate((1, 2, 0)):
        prompt = prompts[slot]
        alone.run({slot: (0, prompt[:-2])})
        alone.run({slot: (len(prompt) - 2, prompt[-2:])})
        _, single = alone.run({slot: (len(prompt), [7 + slot])}, bucket=1)
        assert torch.equal(single[0], crowd[row])
    assert relative(single[0], their_logits(theirs, [*prompts[0], 7])[-1]) < bound(place)


@pytest.mark.slow  # that of the sampling kernels is not
def test_a_row_that_is_not_finite_fails_alone(place):
    torch.manual_seed(4)
    _, config, weights = make_models("llama", place.device, place.dtype, **TINY)
    weights.embedding[299] = float("nan")
    rig = StepRig(config, weights)
    tokens, _ = rig.run({0: (0, [1, 2, 3]), 1: (0, [1, 299, 3]), 2: (0, [299, 5])}, due=[True, True, False])
    assert tokens[0] >= 0
    assert tokens[1] == -1
    # Within a sequence a broken row may break those before it too (zero times not-a-number); its neighbours stay sound.
    assert rig.step.broken(3).tolist() == [0, 0, 0]
    assert rig.step.broken(8)[4:].tolist() == [1, 1, 1, 1]
