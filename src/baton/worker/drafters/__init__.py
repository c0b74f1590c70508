"""Drafters: they propose tokens that a step verifies (base.py). `drafter_of` builds those of a setting."""

from __future__ import annotations

from baton.config.values import Speculate, draft_model_of
from baton.worker.drafters.base import Drafter
from baton.worker.drafters.grammar import GrammarDrafter
from baton.worker.drafters.joined import JoinedDrafter
from baton.worker.drafters.ngram import NgramDrafter


def drafter_of(name: Speculate) -> Drafter | None:
    """The drafter of a setting. None: no drafts. With a draft model: the drafter that is asked before it."""
    match name:
        case "ngram":
            return NgramDrafter()
        case "auto":
            return JoinedDrafter()
    return GrammarDrafter() if name == "grammar" or draft_model_of(name) else None
