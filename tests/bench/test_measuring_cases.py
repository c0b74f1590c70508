"""Which engine is measured with which case, and when."""

from measuring.cases import OFFLINE
from measuring.engines import ENGINES, chosen


def measured(engine, number):
    return {case.name for case in OFFLINE if case.suits(ENGINES[engine], number)}


def test_goals_need_every_round_of_what_they_compare():
    assert measured("baton-int8", 0) == {case.name for case in OFFLINE}
    assert measured("baton-int8", 2) == {"decode", "prefill", "batch", "batch_as_served", "neighbour"}
    assert measured("llamacpp-q4_1", 2) == measured("vllm-bfloat16", 2) == {"decode", "prefill", "batch"}


def test_references_have_one_round():
    assert measured("baton-none", 0) == {"decode", "prefill", "batch", "batch_as_served"}
    assert measured("baton-none", 1) == measured("transformers", 1) == set()


def test_the_neighbour_is_shown_to_one_peer_once():
    assert "neighbour" in measured("llamacpp-q8_0", 0)
    assert "neighbour" not in measured("llamacpp-q8_0", 1) | measured("llamacpp-q4_0", 0)


def test_engines_are_chosen_by_name_or_family():
    assert [engine.name for engine in chosen("llamacpp-q8_0,baton")] == [
        "llamacpp-q8_0",
        "baton-int4",
        "baton-int8",
        "baton-none",
    ]
    assert len(chosen("llamacpp,llamacpp-q8_0")) == 3
