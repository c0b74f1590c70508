"""Builds the engine's requests from a checked body: tokenises text and resolves every open default."""

from __future__ import annotations

import hashlib
import secrets
import uuid
from dataclasses import dataclass, replace

from msgspec import structs

from baton.api.errors import bad, too_long
from baton.api.front import Front
from baton.api.generate.answer_parts import answer_parts, call_grammar, thinking_rules, without_thought
from baton.api.generate.options import ChatBody, CompletionBody, Options, Prompt
from baton.api.generate.prompts import (
    characters_of,
    cut,
    cut_around_gap,
    encoded,
    prompts_of,
    require_fill_in,
    require_may_fit,
    room_for_prompt,
    within_total,
)
from baton.api.http.auth import ApiCaller
from baton.errors import BadGrammar
from baton.protocol.grammar import Grammar
from baton.protocol.ids import RequestId
from baton.protocol.request import GenerateRequest, Pooling
from baton.protocol.thinking import Thinking
from baton.text import fill_in
from baton.text.chat_prompt import render_chat
from baton.text.parsers.base import MakeParser
from baton.text.stops import StopAutomaton


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One HTTP request, ready to run."""

    requests: tuple[GenerateRequest, ...]
    "Requests, one per prompt."
    options: Options
    stops: StopAutomaton
    echo: bool = False
    prompt_only: bool = False
    "Whether the engine's one token is left out of the answer: it generates one because it must."
    parser: MakeParser | None = None
    "Splits each sequence's text into parts. None: all text is content."
    thinks: bool = False
    "Whether the parser may find reasoning."
    shown_ids: frozenset[int] = frozenset()
    "Special tokens that the parser needs: their text is kept despite skip_special_tokens."

    @property
    def sequences(self) -> int:
        return len(self.requests) * self.options.n

    def traced(self, traceparent: str) -> Job:
        """The job with the client's trace in its requests. Empty: unchanged."""
        if not traceparent:
            return self
        return replace(self, requests=tuple(structs.replace(request, traceparent=traceparent) for request in self.requests))

    @property
    def only_text(self) -> bool:
        """Within an answer the client needs the text and nothing else, and no stop string can end it."""
        options = self.options
        beside = (
            self.parser is not None
            or options.return_token_ids
            or options.stream.continuous_usage
            or self.echo
            or self.prompt_only
            or self.stops.stops
        )
        return options.sampling.logprobs is None and options.sampling.prompt_logprobs is None and not beside


def require_generates(front: Front) -> None:
    """Refuse generation by an encoder, which reads a text as a whole: it has no next token."""
    if not front.model.generates:
        able = (
            "classifies texts: ask /classify, /rerank or /score" if front.model.labels else "gives vectors: ask /v1/embeddings"
        )
        raise bad(f"{front.model.name} is an encoder, which generates no text. It {able}", "model", code="unsupported")


def chat_job(front: Front, body: ChatBody, caller: ApiCaller) -> Job:
    """Builds the job of a chat: renders the template, adds grammars of tools and limits of reasoning, and tokenises."""
    require_generates(front)
    require_may_fit(front, characters_of(body.messages))  # refuse here, before the template copies it
    text, mark = render_chat(
        front.template,
        front.tokenizer,
        body.messages,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        tools=None if body.tools is None else body.tools.listed,
        tools_in_words=not front.style.template_knows_tools,
        extras=body.template_kwargs,
    )
    options = body.options
    if (grammar := call_grammar(front, body)) is not options.sampling.grammar:
        options = replace(options, sampling=structs.replace(options.sampling, grammar=grammar), grammar_field="tools")
    text = without_thought(front, body, text, options.sampling.grammar)
    parts = answer_parts(front, body, text)
    thinking = thinking_rules(front, body, parts, constrained=options.sampling.grammar is not None)
    ids = cut(front, encoded(front, text, options, mark), options)
    job = _job(front, [ids], options, caller)
    job = replace(job, requests=tuple(_with_thinking(request, thinking) for request in job.requests))
    return replace(job, parser=parts.make, thinks=parts.thinks, shown_ids=parts.shown_ids)


def _with_thinking(request: GenerateRequest, rules: Thinking | None) -> GenerateRequest:
    if rules is None:
        return request
    if (rules.end,) in request.sampling.bad_words:
        raise bad("bad_words has the end of a thought, which a thinking budget needs", "bad_words")
    return structs.replace(request, sampling=structs.replace(request.sampling, thinking=rules))


def completion_job(front: Front, body: CompletionBody, caller: ApiCaller) -> Job:
    require_generates(front)
    if body.suffix:
        return _fill_in_job(front, body, caller)
    prompts, options = prompts_of(front, body), body.options
    if body.echo and options.sampling.logprobs is not None and options.sampling.prompt_logprobs is None:
        # OpenAI's way to score a prompt: echo it, with the log-probabilities of its tokens.
        asked = replace(options, sampling=structs.replace(options.sampling, prompt_logprobs=options.sampling.logprobs))
        return replace(_job(front, prompts, asked, caller), options=options, echo=True, prompt_only=body.prompt_only)
    return replace(_job(front, prompts, options, caller), echo=body.echo, prompt_only=body.prompt_only)


def embedding_job(
    front: Front, body: CompletionBody, pooling: Pooling, caller: ApiCaller, *, labels: tuple[int, ...] = ()
) -> Job:
    """A vector per prompt, or the logits of `labels`. The engine also generates a token, because it must."""
    job = replace(_job(front, prompts_of(front, body, keep="first"), body.options, caller), prompt_only=True)
    requests = (
        structs.replace(request, sampling=structs.replace(request.sampling, pooling=pooling, label_ids=labels))
        for request in job.requests
    )
    return replace(job, requests=tuple(requests))


def _fill_in_job(front: Front, body: CompletionBody, caller: ApiCaller) -> Job:
    """A job for texts before a gap and one text after it. The model's own marks end the answer too."""
    marks, options = require_fill_in(front, "suffix"), body.options
    require_may_fit(front, len(body.suffix))
    behind = fill_in.plain_after(front.tokenizer, body.suffix)
    room = room_for_prompt(front, options) - marks.marks - len(front.tokenizer.prefix_ids)

    def ids(text: Prompt) -> tuple[int, ...]:
        assert isinstance(text, str)
        require_may_fit(front, len(text))
        before, after = fill_in.plain(front.tokenizer, text), behind
        if options.truncate is not None:
            before, after = cut_around_gap(before, after, room)
        return (*front.tokenizer.prefix_ids, *marks.ids(before, after))

    prompts = within_total(front, map(ids, body.prompts))
    sampling = structs.replace(options.sampling, stop_token_ids=(*options.sampling.stop_token_ids, *marks.ends))
    return replace(_job(front, prompts, replace(options, sampling=sampling), caller), options=options)


def _job(front: Front, prompts: list[tuple[int, ...]], options: Options, caller: ApiCaller) -> Job:
    _require_priority(front, options, caller)
    stops = StopAutomaton(options.stop)
    salt = _salt(caller, options.cache_salt)
    bad_words = _bad_words(front, options)
    # Without a seed from the client one is drawn here, so that a lost request is replayed to the same tokens.
    seed = options.seed if options.seed is not None else secrets.randbits(63)
    grammar = _grammar(front, options)
    requests = tuple(_request(front, ids, options, bad_words, grammar, seed, salt) for ids in prompts)
    _require_bounded(front, requests, options)
    return Job(requests=requests, options=options, stops=stops)


def _request(
    front: Front,
    ids: tuple[int, ...],
    options: Options,
    bad_words: tuple[tuple[int, ...], ...],
    grammar: Grammar | None,
    seed: int,
    salt: bytes,
) -> GenerateRequest:
    """Builds the engine's request for one prompt. Raises ApiError if prompt and answer do not fit the context."""
    context = front.model.context_tokens
    if not ids:
        raise bad("the prompt has no tokens: at least 1 is needed", "prompt")
    if len(ids) >= context:
        raise too_long(len(ids), context)
    if max(ids) >= front.model.head_width:
        raise bad(f"the prompt has token {max(ids)}, which the model does not have", "prompt")
    max_tokens = min(context - len(ids), _longest(front, ids, options) if options.max_tokens is None else options.max_tokens)
    if (least := options.sampling.min_tokens) > max_tokens:
        raise bad(f"min_tokens ({least}) is more than the {max_tokens} tokens that may follow this prompt", "min_tokens")
    # An answer with a grammar ends with a stop token; ignore_eos only delays it (Grammar.ends_late).
    ends = front.tokenizer.eos_ids if grammar is not None or not options.ignore_eos else ()
    return GenerateRequest(
        id=RequestId(uuid.uuid4().hex),
        prompt=ids,
        n=options.n,
        priority=options.priority,
        timeout_seconds=options.timeout_seconds,
        salt=salt,
        sampling=structs.replace(
            options.sampling,
            max_tokens=max_tokens,
            stop_token_ids=tuple(dict.fromkeys((*ends, *options.sampling.stop_token_ids))),
            seed=seed,
            bad_words=bad_words,
            grammar=grammar,
        ),
    )


def _longest(front: Front, ids: tuple[int, ...], options: Options) -> int:
    """max_tokens of a request without one: small enough that no limit of the server refuses it."""
    limits = front.limits
    recommended = front.model.sampling_defaults.get("max_tokens", front.model.context_tokens)
    longest = min(int(recommended), limits.request_tokens // options.n)
    if options.sampling.logprobs is not None:
        asked = 0 if options.sampling.prompt_logprobs is None else len(ids) * (1 + options.sampling.prompt_logprobs)
        longest = min(longest, (limits.logprob_entries - asked) // (options.n * (1 + options.sampling.logprobs)))
    return max(longest, options.sampling.min_tokens, 1)


def _salt(caller: ApiCaller, cache_salt: str) -> bytes:
    """Cache salt that includes the tenant: another tenant that guesses `cache_salt` still gets a different hash."""
    if not caller.tenant and not cache_salt:
        return b""
    return hashlib.sha256(b"baton-salt\0" + caller.tenant + b"\0" + cache_salt.encode("utf-8", "replace")).digest()


def _grammar(front: Front, options: Options) -> Grammar | None:
    """The checked grammar. It was compiled once in a separate process, so it cannot crash a worker."""
    if options.sampling.grammar is None:
        return None
    size, most = len(options.sampling.grammar.text.encode("utf-8", "replace")), front.limits.grammar_bytes
    if size > most:
        raise bad(f"{options.grammar_field} has {size} bytes and at most {most} are allowed", options.grammar_field)
    if not front.tokenizer.eos_ids:
        raise bad("the model has no end-of-text token: it cannot answer in a given format", options.grammar_field)
    try:
        grammar = front.check_grammar(options.sampling.grammar)
    except BadGrammar as error:
        raise bad(f"{options.grammar_field}: {error}", options.grammar_field, code="invalid_grammar") from None
    return structs.replace(grammar, ends=front.tokenizer.eos_ids, ends_late=options.ignore_eos)


def _bad_words(front: Front, options: Options) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word, at the start of a text and after a space. The name of a special token forbids that token."""
    ids = tuple((token,) for token in dict.fromkeys(options.bad_words_token_ids))
    if not options.bad_words:
        return ids
    limits = front.limits
    size = sum(len(word.encode("utf-8", "replace")) for word in options.bad_words)
    if size > limits.bad_words_bytes:
        raise bad(f"bad_words has {size} bytes and at most {limits.bad_words_bytes} are allowed", "bad_words")
    both = front.tokenizer.encode_words([lead + word for word in options.bad_words for lead in ("", " ")])
    found = tuple(each for each in dict.fromkeys([*ids, *map(tuple, both)]) if each)
    tokens = sum(map(len, found))
    if tokens > limits.bad_words_tokens:
        raise bad(f"bad_words has {tokens} tokens and at most {limits.bad_words_tokens} are allowed", "bad_words")
    if any(max(each) >= front.model.head_width for each in found):
        raise bad("bad_words has a word with tokens that the model does not have", "bad_words")
    return found


def _require_priority(front: Front, options: Options, caller: ApiCaller) -> None:
    """Refuse a priority above the minimum without an admin key. Any client may lower its priority."""
    lowest = front.config.client_priority_min
    if options.priority < lowest and not caller.admin:
        message = (
            f"priority must be at least {lowest}, not {options.priority}: lower ones need an admin key (--client-priority-min)"
        )
        raise bad(message, "priority", code="priority_not_allowed")


def _require_bounded(front: Front, requests: tuple[GenerateRequest, ...], options: Options) -> None:
    """Bounds the product of the fields, which are each bounded alone."""
    limits = front.limits
    outputs = sum(request.sampling.max_tokens for request in requests) * options.n
    if outputs > limits.request_tokens:
        raise bad(f"n x prompts x max_tokens is {outputs} and at most {limits.request_tokens} are allowed", "max_tokens")
    entries = 0 if options.sampling.logprobs is None else outputs * (1 + options.sampling.logprobs)
    if options.sampling.prompt_logprobs is not None:
        of_prompts = sum(len(request.prompt) for request in requests) * (1 + options.sampling.prompt_logprobs)
        if of_prompts > limits.prompt_logprob_entries:
            raise bad(
                f"{of_prompts} log-probabilities of prompts and at most {limits.prompt_logprob_entries} are allowed: "
                "lower prompt_logprobs, or send fewer or shorter prompts in one request",
                "prompt_logprobs",
            )
        entries += of_prompts
    if entries > limits.logprob_entries:
        raise bad(
            f"{entries} log-probabilities could be reported and at most {limits.logprob_entries} are allowed: "
            "lower logprobs, n or max_tokens",
            "logprobs",
        )
