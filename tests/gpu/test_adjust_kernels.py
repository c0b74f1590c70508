"""Penalties, bias, excluded tokens, masks and log-probabilities on the device against worker/sampler.py, the definition."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")

from baton.protocol.request import SamplingParams  # noqa: E402
from baton.worker.draws import NOT_FINITE_ID, NOTHING_LEFT_ID  # noqa: E402
from baton.worker.flat_batch import FEEDBACK  # noqa: E402
from baton.worker.logprobs import describe, log_softmax  # noqa: E402
from baton.worker.sampler import SampleRow, sample  # noqa: E402
from baton.worker.sampling_columns import SamplingColumns  # noqa: E402
from baton.worker.sampling_state import BANS_MAX, SequenceSampling  # noqa: E402

VOCABULARY = 4200
"""Two chunks of a row, the second one not full."""


class Sequence:
    def __init__(self, params, prompt=(), outputs=(), mask=None, vocabulary=VOCABULARY):
        self.state = SequenceSampling(params, 0, vocabulary, list(prompt), list(outputs))
        self.outputs = np.array(outputs, np.int32)
        self.mask = mask

    def seen_by_host(self, last_known):
        """Outputs as the host has them when it launches the step."""
        outputs = self.outputs.copy()
        if not last_known and outputs.size:
            outputs[-1] = FEEDBACK
        return outputs


class Device:
    """What a step does after the head, for rows of logits."""

    def __init__(self, place, sequences, vocabulary=VOCABULARY):
        from baton.worker.cuda.adjustments import Adjustments
        from baton.worker.cuda.columns import SlotColumns
        from baton.worker.cuda.kernels.sample import SampleScratch

        count = len(sequences)
        self.place, self.sequences, self.vocabulary = place, sequences, vocabulary
        self.slots = place.rng.permutation(count + 2)[:count]
        self.host = SamplingColumns(count + 2)
        device = torch.device(place.device)
        columns = SlotColumns(count + 2, vocabulary, device)
        self.columns, self.kept = columns.draws, Adjustments(columns.adjust, count + 2, count + 2)
        self.kept.columns.bias.fill_(7.0)  # of whoever had the slot before
        self.kept.columns.counts.fill_(9)
        self.scratch = SampleScratch(count, vocabulary, device)
        self.last = place.ints([-7] * (count + 2))
        for slot, one in zip(self.slots.tolist(), sequences, strict=True):
            self.host.assign_slot(slot, one.state)
        changed = self.host.take_changed()
        columns.write(self.host, changed)
        self.kept.write(self.host, changed)

    def choose(self, logits, *, last_known=True):
        """Tokens, and their log-probabilities."""
        from baton.worker.cuda.kernels.adjust import adjust, tally
        from baton.worker.cuda.kernels.argmax import argmax
        from baton.worker.cuda.kernels.logprobs import write_logprobs
        from baton.worker.cuda.kernels.sample import sample

        place, kept, slots = self.place, self.kept, self.place.ints(self.slots)
        for slot, one in zip(self.slots.tolist(), self.sequences, strict=True):
            self.last[slot] = int(one.outputs[-1]) if one.outputs.size else -7  # as the step before has left it
        self.kept.write_rules(*self.rules(last_known))
        on_device = torch.tensor(logits, device=place.device)
        positions = place.ints([one.outputs.size for one in self.sequences])
        tokens = place.ints([-7] * len(self.slots))
        kept.raw.fill_(float("nan"))
        adjust(on_device, kept.raw, slots, slots, self.last, kept.columns, kept.rows)
        argmax(on_device, slots, self.scratch.argmax, tokens, self.last, kept.rows.adjusted)
        sample(on_device, slots, positions, self.columns, self.scratch, tokens, self.last)
        write_logprobs(
            on_device, kept.raw, kept.rows.adjusted, slots, tokens, kept.columns.top_logprobs, kept.scratch, kept.logprob_words
        )
        tally(slots, slots, tokens, kept.columns)
        return tokens.cpu().numpy(), kept.logprob_words.cpu().numpy()[: len(self.slots)]

    def rules(self, last_known):
        from baton.worker.step_rules import Bans
        from baton.worker.token_masks import masks_of

        pairs = [one.state.bans(one.seen_by_host(last_known)) for one in self.sequences]
        ends = np.cumsum([0, *map(len, pairs)]).astype(np.int32)
        masks = {place: one.mask for place, one in enumerate(self.sequences) if one.mask is not None}
        return Bans(ends, np.concatenate(pairs)) if ends[-1] else None, masks_of(masks, np.arange(len(pairs)))

    def definition(self, logits):
        raw, logits = logits, logits.copy()
        rows = [SampleRow(one.state, one.outputs) for one in self.sequences]
        positions = np.array([one.outputs.size for one in self.sequences])
        draws = self.host.draws_at(self.slots, positions)
        for row, one in enumerate(self.sequences):
            if one.mask is not None:  # as the definition does with excluded tokens
                allowed = np.unpackbits(one.mask.view(np.uint8), bitorder="little")[: self.vocabulary] != 0
                logits[row, ~allowed] = -1e30
        chosen = sample(logits, rows, draws)
        for row, one in enumerate(self.sequences):
            if row in chosen.logprobs and one.mask is not None:
                top_logprobs = describe(
                    log_softmax(raw[row : row + 1]), chosen.tokens[row : row + 1], one.state.params.logprobs
                )
                chosen.logprobs[row] = top_logprobs[0]
        return chosen

    def grow(self, tokens):
        for one, token in zip(self.sequences, tokens.tolist(), strict=True):
            one.outputs = np.append(one.outputs, np.int32(token))
            one.state.sampled(token)


def check(device, logits, *, last_known=True):
    from baton.worker.cuda.read_logprobs import read_sampled

    wanted = device.definition(logits)
    tokens, words = device.choose(logits, last_known=last_known)
    assert tokens.tolist() == wanted.tokens.tolist()
    top_logprobs = [one.state.params.logprobs for one in device.sequences]
    found = read_sampled(words, tokens, np.arange(len(tokens)), top_logprobs, ())
    assert sorted(found) == sorted(wanted.logprobs)
    for row, word in wanted.logprobs.items():
        ours = found[row]
        assert (ours.token, ours.rank, [t for t, _ in ours.top]) == (word.token, word.rank, [t for t, _ in word.top])
        assert [ours.logprob, *(x for _, x in ours.top)] == pytest.approx([word.logprob, *(x for _, x in word.top)], abs=1e-5)
    return tokens


def random_logits(place, rows, vocabulary=VOCABULARY):
    return (place.rng.standard_normal((rows, vocabulary)) * 4).astype(np.float32)


def mixed_sequences(place):
    def ids(count):
        return place.rng.integers(0, VOCABULARY, count).tolist()

    def params(**more):
        return SamplingParams(temperature=float(place.rng.choice([0.0, 0.8])), seed=int(place.rng.integers(1 << 40)), **more)

    mask = np.zeros(-(-VOCABULARY // 32), np.uint32)
    mask[[3, 70, 131]] = 0xF00F0F1
    return [
        Sequence(params()),
        Sequence(params(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.25), ids(900), ids(700)),
        Sequence(params(presence_penalty=1.5, logprobs=5), ids(40), ids(2000)),
        Sequence(params(logit_bias=tuple((token, 6.0) for token in ids(30)), top_k=20, logprobs=20), ids(4), ids(9)),
        Sequence(params(logprobs=0, top_p=0.9)),
        Sequence(params(min_tokens=10, stop_token_ids=tuple(ids(4))), ids(3), ids(5)),
        Sequence(params(top_k=50, logprobs=3), ids(3), ids(5), mask=mask),
        Sequence(params(bad_words=((5,), (6, 7), (8, 9, 10), (4199,))), ids(2), [1, 8, 9]),
    ]


@pytest.mark.parametrize("last_known", [pytest.param(True, marks=pytest.mark.slow), False])
def test_rows_of_all_kinds_together(place, last_known):
    device = Device(place, mixed_sequences(place))
    for _ in range(2):  # the second step counts the tokens of the first
        device.grow(check(device, random_logits(place, len(device.sequences)), last_known=last_known))


def test_logits_are_changed_to_the_bit(place):
    """Penalties as numpy rounds them, so that a draw sees the same numbers."""
    from baton.worker.cuda.kernels.adjust import adjust
    from baton.worker.sampler import _adjust

    device = Device(place, mixed_sequences(place))
    logits = random_logits(place, len(device.sequences))
    kept = device.kept
    bans, _ = device.rules(last_known=True)
    kept.write_rules(bans, None)
    on_device = torch.tensor(logits, device=place.device)
    adjust(on_device, kept.raw, *[place.ints(device.slots)] * 2, device.last, kept.columns, kept.rows)
    rows = [SampleRow(one.state, one.outputs) for one in device.sequences]
    _adjust(logits, rows, list(range(len(rows))))
    assert np.array_equal(on_device.cpu().numpy().view(np.int32), logits.view(np.int32))


@pytest.mark.parametrize("last_known", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_bad_word_ends_only_after_its_beginning(place, last_known):
    words = ((8, 9, 10), (9, 11), (1, 2, 3, 4, 12))
    ends = [[8, 9], [7, 9], [8, 8], [1, 2, 3, 4], [2, 3, 4], [9], []]
    device = Device(place, [Sequence(SamplingParams(bad_words=words), [8], outputs) for outputs in ends])
    logits = random_logits(place, len(ends))
    logits[:, [10, 11, 12]] = 100.0, 99.0, 98.0
    assert check(device, logits, last_known=last_known).tolist() == [12, 10, 10, 10, 10, 10, 10]
    logits[:, 10] = 0.0
    assert check(device, logits, last_known=last_known).tolist() == [12, 12, 11, 11, 11, 12, 11]


def test_ids_outside_the_vocabulary_change_no_neighbour(place):
    """Found by a review: they were written into the counts of the next slots, or past the end."""
    outside = [VOCABULARY, VOCABULARY + 9, 3 * VOCABULARY + 5, 70_000, 2**31 - 1]
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, logit_bias=tuple((token, 9.0) for token in outside))
    device = Device(place, [Sequence(params, outside, outside), Sequence(params, [5], [6]), Sequence(params)])
    counts = device.kept.columns.counts.cpu().numpy()[device.slots]
    assert counts[0].tolist() == counts[2].tolist() == [0] * VOCABULARY
    assert {token: count for token, count in enumerate(counts[1].tolist()) if count} == {5: 1, 6: 3}


def test_rules_of_one_step_are_gone_in_the_next(place):
    mask = np.zeros(-(-VOCABULARY // 32), np.uint32)
    mask[131] = 1 << 7
    banned = Sequence(SamplingParams(min_tokens=1, stop_token_ids=(5,)))
    device = Device(place, [banned, Sequence(SamplingParams(), mask=mask)])
    logits = random_logits(place, 2)
    logits[:, 5] = 50.0
    tokens, _ = device.choose(logits)
    assert tokens[0] != 5
    assert tokens[1] == 131 * 32 + 7
    device.sequences[1].mask = None
    banned.outputs = tokens[:1]
    assert device.choose(logits)[0].tolist() == [5, 5]


def test_all_slots_may_have_all_their_bans_in_the_memory_that_graphs_know(place):
    """Found by reading: more than 4,096 of a step made a larger buffer, and all graphs that draw were recorded again."""
    everything = tuple((1, token) for token in range(BANS_MAX))
    device = Device(place, [Sequence(SamplingParams(bad_words=everything), [3], [1]) for _ in range(3)])
    assert all(one.state.bans_max == BANS_MAX for one in device.sequences)
    memory = device.kept.rows.bans.data_ptr()
    assert check(device, random_logits(place, 3), last_known=False).min() >= BANS_MAX
    assert device.kept.rows.bans.data_ptr() == memory


@pytest.mark.parametrize("value", [np.nan, *(pytest.param(value, marks=pytest.mark.slow) for value in (np.inf, -np.inf))])
def test_what_is_not_finite_fails_also_where_it_is_excluded(place, value):
    params = {
        "banned": {"bad_words": ((5,),)},
        "masked": {},
        "early": {"min_tokens": 3, "stop_token_ids": (5,)},
        "penalised": {"presence_penalty": 1.0},
    }
    mask = np.full(-(-VOCABULARY // 32), 0xFFFFFFFF, np.uint32)
    mask[0] = 0xFFFFFFDF
    rows = [Sequence(SamplingParams(**more), [5], mask=mask if name == "masked" else None) for name, more in params.items()]
    device = Device(place, rows)
    logits = random_logits(place, len(rows))
    logits[:, 5] = value
    assert device.choose(logits)[0].tolist() == [NOT_FINITE_ID] * len(rows)
    assert device.choose(random_logits(place, len(rows)))[0].min() >= 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_left(place, temperature):
    settings = {"temperature": temperature, "top_p": 0.9, "logprobs": 2}
    words = tuple((token,) for token in range(VOCABULARY))
    rows = [Sequence(SamplingParams(**settings, bad_words=words)), Sequence(SamplingParams(**settings))]
    rows.append(Sequence(SamplingParams(**settings), mask=np.zeros(-(-VOCABULARY // 32), np.uint32)))
    tokens, _ = Device(place, rows).choose(random_logits(place, 3))
    assert (tokens[0], tokens[2]) == (NOTHING_LEFT_ID, NOTHING_LEFT_ID)
    assert tokens[1] >= 0


def test_log_probabilities_of_any_tokens(place):
    """Ties come by id, and a vocabulary smaller than what was asked for is told whole."""
    from baton.worker.cuda.kernels.logprobs import TOP, WORDS, LogprobScratch, write_logprobs
    from baton.worker.cuda.read_logprobs import _read

    for vocabulary, top in ((VOCABULARY, TOP), (7, TOP), (4096, 1)):
        logits = place.rng.integers(-40, 8, (2, vocabulary)).astype(np.float32) / 4
        tokens = place.rng.integers(0, vocabulary, 2)
        out = place.ints(np.full((2, WORDS), -1))
        device, every = torch.tensor(logits, device=place.device), place.ints(np.arange(2))
        scratch = LogprobScratch(2, vocabulary, place.device)
        for _ in range(2):  # what is counted must be back at zero
            top_logprobs = (place.ints([0] * 2), every, place.ints(tokens), place.ints([top] * 2), scratch, out)
            write_logprobs(device, device, *top_logprobs)
        words = out.cpu().numpy()
        for row, wanted in enumerate(describe(log_softmax(logits), tokens, top)):
            found = _read(words[row], words[row].view(np.float32), int(tokens[row]), top)
            assert (found.rank, [t for t, _ in found.top]) == (wanted.rank, [t for t, _ in wanted.top])
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)
