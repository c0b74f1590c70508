"""Chat messages to one prompt string, with the model's own template.

    messages --(chat_messages.py)--> plain messages --(template_process.py)--> template_child.py --> prompt

The template is compiled and rendered in a child process that can be killed (template_sandbox.py). This module checks the input
and decides what an error may contain.

Encode the prompt with add_special_tokens=False and parse_special=True: the template has written the special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from baton.errors import CallerError, InvalidConfig
from baton.text.chat_messages import plain_messages
from baton.text.clean import replace_lone_surrogates
from baton.text.helper import HelperCrash, HelperTimeout
from baton.text.template_process import TemplateProcess, shared_process
from baton.text.template_wire import UTF8_BYTES_MAX, Kind, Reply, Request

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"Template of a model without one. Widely used, but not necessarily the model's own format."

# Names that a client must not set: they choose the template, or the server passes them to it.
_RESERVED_BY_US = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
_RESERVED_BY_TEMPLATES = frozenset(
    {"bos_token", "eos_token", "raise_exception", "strftime_now", "namespace", "dict", "range", "loop", "self"}
    | {"caller", "varargs", "kwargs", "cycler", "joiner"}
)
_SHOWN_CHARS_MAX = 300
# Appended to the message to continue. The space shows whether the template trims the message.
_CUT_HERE = "\ue000continue-here\ue000"


class TemplateFailed(CallerError):
    """The model's template refuses this chat."""


class TemplateStopped(TemplateFailed):
    """The rendering was killed, which does not depend on the chat: the next rendering may succeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateLimits:
    """Limits of one rendering."""

    messages_max: int = 4096
    "Number of messages per chat."
    tools_max: int = 256
    "Number of tools, and separately of documents."
    extras_max: int = 64
    "Number of extra values for the template."
    prompt_chars_max: int = 8 * 1024 * 1024
    "Characters of the prompt."
    render_seconds_max: float = 5.0
    "Seconds per rendering. A large ordinary chat takes a tenth of a second."
    template_chars_max: int = 1024 * 1024
    "Characters of the template itself."


@dataclass(frozen=True, slots=True)
class _Template:
    """A template, and the texts that an error may show: only the template's own, never the chat's."""

    source: str
    literals: tuple[str, ...]
    "String constants of the template, longest first."
    names: frozenset[str]
    "Words in the template's source."


class ChatTemplate:
    """A chat template, thread-safe: rendering changes no state."""

    def __init__(
        self,
        templates: str | Mapping[str, str] | None,
        *,
        bos_token: str = "",
        eos_token: str = "",
        limits: TemplateLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
        process: TemplateProcess | None = None,
    ) -> None:
        """`templates` is one template, or several by name ("default", and "tool_use" for requests with tools).

        None: the model has no template and render() raises. CHATML serves such a model anyway. `process` renders; by default
        the process that all templates share. Raises InvalidConfig for a template that jinja2 cannot read.
        """
        self._limits = limits or TemplateLimits()
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now
        self._process = process or shared_process()
        sources = {"default": templates} if isinstance(templates, str) else dict(templates or {})
        self._templates = {name: self._compiled(name, source) for name, source in sources.items()}
        self.found_out: dict[tuple[bool | str, ...], bool] = {}
        "Results of the trial renderings of system_messages.py."

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._templates)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(template.source for template in self._templates.values())

    @property
    def limits(self) -> TemplateLimits:
        return self._limits

    def render(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat.

        add_generation_prompt    end with the start of an assistant's turn
        continue_final_message   end inside the last message, so that the model continues it
        extras                   further values for the template, such as enable_thinking (chat_template_kwargs)

        Raises CallerError for invalid messages, and TemplateFailed if the template refuses or fails.
        """
        if add_generation_prompt and continue_final_message:
            raise CallerError(
                "add_generation_prompt and continue_final_message exclude each other: "
                "a prompt cannot begin a new turn and go on with the last one"
            )
        template = self._chosen(with_tools=bool(tools))
        chat = plain_messages(messages, messages_max=self._limits.messages_max)
        if continue_final_message:
            chat[-1] = {**chat[-1], "content": chat[-1]["content"] + _CUT_HERE + " "}
        values = {
            **self._checked_extras(extras),
            **self._tokens,
            "messages": chat,
            "tools": self._checked_list(tools, "tools"),
            "documents": self._checked_list(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        prompt = self._rendered(template, values)
        return replace_lone_surrogates(_cut(prompt) if continue_final_message else prompt)

    def _compiled(self, name: str, source: str) -> _Template:
        """Compile the template in its own process. Raises InvalidConfig if it is too long, invalid, or does not compile in
        time."""
        if len(source) > self._limits.template_chars_max:
            raise InvalidConfig(
                f"the chat template '{name}' has {len(source)} characters and {self._limits.template_chars_max} are allowed"
            )
        try:
            kind, words = self._request(source, None)
        except HelperTimeout:
            kind, words = "failed", f"it takes more than {self._limits.render_seconds_max:g} s"
        except HelperCrash:
            kind, words = "failed", "it ends the process that compiles it"
        match kind, words:
            case "ok", [*literals]:
                by_length = sorted(map(str, literals), key=len, reverse=True)
                return _Template(source, tuple(by_length), frozenset(re.findall(r"\w+", source)))
            case "syntax", _:
                raise InvalidConfig(f"the chat template '{name}' is not valid jinja: {words}")
        raise InvalidConfig(f"the chat template '{name}' cannot be compiled: {words or kind}")

    def _chosen(self, *, with_tools: bool) -> _Template:
        if not self._templates:
            raise CallerError("this model has no chat template: use the completions endpoint, or start the server with one")
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise CallerError(f"this model has the chat templates {', '.join(self._templates)}, and no 'default' one")
        return self._templates["default"]

    def _checked_list(self, values: object, name: str) -> list[Any] | None:
        """The list of tools or documents. None if it is empty: templates test `if tools`, some `is not none`."""
        if values is None:
            return None
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise CallerError(f"{name} must be a list, not {type(values).__name__}")
        if len(values) > self._limits.tools_max:
            raise CallerError(f"{name} has {len(values)} entries and at most {self._limits.tools_max} are allowed")
        if any(not isinstance(value, Mapping) for value in values):
            raise CallerError(f"every entry of {name} must be an object")
        return [dict(value) for value in values] or None

    def _checked_extras(self, extras: object) -> dict[str, Any]:
        if extras is None:
            return {}
        if not isinstance(extras, Mapping):
            raise CallerError(f"chat_template_kwargs must be an object, not {type(extras).__name__}")
        if len(extras) > self._limits.extras_max:
            raise CallerError(f"chat_template_kwargs has {len(extras)} entries; {self._limits.extras_max} are allowed")
        for key in extras:
            if not isinstance(key, str) or len(key) > 64 or not key.isidentifier() or key.startswith("_"):
                raise CallerError("chat_template_kwargs: a key must be a plain name of at most 64 characters")
            if key in _RESERVED_BY_US | _RESERVED_BY_TEMPLATES:
                raise CallerError(f"chat_template_kwargs may not set '{key}': the server sets it")
        return dict(extras)

    def _rendered(self, template: _Template, values: dict[str, Any]) -> str:
        """Renders the template, or raises. An error of the template may contain the prompt: only text from the template's
        source is shown."""
        try:
            kind, words = self._request(template.source, values)
        except HelperTimeout:
            seconds = self._limits.render_seconds_max
            raise TemplateStopped(f"the model's chat template was stopped: it takes more than {seconds:g} s") from None
        except HelperCrash:
            raise TemplateStopped("the model's chat template ends the process that renders it") from None
        except (TypeError, ValueError, RecursionError):
            raise CallerError("messages, tools and extras must be plain JSON values, and not nested deeply") from None
        if kind == "ok":
            return str(words)
        raise TemplateFailed(f"the model's chat template {self._failure(template, kind, str(words))}") from None

    def _failure(self, template: _Template, kind: Kind, words: str) -> str:
        match kind:
            case "raised":
                return f"refuses this chat: {_reason(words, template.literals)}"
            case "undefined":
                return f"misses a value: {_missing_name(words, template.names)}"
            case "forbidden":
                return "tried something that templates may not do"
            case "too_long":
                return f"was stopped: the prompt would have more than {self._limits.prompt_chars_max} characters"
            case "memory":
                return "was stopped: it takes too much memory"
        if words == "RecursionError":
            return "nests too far (RecursionError)"
        return f"failed on this chat ({words})"

    def _request(self, source: str, values: dict[str, Any] | None) -> Reply:
        limits = self._limits
        request: Request = {
            "source": source,
            "values": values,
            "now": self._now().isoformat(),
            "prompt_chars_max": limits.prompt_chars_max,
        }
        chars_max = max(limits.prompt_chars_max, limits.template_chars_max)
        return self._process.render(request, limits.render_seconds_max, UTF8_BYTES_MAX * chars_max + 4096)


def _cut(prompt: str) -> str:
    at = prompt.rfind(_CUT_HERE)
    if at < 0:
        raise TemplateFailed("continue_final_message: the model's chat template leaves out or changes the last message")
    kept_spaces = prompt.startswith(_CUT_HERE + " ", at)
    return prompt[:at] if kept_spaces else prompt[:at].rstrip()


def _reason(words: str, literals: Sequence[str]) -> str:
    """The template's reason, as far as it is text of the template: the rest may come from the chat."""
    for literal in literals:
        if words == literal:
            return words[:_SHOWN_CHARS_MAX]
        if len(literal) >= 8 and words.startswith(literal):
            return literal.rstrip()[:_SHOWN_CHARS_MAX] + " ..."
    return "(its reason may repeat the chat and is not shown)"


def _missing_name(words: str, names: frozenset[str]) -> str:
    """The name in jinja2's "... is undefined" or "... has no attribute ...", if the template contains it."""
    for name in re.findall(r"'(\w{1,64})'", words)[::-1]:
        if name in names:
            return f"'{name}'"
    return "(a name that is not in the template)"
