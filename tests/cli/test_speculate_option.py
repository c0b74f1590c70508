"""--speculate: settings that cannot work are refused at the start, in words."""

from __future__ import annotations

import pytest

from baton.config import ServeConfig
from baton.errors import InvalidConfig
from baton.llm.keywords import serve_settings


def test_drafts_are_off_unless_asked_for():
    assert ServeConfig(speculative_tokens=8).engine().instance.scheduler.drafts_max == 0
    engine = ServeConfig(speculate="ngram", speculative_tokens=8).engine()
    assert (engine.instance.scheduler.drafts_max, engine.worker.speculate) == (8, "ngram")


@pytest.mark.parametrize("tokens", [0, 17, -1])
def test_too_few_and_too_many_drafts(tokens):
    with pytest.raises(InvalidConfig, match="speculative_tokens"):
        ServeConfig(speculate="ngram", speculative_tokens=tokens)


def test_an_unknown_drafter():
    with pytest.raises(InvalidConfig, match="speculate"):
        ServeConfig(speculate="eagle")


def test_sglang_names():
    asked = serve_settings({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6})
    assert asked == {"speculate": "ngram", "speculative_tokens": 6}


def test_an_encoder_refuses_in_words():
    pytest.importorskip("numpy")
    from baton.config import WorkerConfig
    from baton.worker.build import refuse_speculation

    refuse_speculation(WorkerConfig(speculate="ngram", device="cpu"), generates=True)
    refuse_speculation(WorkerConfig(device="cuda"), generates=False)
    refuse_speculation(WorkerConfig(speculate="ngram", device="cuda"), generates=True)
    with pytest.raises(InvalidConfig, match="this is an encoder"):
        refuse_speculation(WorkerConfig(speculate="ngram", device="cpu"), generates=False)
