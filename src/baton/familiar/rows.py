"""The kinds of row in an engine's table: each row says what one of its options means here.

same         the option has the same name and meaning here
alias        another name of a setting here; `convert` changes the unit of its value
not_needed   means nothing here, whatever its value: accepted, and a line says why
only         accepted where it has one of these values, else refused with the reason
instead      refused, with what to use here; accepted where its value asks for nothing (0, off, empty)
several      taken apart into several settings (speculation.py)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    "Name with underscores. On a command line they are dashes."
    kind: Literal["same", "alias", "not needed", "only", "instead", "several"]
    setting: str = ""
    "Field of ServeConfig, for `same` and `alias`."
    words: str = ""
    "Reason why the option is not needed, or what to use instead."
    only: tuple[str, ...] = ()
    flag: bool = False
    "Whether the option takes no value on a command line. Aliases of a flag are flags anyway."
    short: tuple[str, ...] = ()
    "Short options."
    nothing: tuple[str, ...] = ()
    "Neutral values for `instead`, which are accepted."
    convert: Callable[[Any], Any] | None = None
    values: tuple[str, ...] = ()
    "All values for `not needed`. On a command line the option may stand without one, which means the first."


def same(name: str, *short: str) -> Row:
    return Row(name, "same", name, short=short)


def alias(name: str, setting: str, *short: str, convert: Callable[[Any], Any] | None = None) -> Row:
    return Row(name, "alias", setting, short=short, convert=convert)


def not_needed(name: str, words: str, *short: str, flag: bool = False, values: tuple[str, ...] = ()) -> Row:
    return Row(name, "not needed", words=words, short=short, flag=flag, values=values)


def only(name: str, values: str, words: str, *short: str) -> Row:
    return Row(name, "only", words=words, only=tuple(values.split()), short=short)


NOTHING = ("", "0", "0.0", "False", "false", "None", "none", "null", "()", "[]", "{}")


def instead(name: str, words: str, *short: str, flag: bool = False, nothing: tuple[str, ...] = NOTHING) -> Row:
    return Row(name, "instead", words=words, short=short, flag=flag, nothing=nothing)


def several(name: str, words: str) -> Row:
    return Row(name, "several", words=words)


def by_request(name: str) -> Row:
    """A row of a sampling option. No value is neutral: temperature 0 is greedy."""
    return Row(name, "instead", words="each request may say it; --generation-config has the defaults")


# Reasons that several engines' options share

ALWAYS = "it is always done"
ONE_WAY = "there is one way, and it is taken where it helps"
ONE_GPU = "a model runs on one GPU, or on several of one machine with --tensor-parallel-size"
ONE_DEVICE = "all weights are on one device (--device)"
NO_REMOTE_CODE = "code of a model's repository is never run"
NO_LORA = "LoRA adapters are not supported yet"
TEXT_ONLY = "only text is supported"
ITS_TOKENIZER = "the tokenizer comes with the model"
BY_ROLE = "prefill and decode instances have --role (docs/cluster.md)"
IN_METRICS = "figures are at /metrics, and not in the log"
NO_PROMPT_LOGGED = "no prompt and no answer is logged; --log-level info has a line per request"
NO_PORTS = "processes of one server need no ports"


def gib_of_bytes(value: Any) -> float:
    """Parses vLLM's sizes: a number of bytes, or 25G, 512Mi and the like."""
    text = str(value).strip()
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
    number = text.rstrip("kKmMgGiIbB")
    unit = text[len(number) :].lower().removesuffix("b")
    return float(number) * units.get(unit, 1) / 2**30


def gib_of_mib(value: Any) -> float:
    return float(value) / 1024


def none_if_zero(value: Any) -> Any:
    """The value, or None for 0, llama.cpp's value for "the model's default"."""
    return None if str(value).strip() == "0" else value


def none_if_negative(value: Any) -> Any:
    """The value, or None if negative, SGLang's value for "off"."""
    return None if str(value).strip().startswith("-") else value
