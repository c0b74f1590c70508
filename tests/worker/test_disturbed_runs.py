"""Whatever happens on the way, every sequence gets the tokens of its undisturbed run, and in C the very same bits."""

from __future__ import annotations

import random

import pytest
from rig import Rig, generate, tiny_model

from baton.core.events import Abort, EvictSome, PreemptSome
from baton.protocol.ids import RequestId
from baton.protocol.request import FinishReason

GREEDY = {"max_tokens": 12, "logprobs": 2}
RANDOM = {
    "max_tokens": 12,
    "logprobs": 2,
    "temperature": 0.9,
    "top_p": 0.9,
    "seed": 11,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.4,
    "bad_words": ((5,), (7, 9)),
}
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])


MODES = {
    "none": {"compute": "native"},
    "int8": {"compute": "native", "quantization": "int8"},
    "int4": {"compute": "native", "quantization": "int4"},
    "torch": {"compute": "torch"},
}


@pytest.fixture(scope="module", params=MODES)
def model(request):
    return tiny_model(**MODES[request.param])


def prompts(count: int, seed: int = 0) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {f"p{i}": [rng.randrange(97) for _ in range(rng.randint(1, 30))] for i in range(count)}


def answers(rig: Rig) -> dict[tuple[str, int], list]:
    """Tokens, and in C what the model thought of them, to the last bit: torch sums in another order in another company."""
    if rig.runner.executor.name == "torch":
        return dict(rig.tokens)
    sampled = {key: [row.sampled for row in rows if row.sampled is not None] for key, rows in rig.logprobs.items()}
    assert {key: [word.token for word in words] for key, words in sampled.items()} == rig.tokens
    return sampled


def alone(model, requests: dict[str, list[int]], **sampling):
    """Each request in a rig of its own: nothing shared, nothing short, one step at a time."""
    said: dict[tuple[str, int], list] = {}
    for name, prompt in requests.items():
        rig = Rig(model, steps_in_flight=1)
        rig.submit(name, prompt, **sampling)
        rig.run()
        said |= answers(rig)
    return said


@SAMPLINGS
@pytest.mark.parametrize("chunk", [1, pytest.param(7, marks=pytest.mark.slow), None])
def test_a_tiny_pool_preempts_and_nobody_notices(model, sampling, chunk):
    requests = prompts(8)
    rig = Rig(model, blocks=14, block_size=4, chunk=chunk)
    for name, prompt in requests.items():
        rig.submit(name, prompt, **sampling)
    rig.run()
    assert answers(rig) == alone(model, requests, **sampling)
    assert rig.instance.stats.preemptions > 0


@SAMPLINGS
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_random_preemptions_evictions_and_aborts(model, sampling, seed):
    rng = random.Random(seed)
    requests = prompts(10, seed)
    rig = Rig(model, slots=rng.choice([1, 3, 8]), blocks=rng.choice([12, 30]), block_size=4, chunk=rng.choice([3, None]))
    names = list(requests)
    aborted = rng.sample(names, 3)
    for name in names[:5]:
        rig.submit(name, requests[name], **sampling)

    def disturb(step: int) -> None:
        if step % 3 == 1 and step // 3 < 5:
            name = names[5 + step // 3]
            rig.submit(name, requests[name], **sampling)
        if rng.random() < 0.3:
            rig.dispatch(rng.choice([PreemptSome(1), PreemptSome(3), EvictSome(4)]))
        if step > 6 and rng.random() < 0.2:
            rig.dispatch(Abort(RequestId(rng.choice(aborted))))

    rig.run(disturb)
    assert len(rig.ended) == len(requests)
    said = answers(rig)
    for key, expected in alone(model, requests, **sampling).items():
        answer = said.get(key, [])
        if rig.ended[key].reason is FinishReason.ABORT:
            assert key[0] in aborted
            assert answer == expected[: len(answer)]
        else:
            assert answer == expected


@SAMPLINGS
def test_prefix_hits(model, sampling):
    shared = list(range(20, 45))
    requests = {"a": [*shared, 1, 2], "b": [*shared, 3], "c": [*shared, 1, 2], "d": shared}
    rig = Rig(model, block_size=4)
    for name, prompt in requests.items():
        rig.submit(name, prompt, **sampling)
        rig.run()
    assert answers(rig) == alone(model, requests, **sampling)
    assert rig.ended["c", 0].cached_tokens == 24


@SAMPLINGS
@pytest.mark.parametrize("chunk", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_a_worker_that_dies_again_and_again(model, sampling, chunk):
    """Never twice before everybody is past what was planned the last time: who is lost twice at one place is given up."""
    requests = prompts(6)
    rig = Rig(model, chunk=chunk, block_size=4)
    for name, prompt in requests.items():
        rig.submit(name, prompt, **sampling)
    past = dict.fromkeys(requests, 0)

    def disturb(step: int) -> None:
        now = {name: len(rig.tokens.get((name, 0), ())) for name in requests if (name, 0) not in rig.ended}
        if step > 2 and now and all(tokens >= past[name] for name, tokens in now.items()):
            past.update({name: tokens + 4 for name, tokens in now.items()})
            rig.kill_worker()

    rig.run(disturb)
    assert rig.instance.stats.worker_losses >= 2
    assert answers(rig) == alone(model, requests, **sampling)


def test_equal_prompts_at_once_are_folded(model):
    requests = {f"p{i}": list(range(30, 60)) for i in range(4)}
    rig = Rig(model, block_size=4, chunk=5, tokens_per_step=12)
    for name, prompt in requests.items():
        rig.submit(name, prompt, **GREEDY)
    rig.run()
    assert answers(rig) == alone(model, requests, **GREEDY)
    assert rig.instance.stats.folded_blocks > 0


@SAMPLINGS
def test_n_sequences(model, sampling):
    rig = Rig(model, block_size=4, blocks=40, slots=3)
    rig.submit("a", list(range(10, 40)), n=5, **sampling)
    rig.run()
    crowded = Rig(model, block_size=4, blocks=14, slots=8)
    crowded.submit("a", list(range(10, 40)), n=5, **sampling)
    for name, prompt in prompts(4).items():
        crowded.submit(name, prompt, **GREEDY)
    crowded.run()
    assert {key: words for key, words in answers(crowded).items() if key[0] == "a"} == answers(rig)
    assert len({tuple(tokens) for tokens in rig.tokens.values()}) == (1 if sampling is GREEDY else 5)


def test_stop_ids_and_min_tokens(model):
    """The stop id never appears before its time, so masking is what the worker does and not only the core."""
    prompt = [3, 1, 4, 1, 5]
    free = generate(model, {"a": prompt}, max_tokens=10)["a", 0]
    place = next(i for i in range(2, 6) if free[i] not in free[:i])
    stopped = generate(model, {"a": prompt}, max_tokens=10, stop_token_ids=(free[place],))["a", 0]
    assert stopped == free[: place + 1]
    later = generate(model, {"a": prompt}, max_tokens=10, stop_token_ids=(free[place],), min_tokens=6)["a", 0]
    assert len(later) >= 6
    assert free[place] not in later[:6]
