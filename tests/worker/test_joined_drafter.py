"""Drafts of structured output: the expected text in the model's own tokens, and values that repeat behind it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from rig import RigModel, tiny_model
from test_grammar_runs import END, GRAMMARS, TOKENS
from test_speculation import Recorded, Requests, run, said

from baton.grammar.matcher import Words
from baton.grammar.vocabulary import Vocabulary
from baton.protocol.grammar import Grammar
from baton.protocol.request import SamplingParams
from baton.worker.drafters.base import expected_of
from baton.worker.drafters.joined import JoinedDrafter
from baton.worker.grammar_masks import GrammarMasks, GrammarState

NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": False}


def test_the_layout_of_an_answer_is_drafted_and_its_repeated_values_behind_it():
    """An answer in tokens that the tokenizer would not choose: those of its first object are drafted for the second one."""
    one = [b'{"', b"name", b'":', b' "', b'",', b"\n ", b'"', b"}", b"Ada", b"Bob", b"na", b"me", b"{", b"\n", b" ", b'",\n']
    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(128)), *one, b"<end>"], [144], 145)
    ids = {text: token for token, text in reversed(list(enumerate(vocabulary._known)))}
    grammar = Grammar("json_schema", json.dumps({"type": "array", "items": NAMED, "minItems": 9}), ends=(144,))
    masks = GrammarMasks(lambda: vocabulary)
    masks.drafts = True
    state = masks.assign_slot(SamplingParams(grammar=grammar), ())
    assert state is not None
    drafter, tokens = JoinedDrafter(), list[int]()
    drafter.assign_slot(0, state)

    def write(*parts: bytes) -> None:
        for part in parts:
            state.mask()
            state.consume(ids[part])
            tokens.append(ids[part])

    def proposed(most: int = 9) -> tuple[list[bytes], int]:
        draft = drafter.propose(0, np.array([7, *tokens], np.int32), most)
        return [vocabulary._known[token] for token in draft], expected_of(draft)

    write(b"[", b"\n ")
    assert proposed() == ([b" ", b"{", b"\n ", b" ", b" ", b' "', b"name", b'":', b' "'], 9)
    write(b" ", b"{", b"\n ", b" ", b" ", b" ", b'"', b"na", b"me", b'":', b'"', b"Ada", b'"')
    assert proposed() == ([b"\n ", b" ", b"}", b",", b"\n ", b" ", b"{", b"\n ", b" "], 9)
    write(b"\n ", b" ", b"}", b",", b"\n ", b" ", b"{")
    # The answer's own tokens of the same text, and behind it what followed them.
    assert proposed() == ([b"\n ", b" ", b" ", b" ", b'"', b"na", b"me", b'":', b'"'], 9)
    assert proposed(11)[0][9:] == [b"Ada", b'"']
    assert proposed(11)[1] == 9
    assert proposed(4) == ([b"\n ", b" ", b" ", b" "], 4)
    write(b'"', b"na", b"me", b'":', b'"', b"Bob", b'"', b"}")
    write(b",", b" ", b"{")
    assert proposed(7) == ([b'"', b"na", b"me", b'":', b'"', b"Bob", b'"'], 5), "the layout has changed"
    write(b'"', b"name")  # nothing was written behind these tokens before, but behind those that are expected next
    assert proposed(11) == ([b'":', b'"', b"Bob", b'"', b"}", b",", b" ", b"{", b'"', b"name"], 2)
    masks.close()


TYPES: list[dict[str, object]] = [
    {"type": "string", "maxLength": 4},
    {"type": "integer", "minimum": 0, "maximum": 99},
    {"type": "boolean"},
    {"enum": ["a b", 'c"d', "e\nf"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
]


def drawn_schema(rng: random.Random, depth: int = 0) -> dict[str, object]:
    """An object with properties of any type; some may be left out, or others added."""
    names = [f"n{place}" * rng.randint(1, 3) for place in range(rng.randint(1, 3))]
    kinds = [drawn_schema(rng, depth + 1) if depth < 2 and rng.random() < 0.3 else rng.choice(TYPES) for _ in names]
    required = [name for name in names if rng.random() < 0.8]
    return {
        "type": "object",
        "properties": dict(zip(names, kinds, strict=True)),
        "required": required,
        "additionalProperties": rng.random() < 0.1,
    }


@pytest.fixture(scope="module")
def model() -> RigModel:
    vocabulary = Vocabulary(TOKENS, [END], len(TOKENS))
    return replace(tiny_model(compute="native", quantization="int8"), vocabulary=lambda: vocabulary)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 10))])
def test_drawn_schemas_get_the_same_answers_in_any_layout(model, seed):
    """The weights are random, and so is the layout: white space is likelier or less likely by a bias. Half of the batches are
    greedy without one, so that all their rows are verified at once."""
    rng, greedy = random.Random(seed), seed % 2 == 0
    space, line = TOKENS.index(b" "), TOKENS.index(b"\n")
    asked: Requests = {}
    for number in range(6):
        grammar = Grammar("json_schema", json.dumps(drawn_schema(rng)), ends=(END,))
        bias = ((space, rng.choice((-100.0, 0.0, 2.0))), (line, rng.choice((-100.0, 0.0, 3.0))))
        asked[f"p{number}"] = (
            [rng.randrange(97) for _ in range(5)],
            {
                "grammar": grammar,
                "stop_token_ids": (END,),
                "max_tokens": 80,
                "logit_bias": () if greedy else bias,
                "temperature": 0.0 if greedy else rng.choice((0.0, 1.0)),
                "seed": rng.randrange(1000),
            },
        )
    plain = run(model, asked)
    for most in (1, 4, 8):
        one = run(model, asked, drafter=JoinedDrafter, drafts_max=most)
        assert said(one) == said(plain)
        assert sum(one.instance.stats.accepted_drafts)
        assert len(one.history) < len(plain.history)


@pytest.mark.parametrize("late", [False, True])
def test_greedy_rows_with_a_grammar_are_verified_at_once(model, late, monkeypatch):
    """Spoilt drafts, some of them tokens that the grammar does not allow. `late`: masks behind drafts take too long, so the
    rows behind right drafts have no token, and their sequence goes on with the next step."""
    greedy = {"stop_token_ids": (END,), "max_tokens": 40}
    asked: Requests = {f"{kind}": ([place, 5, 3], {"grammar": GRAMMARS[kind], **greedy}) for place, kind in enumerate(GRAMMARS)}
    asked |= {"none": ([9, 8], {"max_tokens": 30})}
    plain = run(model, asked)
    masks_ahead = GrammarState.masks_ahead

    def late_masks(self: GrammarState, drafts: Sequence[int], vocabulary: int) -> list[Words]:
        self._ahead_over = 1.0
        return masks_ahead(self, drafts, vocabulary)

    if late:
        monkeypatch.setattr(GrammarState, "masks_ahead", late_masks)
    monkeypatch.setattr("baton.worker.executors.verify.sample", lambda *_: pytest.fail("sampled one by one"))
    answers = [asked[name][0] + tokens for (name, _), tokens in plain.tokens.items()]
    for spoilt in (0.0, 0.3):
        one = run(model, asked, drafter=lambda spoilt=spoilt: Recorded(answers, spoilt), drafts_max=5)
        assert said(one) == said(plain)
        assert sum(one.instance.stats.accepted_drafts)
        if not late:
            assert len(one.history) < len(plain.history)
