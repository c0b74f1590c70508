"""What an instance wants done. The shell does it; the outcome, if there is one, comes back as an event."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from baton.protocol.ids import RequestId, WorkerEpoch
from baton.protocol.request import FinishReason, Refused
from baton.protocol.step import RowLogprobs, StepPlan


class RunStep(Struct, frozen=True):
    """Hand the plan to the worker. Plans go out in the order of their numbers."""

    plan: StepPlan


class Ended(Struct, frozen=True):
    """The one end of one sequence, with its usage."""

    request: RequestId
    index: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    detail: str = ""
    "For an error: what happened, fit for the client."


class Emit(Struct, frozen=True):
    """Everything clients are told by one event: tokens, what the model thought of them, then ends."""

    tokens: list[tuple[RequestId, int, int]]
    "(request, sequence index, token id), in order."
    ended: list[Ended]
    logprobs: list[tuple[RequestId, int, RowLogprobs]] = []
    "Of the tokens above, or of prompts; only for requests that asked."


class Refuse(Struct, frozen=True):
    """The request is not taken. It leaves no trace."""

    request: RequestId
    refused: Refused


class RestartWorker(Struct, frozen=True):
    """Make sure that the old worker is dead, start one of this epoch, say WorkerReady."""

    epoch: WorkerEpoch
    reason: str


class Mode(StrEnum):
    SERVING = "serving"
    DRAINING = "draining"
    PAUSED = "paused"


class ModeChanged(Struct, frozen=True):
    mode: Mode


Effect = RunStep | Emit | Refuse | RestartWorker | ModeChanged
