"""One sequence, from the engine's deltas to the client's pieces. Streams and whole answers consist of the same pieces.

    tokens --Detokenizer--> text --Parser--> content ----StopStrings--> text that may be sent
                                         `-> reasoning, tool calls

Stop strings apply to the content only: reasoning may contain an empty line. Without a parser all text is content. A token that
ended the sequence has no text, unless the client asks for it (include_stop_str_in_output).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Final

from baton.api.generate.engine_client import Delta, Ended, TokenLogprob
from baton.api.generate.prepare import Job
from baton.protocol.request import FinishReason, GenerateRequest
from baton.text.detokenizer import Detokenizer
from baton.text.parsers.base import Content, Part, Reasoning, ToolCallDelta, join_parts
from baton.text.stops import StopStrings
from baton.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Piece:
    """New output of one choice."""

    choice: int
    parts: list[Part] = field(default_factory=list)
    "Text, reasoning and calls in the order of arrival; two neighbours of a kind are one part. None is empty."
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    "Log-probabilities, one per token, or empty. None for the first token of an echoed prompt."
    offsets: list[int] = field(default_factory=list)
    "Start of each token's text in the choice's text."
    finish: FinishReason | None = None
    called: bool = False
    "Whether the choice has called a tool. Set with `finish`."
    unfinished: bool = False
    "Whether the choice ends inside a tool call or a format, so that it is incomplete. Set with `finish`."
    stop_reason: str | int | None = None
    "The client's stop string or stop token id that ended the choice."
    prompt_logprobs: list[TokenLogprob | None] | None = None
    embedding: bytes = b""
    "The pooled prompt as float32, for embeddings."
    usage: tuple[int, int] = (0, 0)
    "Prompt and output tokens of this choice so far."

    @classmethod
    def of_text(cls, choice: int, text: str) -> Piece:
        return cls(choice, [Content(text)])

    @property
    def text(self) -> str:
        return self._all_of(Content)

    @property
    def reasoning(self) -> str:
        return self._all_of(Reasoning)

    @property
    def tool_calls(self) -> list[ToolCallDelta]:
        return [part for part in self.parts if isinstance(part, ToolCallDelta)]

    def by_kind(self) -> tuple[str, str, list[ToolCallDelta]]:
        """Text, reasoning and calls."""
        if len(self.parts) != 1:
            return self.text, self.reasoning, self.tool_calls
        part = self.parts[0]  # nearly every piece of a stream
        if isinstance(part, Content):
            return part.text, "", []
        return ("", part.text, []) if isinstance(part, Reasoning) else ("", "", [part])

    def _all_of(self, kind: type[Content] | type[Reasoning]) -> str:
        return "".join([part.text for part in self.parts if isinstance(part, kind)])

    @property
    def ended_by(self) -> str | None:
        """The cause of an end that is neither the model's nor a length limit: "abort", "timeout" or "repetition". The enums of
        typed clients lack these words, so answers have `known_finish` as finish reason and this beside it."""
        return self.finish.value if self.finish in _OUR_OWN else None

    @property
    def known_finish(self) -> FinishReason | None:
        """The finish reason as one of the values that typed clients know. A repetition is a stop: after "length" clients would
        ask for more of the same."""
        if self.finish is FinishReason.REPETITION and not self.unfinished:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.finish in _OUR_OWN else self.finish

    @property
    def worth_sending(self) -> bool:
        return bool(self.parts) or self.finish is not None

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory."""
        entries = [entry for entry in (*self.logprobs, *(self.prompt_logprobs or ())) if entry is not None]
        texts = sum(100 + len(part.arguments) if isinstance(part, ToolCallDelta) else len(part.text) for part in self.parts)
        return texts + 4 * len(self.embedding) + 16 * len(self.tokens) + sum(100 + 80 * len(entry.top) for entry in entries)

    def add(self, later: Piece) -> None:
        """Appends a later piece of the same choice."""
        join_parts(self.parts, later.parts)
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.offsets += later.offsets
        self.finish, self.stop_reason, self.usage = later.finish, later.stop_reason, later.usage
        self.called, self.unfinished = later.called, later.unfinished
        self.embedding = later.embedding or self.embedding
        self.prompt_logprobs = later.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs

    def in_order(self) -> list[Piece]:
        """Splits the piece so that each has reasoning first, then text, then calls: the order within a chunk of chat
        completions. Nearly every piece is in order already. The finish and everything that is not per token belongs to the last
        one."""
        ranks = [_RANKS[type(part)] for part in self.parts]
        if ranks == sorted(ranks):
            return [self]
        cuts = [place for place in range(1, len(ranks)) if ranks[place] < ranks[place - 1]]
        pieces, tokens = [], 0
        for begin, end in zip([0, *cuts[:-1]], cuts, strict=True):
            parts = self.parts[begin:end]
            until = tokens + sum(part.tokens for part in parts)
            span = slice(tokens, until)
            usage = (self.usage[0], self.usage[1] - len(self.tokens) + until)
            pieces.append(Piece(self.choice, parts, self.tokens[span], self.logprobs[span], self.offsets[span], usage=usage))
            tokens = until
        rest = slice(tokens, None)
        last = (self.parts[cuts[-1] :], self.tokens[rest], self.logprobs[rest], self.offsets[rest])
        return [*pieces, replace(self, parts=last[0], tokens=last[1], logprobs=last[2], offsets=last[3])]


_OUR_OWN: Final = (FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.REPETITION)
_RANKS: Final[dict[type, int]] = {Reasoning: 0, Content: 1, ToolCallDelta: 2}


class SequenceOutput:
    def __init__(self, tokenizer: Tokenizer, job: Job, request: GenerateRequest, choice: int) -> None:
        options = job.options
        self._request = request
        self._choice = choice
        self._text = Detokenizer(
            tokenizer, skip_special_tokens=options.skip_special_tokens, at_text_start=job.echo, shown_ids=job.shown_ids
        )
        self._parser = None if job.parser is None else job.parser()
        self._calls = 0
        self._in_call = False
        "Whether the last part so far is a tool call."
        self._stops = StopStrings(job.stops, include_stop=options.include_stop)
        self._has_stops = bool(job.stops.stops)
        self._min_tokens = request.sampling.min_tokens
        self._include_stop = options.include_stop
        self._named_stop_ids = frozenset(options.sampling.stop_token_ids)
        self._prompt_only = job.prompt_only
        self._chars = 0
        self._without_part = 0
        "Tokens since the last part: they count for the next part, which they begin."
        self.tokens = 0
        "Output tokens up to the one that completed a stop string."
        self._drafts = 0
        "Output tokens before the last one of their delta: drafts that were accepted."
        self.reasoning_tokens = 0
        "Output tokens that are reasoning."
        self.finish: FinishReason | None = None

    def echo(self, logprobs: list[TokenLogprob | None] | None) -> Piece:
        """The prompt as the first piece of the text."""
        piece, texts = Piece(self._choice, usage=(len(self._request.prompt), 0)), []
        for token in self._request.prompt:
            piece.offsets.append(self._chars)
            texts.append(self._pushed(token))
        self._emit_text(piece, "".join(texts))
        piece.tokens = list(self._request.prompt)
        piece.logprobs = list(logprobs or [])
        return piece

    def feed(self, delta: Delta) -> Piece:
        """The delta's new output. Must not be called once `finish` is set."""
        if self._prompt_only:
            return self._without_tokens(delta)
        piece = Piece(self._choice, prompt_logprobs=delta.prompt_logprobs)
        stopped_by_token = delta.ended is not None and delta.ended.reason is FinishReason.STOP and bool(delta.tokens)
        last, before = len(delta.tokens) - 1, self.tokens
        for place, token in enumerate(delta.tokens):
            is_stop_token = stopped_by_token and place == last
            self._add_token(piece, token, is_stop_token)
            if delta.logprobs:
                piece.logprobs.append(delta.logprobs[place])
            if self.finish is not None:
                break  # a stop string: later tokens are not delivered
        self._drafts += min(self.tokens - before, max(last, 0))
        if self.finish is None and delta.ended is not None:
            self._end(piece, delta.ended.reason)
            if stopped_by_token and piece.finish is FinishReason.STOP and delta.tokens[-1] in self._named_stop_ids:
                piece.stop_reason = piece.stop_reason or delta.tokens[-1]
        piece.usage = (len(self._request.prompt), self.tokens)
        return piece

    def _without_tokens(self, delta: Delta) -> Piece:
        piece = Piece(self._choice, prompt_logprobs=delta.prompt_logprobs, usage=(len(self._request.prompt), 0))
        piece.embedding = delta.embedding
        if delta.ended is not None:
            stopped = delta.ended.reason is FinishReason.STOP
            self._end(piece, FinishReason.LENGTH if stopped else delta.ended.reason)
        return piece

    def text_of(self, tokens: list[int]) -> str:
        """The text of deltas of tokens, for jobs that need the text alone (Job.only_text). Replaces `feed`."""
        push_one = self._text.push_one
        text = push_one(tokens[0]) if len(tokens) == 1 else "".join(map(push_one, tokens))
        self.tokens += len(tokens)
        return text

    def accepted_drafts(self, ended: Ended) -> int:
        """Number of accepted drafts in the output: those behind a stop string are not part of it."""
        accepted = ended.accepted_tokens
        return min(accepted, self._drafts) if self.tokens < ended.output_tokens else accepted

    def cut(self, reason: FinishReason) -> Piece:
        """Ends the sequence here, because the engine did not end it in time."""
        piece = Piece(self._choice)
        self._end(piece, reason)
        piece.usage = (len(self._request.prompt), self.tokens)
        return piece

    def _add_token(self, piece: Piece, token: int, is_stop_token: bool) -> None:
        self.tokens += 1
        self._without_part += 1
        piece.tokens.append(token)
        piece.offsets.append(self._chars)
        text = "" if is_stop_token and not self._include_stop else self._pushed(token)
        self._through_parser(piece, text)

    def _through_parser(self, piece: Piece, text: str) -> None:
        if self._parser is None:
            self._through_stops(piece, text)
            return
        self._add_parts(piece, self._parser.feed(text))
        self.reasoning_tokens += self._parser.in_reasoning
        if self._parser.done and self.finish is None:
            self._emit_text(piece, self._stops.flush())
            self._finish(piece, FinishReason.STOP)

    def _add_parts(self, piece: Piece, parts: list[Part]) -> None:
        for part in parts:
            if self.finish is not None:
                return  # ended by a stop string
            if self._has_stops and isinstance(part, Content):
                self._through_stops(piece, part.text)
                continue
            if self._has_stops:
                self._emit_text(piece, self._stops.flush())  # no stop string spans a call or reasoning
            if isinstance(part, ToolCallDelta):
                self._name_call(part)
            self._emit(piece, part)

    def _name_call(self, call: ToolCallDelta) -> None:
        """Derives the call's id from the request's random id: a replay gives the same."""
        if call.name is not None:
            self._calls += 1
            call.id = call_id(self._request.id, self._choice, call.index)

    def _emit_text(self, piece: Piece, text: str) -> None:
        if text:
            self._emit(piece, Content(text))

    def _emit(self, piece: Piece, part: Part) -> None:
        part.tokens, self._without_part = self._without_part, 0
        self._in_call = isinstance(part, ToolCallDelta)
        if piece.parts:
            join_parts(piece.parts, (part,))
        else:
            piece.parts.append(part)

    def _through_stops(self, piece: Piece, text: str) -> None:
        """The text that may be sent after stop strings are applied. Before min_tokens they end nothing, but a match may begin
        before."""
        if not self._has_stops:
            self._emit_text(piece, text)
            return
        fed = self._stops.feed(text, may_end=self.tokens > self._min_tokens)
        self._emit_text(piece, fed.text)
        if fed.stop is not None:
            self._finish(piece, FinishReason.STOP)
            piece.stop_reason = fed.stop

    def _end(self, piece: Piece, reason: FinishReason) -> None:
        rest = self._text.flush()
        if self._parser is None:
            self._through_stops(piece, rest)
        else:
            self._add_parts(piece, [*self._parser.feed(rest), *self._parser.flush()])
        if self.finish is None:
            self._emit_text(piece, self._stops.flush())
            self._finish(piece, reason)

    def _finish(self, piece: Piece, reason: FinishReason) -> None:
        self.finish = piece.finish = reason
        piece.called = bool(self._calls)
        by_itself = reason is FinishReason.STOP
        piece.unfinished = not by_itself and (self._in_call or self._request.sampling.grammar is not None)

    def _pushed(self, token: int) -> str:
        text = self._text.push_one(token)
        self._chars += len(text)
        return text


def call_id(request: str, choice: int, index: int) -> str:
    """A tool call's id of nine letters and digits: the only form that every template accepts (Mistral's refuse others)."""
    return hashlib.sha256(f"{request}/{choice}/{index}".encode()).hexdigest()[:9]
