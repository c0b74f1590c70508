"""SamplingParams: sampling and stop conditions under vLLM's names, and their conversion for the engine.

the call's value      -> else the model's recommendation -> else OpenAI's default
stop, bad_words          are texts here. The engine handles token ids: bad words become ids, stop strings are found in the text
                         (outputs.py)
stop_token_ids           end an answer, as do the model's stop tokens unless `ignore_eos` is set
stop_on_repetition       ends an answer that repeats itself; the default of LLM does not apply beside ignore_eos or a format
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any

from msgspec import Struct, structs

from baton.errors import CallerError
from baton.protocol.grammar import Grammar
from baton.protocol.repetition import STOP_ON_REPETITION, RepetitionStop
from baton.protocol.request import SamplingParams as WireParams
from baton.text.tokenizer import Tokenizer

MAX_TOKENS = 128
"""Default of max_tokens if neither the call nor the model has one."""


class StructuredOutputsParams(Struct, frozen=True, kw_only=True):
    """The format of an answer: exactly one field is set (docs/structured-output.md)."""

    json: str | Mapping[str, Any] | None = None
    "JSON schema of the answer."
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    "Grammar in GBNF or Lark."
    json_object: bool | None = None

    def wire(self) -> Grammar:
        """The grammar for the engine. Raises CallerError unless exactly one field is set."""
        made: list[Grammar] = []
        if self.json is not None:
            made.append(Grammar("json_schema", self.json if isinstance(self.json, str) else dumps(self.json)))
        if self.regex is not None:
            made.append(Grammar("regex", self.regex))
        if self.choice is not None:
            made.append(Grammar("choice", dumps(list(self.choice))))
        if self.grammar is not None:
            made.append(Grammar("gbnf" if "::=" in self.grammar else "lark", self.grammar))
        if self.json_object:
            made.append(Grammar("json_object"))
        if len(made) != 1:
            raise CallerError(f"structured_outputs needs one of json, regex, choice, grammar, json_object, and has {len(made)}")
        return made[0]


GuidedDecodingParams = StructuredOutputsParams


class RepetitionDetectionParams(Struct, frozen=True):
    """Ends an answer whose last tokens are one pattern `min_count` times in a row. Names and meaning are vLLM's."""

    max_pattern_size: int = 0
    "Tokens of the longest pattern. 0: off."
    min_pattern_size: int = 0
    "Tokens of the shortest pattern. 0 is 1."
    min_count: int = 0

    def wire(self) -> RepetitionStop | None:
        """The limits for the engine. None if repetitions are allowed. Raises CallerError for numbers outside of their range."""
        if not self.max_pattern_size:
            return None
        shortest = max(1, self.min_pattern_size)
        try:
            rule = {"pattern_max": self.max_pattern_size, "pattern_min": shortest, "count_min": self.min_count, "tokens_min": 0}
            return RepetitionStop(**rule)
        except ValueError as error:
            raise CallerError(f"repetition_detection: {error}") from None


class SamplingParams(WireParams, frozen=True, kw_only=True):
    """Sampling and stop conditions. None means the model's default."""

    n: int = 1
    "Number of answers per prompt."
    stop: str | Sequence[str] | None = None
    "Texts that end an answer. They are not part of it, unless `include_stop_str_in_output`."
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    "Whether the model's stop tokens do not end the answer."
    skip_special_tokens: bool = True
    "Whether special tokens are omitted from the text."
    max_tokens: int | None = None  # type: ignore[assignment]
    temperature: float | None = None  # type: ignore[assignment]
    top_k: int | None = None  # type: ignore[assignment]
    top_p: float | None = None  # type: ignore[assignment]
    min_p: float | None = None  # type: ignore[assignment]
    repetition_penalty: float | None = None  # type: ignore[assignment]
    seed: int | None = None  # type: ignore[assignment]
    "Seed of the draws. None: a different one for every prompt and call."
    stop_token_ids: Sequence[int] | None = None  # type: ignore[assignment]
    bad_words: Sequence[str | Sequence[int]] | None = None  # type: ignore[assignment]
    "Texts or token ids that must not appear in the output."
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None  # type: ignore[assignment]

    disable_spec_decode: bool = False
    "Whether these answers have no draft tokens, where the model is loaded with `speculate`. Drafts never change an answer."
    stop_on_repetition: bool | None = None
    """Whether answers that repeat themselves end. None: the setting of LLM(stop_on_repetition=...), else only for the built-in
    model."""
    repetition_detection: RepetitionDetectionParams | None = None
    "Repetitions that end an answer: like stop_on_repetition, with explicit numbers."
    structured_outputs: StructuredOutputsParams | None = None
    "The format of the answers."
    guided_decoding: StructuredOutputsParams | None = None
    "The name of structured_outputs in older versions of vLLM."

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def wire_params(
    asked: WireParams, defaults: Mapping[str, Any], seed: int, tokenizer: Tokenizer, *, stop_on_repetition: bool = False
) -> WireParams:
    """Resolves every default. Wrong types of fields are detected when the request is validated (engine.py)."""
    if not isinstance(asked, WireParams):
        wrong = type(asked).__name__
        raise CallerError(f"sampling_params must be SamplingParams(temperature=0, ...), or a list of those, not {wrong}")
    given: dict[str, Any] = {
        name: value for name in WireParams.__struct_fields__ if (value := getattr(asked, name)) is not None
    }
    if isinstance(asked, SamplingParams):
        ends = () if asked.ignore_eos else tokenizer.eos_ids
        given["stop_token_ids"] = tuple(dict.fromkeys((*ends, *(asked.stop_token_ids or ()))))
        given["bad_words"] = _word_ids(asked.bad_words or (), tokenizer)
        bias = asked.logit_bias or ()
        given["logit_bias"] = tuple(bias.items() if isinstance(bias, Mapping) else bias)
        if given.get("top_k") == 0:
            given["top_k"] = -1  # both mean "all" to vLLM
        if given.get("seed") == -1:
            del given["seed"]  # a different seed each time, as in a server and in vLLM
        if asked.disable_spec_decode:
            given["drafts_max"] = 0
        if (structured := asked.structured_outputs or asked.guided_decoding) is not None:
            if not isinstance(structured, StructuredOutputsParams):
                wrong = type(structured).__name__
                raise CallerError(f"structured_outputs must be StructuredOutputsParams(json=...) or the like, not {wrong}")
            given["grammar"] = structured.wire()
        free = not asked.ignore_eos and "grammar" not in given
        if (rule := _repetition_stop(asked, default=free and stop_on_repetition)) is not None:
            given["repetition_stop"] = rule
    elif not asked.stop_token_ids:
        given["stop_token_ids"] = tuple(tokenizer.eos_ids)
    if (grammar := given.get("grammar")) is not None:
        from baton.grammar.matcher import checked  # this import loads numpy

        late = isinstance(asked, SamplingParams) and asked.ignore_eos
        given["grammar"] = structs.replace(checked(grammar), ends=tokenizer.eos_ids, ends_late=late)
        given["stop_token_ids"] = tuple(dict.fromkeys((*tokenizer.eos_ids, *given["stop_token_ids"])))
    return WireParams(**{"max_tokens": MAX_TOKENS, "seed": seed, **defaults, **given})


def _repetition_stop(asked: SamplingParams, *, default: bool) -> RepetitionStop | None:
    if asked.repetition_detection is not None:
        return asked.repetition_detection.wire()
    return STOP_ON_REPETITION if (default if asked.stop_on_repetition is None else asked.stop_on_repetition) else None


def _word_ids(words: Sequence[str | Sequence[int]], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Ids of each text at the start of an answer and after a space, which are different tokens."""
    texts = [lead + word for word in words if isinstance(word, str) for lead in ("", " ")]
    ids = [tuple(word) for word in words if not isinstance(word, str)]
    return tuple(each for each in dict.fromkeys([*ids, *map(tuple, tokenizer.encode_words(texts) if texts else [])]) if each)
