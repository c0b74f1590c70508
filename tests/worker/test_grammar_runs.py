"""Sequences with a grammar: every token is one that it allows, and whatever happens on the way they get the same tokens."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
from ahead_executor import running_ahead
from rig import Rig, RigModel, tiny_model

from baton.core.events import EvictSome, PreemptSome, Submit
from baton.grammar.vocabulary import Vocabulary
from baton.protocol.grammar import Grammar
from baton.protocol.ids import RequestId
from baton.protocol.request import FinishReason, GenerateRequest, SamplingParams

END = 96
TOKENS = [*(bytes([byte]) for byte in range(32, 127)), b"\n", b"<end>"]
REGEX = "(ab|c)+d{2,9}[0-9]{3}"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
GRAMMARS = {
    "regex": Grammar("regex", REGEX, ends=(END,)),
    "schema": Grammar("json_schema", json.dumps(SCHEMA), ends=(END,)),
    "choice": Grammar("choice", '["red", "green", "blue"]', ends=(END,)),
}
GREEDY = {"max_tokens": 60, "stop_token_ids": (END,)}
RANDOM = {**GREEDY, "temperature": 1.0, "top_p": 0.95, "seed": 5, "frequency_penalty": 0.3}
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])


@pytest.fixture(scope="module")
def model() -> RigModel:
    vocabulary = Vocabulary(TOKENS, [END], len(TOKENS))
    return replace(tiny_model(), vocabulary=lambda: vocabulary)


def text_of(tokens: list[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token != END).decode()


def fits(kind: str, text: str) -> bool:
    match kind:
        case "regex":
            return re.fullmatch(REGEX, text) is not None
        case "choice":
            return text in ("red", "green", "blue")
    value = json.loads(text)
    return set(value) == {"name", "n"} and len(value["name"]) <= 6 and 0 <= value["n"] <= 99


def requests(count: int = 6) -> dict[str, tuple[str, list[int]]]:
    rng = random.Random(4)
    kinds = [*GRAMMARS, ""]  # some without: they must not notice
    return {f"p{i}": (kinds[i % 4], [rng.randrange(96) for _ in range(rng.randint(1, 20))]) for i in range(count)}


def submit(rig: Rig, name: str, kind: str, prompt: list[int], **sampling) -> None:
    rig.submit(name, prompt, **sampling, **({"grammar": GRAMMARS[kind]} if kind else {}))


def alone(model: RigModel, asked: dict[str, tuple[str, list[int]]], **sampling) -> dict[tuple[str, int], list[int]]:
    told: dict[tuple[str, int], list[int]] = {}
    for name, (kind, prompt) in asked.items():
        rig = Rig(model, steps_in_flight=1)
        submit(rig, name, kind, prompt, **sampling)
        told |= rig.run()
        rig.close()
        if kind and rig.ended[name, 0].reason is FinishReason.STOP:
            assert fits(kind, text_of(told[name, 0])), (kind, text_of(told[name, 0]))
    return told


@SAMPLINGS
def test_answers_fit_and_neighbours_do_not_notice(model, sampling):
    asked = requests(8)
    rig = Rig(model)
    for name, (kind, prompt) in asked.items():
        submit(rig, name, kind, prompt, **sampling)
    assert rig.run() == alone(model, asked, **sampling)
    assert sum(rig.ended[name, 0].reason is FinishReason.STOP for name, (kind, _) in asked.items() if kind) >= 4


def test_greedy_rows_with_a_grammar_need_no_logits(model):
    """What comes is what comes the long way, which rows take that ask for log-probabilities."""
    asked = requests(8)

    def run(**more) -> tuple[dict[tuple[str, int], list[int]], int]:
        rig, rows = Rig(model), 0
        logits = rig.runner.executor.forward.logits

        def counted(hidden):
            nonlocal rows
            rows += len(hidden)
            return logits(hidden)

        rig.runner.executor.forward.logits = counted
        for name, (kind, prompt) in asked.items():
            submit(rig, name, kind, prompt, **GREEDY, **more)
        return rig.run(), rows

    (short, few), (long, all_of_them) = run(), run(logprobs=0)
    assert short == long
    assert few == 0 < all_of_them


@SAMPLINGS
def test_a_request_that_rules_every_token_out_ends_by_itself_and_says_whose_fault_it_is(model, sampling):
    """Told by a code, which programs read; the words are for people."""
    rig = Rig(model)
    first_letters = tuple((TOKENS.index(letter),) for letter in (b"r", b"g", b"b"))
    submit(rig, "none left", "choice", [1, 2], **sampling, bad_words=first_letters)
    submit(rig, "neighbour", "choice", [1, 2], **sampling)
    rig.run()
    end = rig.ended["none left", 0]
    assert (end.reason, end.error) == (FinishReason.ERROR, "dead_end")
    assert rig.ended["neighbour", 0].reason is FinishReason.STOP


@SAMPLINGS
def test_preempted_sequences_get_the_same_tokens(model, sampling):
    asked, rng = requests(), random.Random(1)
    rig = Rig(model, slots=3, blocks=30, chunk=5)
    for name, (kind, prompt) in asked.items():
        submit(rig, name, kind, prompt, **sampling)
    rig.run(lambda step: rig.dispatch(rng.choice([PreemptSome(1), PreemptSome(3), EvictSome(4)])) if step % 4 == 3 else None)
    assert rig.instance.stats.preemptions > 3
    assert dict(rig.tokens) == alone(model, asked, **sampling)


@SAMPLINGS
def test_a_killed_worker_s_successor_goes_on(model, sampling):
    asked = requests()
    rig = Rig(model)
    for name, (kind, prompt) in asked.items():
        submit(rig, name, kind, prompt, **sampling)
    rig.run(lambda step: rig.kill_worker() if step in (3, 14) else None)
    assert rig.instance.stats.worker_losses == 2
    assert dict(rig.tokens) == alone(model, asked, **sampling)


@SAMPLINGS
def test_a_replay_goes_on_where_its_client_is(model, sampling):
    asked = {"p": ("schema", [5, 9, 33])}
    (whole,) = alone(model, asked, **sampling).values()
    for told in (1, 4, len(whole) - 1):
        rig = Rig(model)
        params = SamplingParams(**sampling, grammar=GRAMMARS["schema"])
        request = GenerateRequest(
            id=RequestId("p"), prompt=(5, 9, 33), sampling=params, attempt=2, outputs=(tuple(whole[:told]),)
        )
        rig.dispatch(Submit(request))
        assert rig.run()["p", 0] == whole[told:]


def test_n_sequences_have_a_state_each(model):
    rig = Rig(model, blocks=40)
    rig.submit("p", [7, 8, 9], n=5, **RANDOM, grammar=GRAMMARS["schema"])
    tokens = rig.run(lambda step: rig.dispatch(PreemptSome(2)) if step == 6 else None)
    assert len({tuple(answer) for answer in tokens.values()}) > 1
    for index in range(5):
        if rig.ended["p", index].reason is FinishReason.STOP:
            assert fits("schema", text_of(tokens["p", index]))
    quiet = Rig(model)
    quiet.submit("p", [7, 8, 9], n=5, **RANDOM, grammar=GRAMMARS["schema"])
    assert quiet.run() == tokens


def run_one(model: RigModel, grammar: Grammar, **sampling):
    rig = Rig(model)
    rig.submit("p", [3, 4], **{**GREEDY, **sampling}, grammar=grammar)
    tokens = rig.run()
    rig.close()
    return text_of(tokens.get(("p", 0), [])), rig.ended["p", 0], rig


def regex(text: str, **more) -> Grammar:
    return Grammar("regex", text, ends=(END,), **more)


def test_a_finished_grammar_ends_before_min_tokens(model):
    text, end, _ = run_one(model, regex("abc"), min_tokens=30)
    assert (text, end.reason) == ("abc", FinishReason.STOP)


def test_min_tokens_keeps_the_end_back_where_more_is_allowed(model):
    text, end, _ = run_one(model, regex("a+"), min_tokens=30, max_tokens=40, logit_bias=((END, 100.0),))
    assert (text, end.reason) == ("a" * 30, FinishReason.STOP)


def test_an_end_that_is_ignored_comes_when_nothing_else_can(model):
    text, end, _ = run_one(model, regex("a{2,7}", ends_late=True), logit_bias=((END, 100.0),))
    assert (text, end.reason) == ("a" * 7, FinishReason.STOP)
    text, end, _ = run_one(model, regex("a{2,7}"), logit_bias=((END, 100.0),))
    assert (text, end.reason) == ("aa", FinishReason.STOP)


def test_max_tokens_cuts(model):
    text, end, _ = run_one(model, regex("a{30}"), max_tokens=11)
    assert (text, end.reason) == ("a" * 11, FinishReason.LENGTH)


def test_bias_and_bad_words_choose_among_what_is_allowed(model):
    b = TOKENS.index(b"b")
    assert set(run_one(model, regex("[abc]{20}"), logit_bias=((b, 100.0), (TOKENS.index(b"z"), 100.0)))[0]) == {"b"}
    assert "b" not in run_one(model, regex("[abc]{20}"), bad_words=((b,),), logit_bias=((b, 100.0),))[0]


def test_bad_words_that_leave_nothing_fail_the_request_alone(model):
    rig = Rig(model)
    rig.submit("bad", [3], **GREEDY, grammar=regex("abc"), bad_words=((TOKENS.index(b"b"),),))
    rig.submit("good", [3], **GREEDY, grammar=regex("abc"))
    rig.run()
    assert rig.ended["bad", 0].reason is FinishReason.ERROR
    assert "the grammar" in rig.ended["bad", 0].detail
    assert text_of(rig.tokens["good", 0]) == "abc"


def test_log_probabilities_are_the_model_s_own(model):
    """Before the mask: what the model thought, also of tokens that were not allowed."""
    _, _, rig = run_one(model, regex("abc"), logprobs=3)
    free = Rig(model)
    free.submit("p", [3, 4], max_tokens=1, logprobs=3)
    free.run()
    first, of_free = rig.words("p")[2], free.words("p")[2]
    assert first.token == TOKENS.index(b"a")
    assert first.top == of_free.top


def test_a_grammar_that_fails_in_the_worker_fails_its_request_alone(model):
    """The front would have refused it. A worker that gets it nevertheless says so, and lives."""
    rig = Rig(model)
    rig.submit("bad", [3], **GREEDY, grammar=Grammar("json_schema", '{"type": "strin"', ends=(END,)))
    rig.submit("worse", [3], **GREEDY, grammar=Grammar("lark", "start: nowhere\n", ends=(END,)))
    rig.submit("good", [3], **GREEDY, grammar=regex("abc"))
    rig.run()
    assert {rig.ended[name, 0].reason for name in ("bad", "worse")} == {FinishReason.ERROR}
    assert text_of(rig.tokens["good", 0]) == "abc"


def test_a_worker_without_a_tokenizer_says_so():
    rig = Rig(tiny_model())
    rig.submit("p", [3], **GREEDY, grammar=regex("abc"))
    rig.run()
    assert "no tokenizer" in rig.ended["p", 0].detail


@SAMPLINGS
def test_beside_a_device_that_runs_ahead(model, sampling):
    """A GPU's manners: rows with a grammar are sampled on the host, and the next step waits for them."""
    asked = requests(8)
    rig = Rig(replace(model, loaded=running_ahead(model.loaded)))
    for name, (kind, prompt) in asked.items():
        submit(rig, name, kind, prompt, **sampling)
    assert rig.run() == alone(model, asked, **sampling)
