"""A refusal is an answer: one word for machines, a sentence with the numbers for people."""

from typing import get_args

import pytest

from baton.protocol.request import RefusalReason, Refused


@pytest.mark.parametrize("reason", get_args(RefusalReason))
def test_every_refusal_is_a_sentence(reason):
    said = str(Refused(reason, needed=1234, limit=567))
    assert len(said.split()) >= 4


@pytest.mark.parametrize("reason", ["never_fits", "queue_full", "queue_tokens_full", "queued_too_long", "worker_gone"])
def test_refusals_by_size_name_both_numbers(reason):
    said = str(Refused(reason, needed=1234, limit=567))
    assert "1234" in said
    assert "567" in said
