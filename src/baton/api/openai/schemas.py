"""A request's JSON object -> ChatBody or CompletionBody: typed, complete, within limits. Nothing else is passed on.

Fields are OpenAI's, and the extras that vLLM's clients send. known_fields.py has the rules for all others. Special values of
other servers keep their meaning: seed -1 (random), max_tokens -1 (up to the context) and 0 with echo (only the prompt), top_p 0
(the likeliest token), and an empty stop string (none).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from msgspec import structs

from baton.api.config import ApiConfig, ServedModel
from baton.api.errors import ApiError, bad, too_long
from baton.api.fields import Fields, checked_token_ids, expect, shown
from baton.api.generate.options import ChatBody, CompletionBody, Options, Prompt, StreamOptions
from baton.api.generate.thinking import ThinkingOptions, read_thinking
from baton.api.generate.tools import Tools, read_tools
from baton.api.limits import RANGES
from baton.api.openai.known_fields import (
    ALIASES,
    CHAT_ONLY,
    COMPLETION_ONLY,
    HARMLESS,
    HINTS,
    INTERNAL,
    UNSUPPORTED,
    is_neutral,
)
from baton.api.openai.repetition import repetition_stop_of
from baton.api.openai.structured import grammar_of
from baton.protocol.request import OPENAI_SAMPLING, SamplingParams

_PLAIN: Final = tuple(
    name for name in SamplingParams.__struct_fields__ if name in RANGES and name not in ("max_tokens", "seed", "logprobs")
)
TRUNCATE: Final = "truncate_prompt_tokens"
_REFUSED_IN_CHATS: Final = {**UNSUPPORTED, **COMPLETION_ONLY}
_REFUSED_OUTSIDE_OF_CHATS: Final = {**UNSUPPORTED, **CHAT_ONLY}


class Schema:
    """Reads the bodies of all POST routes that name a model."""

    def __init__(self, model: ServedModel, config: ApiConfig) -> None:
        self._model = model
        self._config = config
        self._limits = config.limits
        self._defaults: dict[str, Any] = {**structs.asdict(SamplingParams()), **OPENAI_SAMPLING, **model.sampling_defaults}
        self._stops_repetitions = bool(config.stop_on_repetition)
        self._defaults["top_k"] = int(min(self._defaults["top_k"], model.head_width))

    def chat(self, body: dict[str, Any]) -> ChatBody:
        """Reads the body of a chat."""
        fields = self.open(body, chat=True)
        messages: list[Any] = expect(list, fields.raw("messages"), "messages")
        continue_final = fields.boolean("continue_final_message")
        options = self._options(fields, max_tokens=_chat_max_tokens(fields), logprobs=_chat_logprobs(fields), chat=True)
        _require_no_best_of(fields, options.n)
        if fields.boolean("echo"):
            raise bad("echo is not supported for chats: it is for /v1/completions", "echo", code="unsupported")
        tools, (thinking, template_kwargs) = self.tools(fields), self.thinking(fields)
        return ChatBody(
            messages=messages,
            tools=tools,
            thinking=thinking,
            add_generation_prompt=fields.boolean("add_generation_prompt", default=True),
            continue_final_message=continue_final,
            template_kwargs=template_kwargs,
            options=replace(options, ignored=fields.finish(self._config.unknown_fields)),
        )

    def completion(self, body: dict[str, Any], *, prompts_max: int | None = None) -> CompletionBody:
        """Reads the body of a completion. `prompts_max`: replaces the limits `prompts` and `choices` for a request that
        processes a few prompts at a time."""
        fields = self.open(body)
        cut = fields.raw(TRUNCATE) is not None
        prompts = self.prompts(fields.raw("prompt"), prompts_max or self._limits.prompts, cut=cut)
        echo, suffix = fields.boolean("echo"), expect(str, fields.raw("suffix") or "", "suffix")
        if suffix and (echo or any(not isinstance(prompt, str) for prompt in prompts)):
            raise bad("suffix needs a prompt that is a text, and no echo", "suffix")
        prompt_only = echo and type(fields.raw("max_tokens")) is int and fields.raw("max_tokens") == 0
        max_tokens = 1 if prompt_only else _max_tokens(fields, 16)
        logprobs = fields.integer("logprobs", None)
        options = self._options(fields, max_tokens=max_tokens, logprobs=logprobs, chat=False)
        if prompts_max is None and options.n * len(prompts) > self._limits.choices:
            raise bad(f"n x prompts is {options.n * len(prompts)} and at most {self._limits.choices} are allowed", "n")
        _require_no_best_of(fields, options.n)
        options = replace(options, ignored=fields.finish(self._config.unknown_fields))
        return CompletionBody(options=options, prompts=prompts, echo=echo, suffix=suffix, prompt_only=prompt_only)

    def open(self, body: dict[str, Any], *, chat: bool = False) -> Fields:
        """Fields of a body with a served model and without unsupported settings. `chat`: it may have messages."""
        fields = Fields(body, self._limits, self._model.head_width)
        self.require_model(fields.raw("model"))
        for name in INTERNAL:
            if name in body:
                raise bad(f"{name} is not accepted from clients", name, code="internal_field")
        refused = _REFUSED_IN_CHATS if chat else _REFUSED_OUTSIDE_OF_CHATS
        fields.know(refused)
        for name in [name for name in refused if name in body]:  # a body has few of these names
            if not is_neutral(body[name], refused[name]):
                hint = f": {HINTS[name]}" if name in HINTS else ""
                raise bad(f"{name} is not supported{hint}", name, code="unsupported")
        if not isinstance(fields.raw("user"), str | None):
            raise bad(f"user must be a string, not {shown(fields.raw('user'))}", "user")
        fields.know(HARMLESS)
        return fields

    def require_model(self, name: Any) -> None:
        """Checks the model's name: raises 404 for an unknown one. A request without a model gets the served one."""
        if name is None or self._model.is_called(name):
            return
        if not isinstance(name, str):
            raise bad(f"model must be a string, not {shown(name)}", "model")
        shown_name = ascii(name) if len(name) <= self._limits.model_bytes else "with a name that long"
        raise ApiError(
            404, f"there is no model {shown_name} here; there is '{self._model.name}'", param="model", code="model_not_found"
        )

    def prompts(self, value: Any, most: int, *, cut: bool = False) -> tuple[Prompt, ...]:
        """A text, a list of texts, a list of token ids, or a list of such lists. `cut`: long prompts are truncated later."""
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list):
            raise bad(f"prompt must be a text, token ids, or a list of those, not {shown(value)}", "prompt")
        if not value:
            raise bad("prompt is an empty list", "prompt")
        if type(value[0]) is not str and type(value[0]) is not list:
            return (self._ids(value, "prompt", cut),)
        if len(value) > most:
            raise bad(f"prompt has {len(value)} prompts and at most {most} are allowed", "prompt")
        return tuple(self._prompt(entry, f"prompt[{index}]", cut) for index, entry in enumerate(value))

    def thinking(self, fields: Fields) -> tuple[ThinkingOptions, Mapping[str, Any] | None]:
        """The reasoning options, and the template's arguments besides the chat."""
        value = fields.raw("chat_template_kwargs")
        if value is not None and not isinstance(value, dict):
            raise bad(f"chat_template_kwargs must be an object, not {shown(value)}", "chat_template_kwargs")
        fields.boolean("stream_reasoning", default=True)  # reasoning is always streamed
        thinking = read_thinking(fields, value)
        return thinking, thinking.template_kwargs(value)

    def tools(self, fields: Fields) -> Tools | None:
        return read_tools(fields, self._limits)

    def _prompt(self, value: Any, place: str, cut: bool) -> Prompt:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise bad(f"{place} must be a text or a list of token ids, not {shown(value)}", "prompt")
        return self._ids(value, place, cut)

    def _ids(self, value: list[Any], place: str, cut: bool) -> tuple[int, ...]:
        if not value:
            raise bad(f"{place} has no tokens: at least 1 is needed", "prompt")
        longest = self._model.context_tokens - 1
        if len(value) > longest and not cut:
            raise too_long(len(value), self._model.context_tokens)
        try:
            return checked_token_ids(value, self._model.head_width, place)
        except ApiError as error:
            raise bad(str(error), "prompt") from None

    def _options(self, fields: Fields, *, max_tokens: int | None, logprobs: int | None, chat: bool) -> Options:
        """Reads the options that chat and completions share, each checked against its range."""
        limits, asked, ignore_eos = self._limits, grammar_of(fields, self._limits), fields.boolean("ignore_eos")
        stops_repetitions = self._stops_repetitions and asked is None and not ignore_eos
        sampling = SamplingParams(
            **self._numbers(fields),
            stop_token_ids=fields.token_ids("stop_token_ids", count_max=limits.token_ids),
            logit_bias=fields.logit_bias(),
            logprobs=logprobs,
            drafts_max=_drafts_max(fields),
            repetition_stop=repetition_stop_of(fields, default=stops_repetitions),
            grammar=None if asked is None else asked.grammar,
        )
        options = Options(
            stream=_stream_options(fields),
            n=fields.integer("n", 1),
            max_tokens=max_tokens,
            sampling=sampling,
            seed=fields.integer("seed", None, means_none=-1),
            stop=self._stops(fields),
            include_stop=fields.boolean("include_stop_str_in_output"),
            ignore_eos=ignore_eos,
            bad_words=fields.strings("bad_words", count_max=limits.token_ids, bytes_max=limits.bad_word_bytes),
            bad_words_token_ids=fields.token_ids("bad_words_token_ids", count_max=limits.token_ids),
            return_token_ids=fields.boolean("return_token_ids"),
            skip_special_tokens=fields.boolean("skip_special_tokens", default=True),
            add_special_tokens=fields.boolean("add_special_tokens", default=not chat),
            priority=fields.integer("priority", max(0, self._config.client_priority_min)),
            cache_salt=fields.name("cache_salt"),
            timeout_seconds=self._timeout(fields),
            grammar_field="" if asked is None else asked.field,
            truncate=-1 if fields.raw(TRUNCATE) == -1 else fields.integer(TRUNCATE, None),
        )
        if max_tokens is not None and sampling.min_tokens > max_tokens:
            raise bad(f"min_tokens ({sampling.min_tokens}) is more than max_tokens ({max_tokens})", "min_tokens")
        if options.stream.stream and sampling.prompt_logprobs is not None:
            raise bad("prompt_logprobs cannot be streamed: leave out stream", "prompt_logprobs")
        return options

    def _stops(self, fields: Fields) -> tuple[str, ...]:
        """Stop strings without the empty ones, which stop nothing, as in llama.cpp."""
        limits, name = self._limits, fields.given("stop", ALIASES["stop"])
        stops = fields.strings(name, count_max=limits.stop_strings, bytes_max=limits.stop_string_bytes, empty_allowed=True)
        return tuple(filter(None, stops))

    def _numbers(self, fields: Fields) -> dict[str, Any]:
        """Numbers of SamplingParams. Two values are adapted: top_p 0, and a top_k above the vocabulary, which means all tokens
        as in vLLM and llama.cpp, so that a client does not fail only on small models."""
        found: dict[str, Any] = {}
        for name in _PLAIN:
            given, default = fields.given(name, ALIASES.get(name, ())), self._defaults[name]
            whole = RANGES[name].whole
            found[name] = fields.integer(given, default, like=name) if whole else fields.number(given, default, like=name)
        found["top_k"] = min(found["top_k"], self._model.head_width) or -1
        return found if found["top_p"] else {**found, "top_p": 1.0, "top_k": 1}

    def _timeout(self, fields: Fields) -> float:
        longest = self._limits.request_seconds
        seconds = fields.number("timeout", longest)
        if seconds > longest:
            raise bad(f"timeout must be above 0 and at most {longest:g} seconds, not {shown(seconds)}", "timeout")
        return seconds


def _max_tokens(fields: Fields, default: int | None) -> int | None:
    """max_tokens of a body. -1 means up to the context, as in other servers."""
    return fields.integer(fields.given("max_tokens", ALIASES["max_tokens"]), default, like="max_tokens", means_none=-1)


def _chat_max_tokens(fields: Fields) -> int | None:
    """OpenAI's newer name takes precedence."""
    older, newer = _max_tokens(fields, None), fields.integer("max_completion_tokens", None, means_none=-1)
    return older if fields.raw("max_completion_tokens") is None else newer


def _drafts_max(fields: Fields) -> int | None:
    """llama.cpp's bound of draft tokens. The switch is the one that vLLM and SGLang propose."""
    most = fields.integer("speculative.n_max", None)
    off = fields.boolean(fields.given("disable_spec_decode", ALIASES["disable_spec_decode"]))
    return 0 if off else most


def _require_no_best_of(fields: Fields, n: int) -> None:
    best_of = fields.integer("best_of", n)
    if best_of < n:
        raise bad(f"best_of ({best_of}) must not be less than n ({n})", "best_of")
    if best_of > n:
        raise bad(f"best_of is not supported: it must equal n ({n})", "best_of", code="unsupported")


def _chat_logprobs(fields: Fields) -> int | None:
    wanted, top = fields.boolean("logprobs"), fields.integer("top_logprobs", None)
    if top is not None and top > 0 and not wanted:
        raise bad("top_logprobs needs logprobs to be true", "top_logprobs")
    return (top or 0) if wanted else None


def _stream_options(fields: Fields) -> StreamOptions:
    stream = fields.boolean("stream")
    value = fields.object("stream_options", ("include_usage", "continuous_usage_stats", "include_obfuscation"))
    if value is None:
        return StreamOptions(stream=stream)
    if not stream:
        raise bad("stream_options needs stream to be true", "stream_options")
    include, continuous = (
        expect(bool, value.get(name) is not None and value[name], f"stream_options.{name}", "stream_options")
        for name in ("include_usage", "continuous_usage_stats")
    )
    # As in vLLM: usage in every chunk only if usage is requested at all.
    return StreamOptions(stream=stream, include_usage=include, continuous_usage=include and continuous)
