"""Results of a call, and the conversion of tokens to text.

    tokens --Detokenizer--> whole characters --StopStrings--> Output.text

as in a server (api/generate/output.py), and with the same rules: a stop token has no text, tokens after a completed stop string
are dropped, and no stop string applies before `min_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.errors import EngineError
from baton.llm.sampling import SamplingParams
from baton.protocol.request import SamplingParams as WireParams
from baton.protocol.step import TokenLogprob
from baton.protocol.vectors import floats
from baton.text.detokenizer import Detokenizer
from baton.text.stops import StopAutomaton, StopStrings
from baton.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Output:
    """One of the n sequences of an answer."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    "Finish reason: stop, length, or error. Empty until the output is finished."
    stop_reason: str | int | None = None
    "The stop string, or the token id of `stop_token_ids`, that ended the output."
    error: str = ""
    "Error message, if the reason is error."
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities. None: they were not requested."""
        return sum(each.logprob for each in self.logprobs) if self.logprobs else None


@dataclass(slots=True)
class SequenceAnswer:
    prompt_token_ids: list[int]
    outputs: list[Output]
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    "Log-probabilities of the prompt by position, if requested. The first token has none."
    prompt: str | None = None
    "Text of the prompt. None for a chat and for token ids."
    request_id: str = ""

    @property
    def finished(self) -> bool:
        return all(output.finish_reason for output in self.outputs)


@dataclass(slots=True)
class Vector:
    embedding: list[float]


@dataclass(slots=True)
class Embedding:
    """The embedding of one prompt."""

    prompt_token_ids: list[int]
    outputs: Vector
    prompt: str | None = None
    request_id: str = ""

    @classmethod
    def of(cls, answer: SequenceAnswer, vector: bytes) -> Embedding:
        """The embedding of this vector. Raises EngineError if it is empty."""
        if not vector:
            raise EngineError(answer.outputs[0].error or "the prompt was given up before its vector was there")
        return cls(answer.prompt_token_ids, Vector(floats(vector)), answer.prompt, answer.request_id)


@dataclass(slots=True)
class Score:
    score: float


@dataclass(slots=True)
class PairScore:
    """The score of one pair of texts."""

    outputs: Score


@dataclass(slots=True)
class Classes:
    probs: list[float]
    "Probabilities in the order of the model's classes."
    label: str
    "Name of the likeliest class."

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class Classification:
    """The classes of one prompt."""

    prompt_token_ids: list[int]
    outputs: Classes
    prompt: str | None = None
    request_id: str = ""


@dataclass(slots=True)
class Chunk:
    """New output of a stream."""

    prompt_index: int
    "Index of the prompt in the call."
    index: int
    "Index among the n outputs of the prompt."
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    "Finish reason. Not empty in the last chunk of an output."
    stop_reason: str | int | None = None
    error: str = ""


class SequenceText:
    """Builds the text of one output token by token."""

    __slots__ = ("_detokenizer", "_include_stop", "_min_tokens", "_named_ids", "_stops", "output")

    def __init__(self, tokenizer: Tokenizer, asked: WireParams, stops: StopAutomaton, output: Output) -> None:
        ours = asked if isinstance(asked, SamplingParams) else SamplingParams()
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=ours.skip_special_tokens, at_text_start=False)
        self._stops = StopStrings(stops, include_stop=ours.include_stop_str_in_output)
        self._include_stop = ours.include_stop_str_in_output
        self._named_ids = frozenset(asked.stop_token_ids or ())
        self._min_tokens = asked.min_tokens or 0
        self.output = output

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text. Later tokens are not part of the answer."""
        return self._stops.stop is not None

    def feed(self, token: int, *, ends: bool) -> None:
        """Add a token. `ends`: it is the stop token that ended the sequence."""
        output = self.output
        output.token_ids.append(token)
        if ends and token in self._named_ids:
            output.stop_reason = token
        text = "" if ends and not self._include_stop else self._detokenizer.push_one(token)
        self._through_stops(text)

    def end(self, reason: str) -> None:
        if not self.stopped:
            self._through_stops(self._detokenizer.flush())
            self.output.text += self._stops.flush()
        self.output.finish_reason = "stop" if self.stopped else reason

    def _through_stops(self, text: str) -> None:
        fed = self._stops.feed(text, may_end=len(self.output.token_ids) > self._min_tokens)
        self.output.text += fed.text
        if fed.stop is not None:
            self.output.stop_reason = fed.stop
