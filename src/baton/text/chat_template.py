"""Chat messages to one prompt string, with the model's own template.

    messages --(chat_messages.py)--> plain messages --(template, in template_sandbox.py)--> prompt

Encode the prompt with add_special_tokens=False and parse_special=True: the template has written the special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateSyntaxError, UndefinedError, nodes
from jinja2.exceptions import SecurityError

from baton.errors import CallerError, InvalidConfig
from baton.text.chat_messages import plain_messages
from baton.text.clean import replace_lone_surrogates
from baton.text.template_sandbox import BoundedEnvironment, Budget, OverBudget, RaisedByTemplate, run_within

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"For a model without a template. Much used, but no model was asked whether it agrees."

# A client that could set these would choose the template, or what the server puts into it.
_RESERVED_BY_US = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
_RESERVED_BY_TEMPLATES = frozenset(
    {"bos_token", "eos_token", "raise_exception", "strftime_now", "namespace", "dict", "range", "loop", "self"}
    | {"caller", "varargs", "kwargs", "cycler", "joiner"}
)
_SHOWN_CHARS_MAX = 300
# Put at the end of the message to go on with. The space shows whether the template trims the message.
_CUT_HERE = "\ue000continue-here\ue000"


class TemplateFailed(CallerError):
    """The model's template does not take this chat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateLimits:
    """What one rendering may take."""

    messages_max: int = 4096
    "Messages in a chat."
    tools_max: int = 256
    "Tools and, counted apart, documents."
    extras_max: int = 64
    "Further values for the template."
    prompt_chars_max: int = 8 * 1024 * 1024
    "Characters of the prompt, and of any value the template makes on the way."
    units_max: int = 1_000_000
    "Work of the template (template_sandbox.py says what costs how much): some seconds at most."
    template_chars_max: int = 1024 * 1024
    "Characters of the template itself."


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A template, and what may be told about it in an error: only what it says itself, never what the chat says."""

    template: Template
    literals: tuple[str, ...]
    "Its string constants, the longest first."
    names: frozenset[str]
    "Words in its source."


class ChatTemplate:
    """Immutable after it is made; any number of threads may render with one."""

    def __init__(
        self,
        templates: str | Mapping[str, str] | None,
        *,
        bos_token: str = "",
        eos_token: str = "",
        limits: TemplateLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`templates` is one template, or several by name ("default", and "tool_use" for requests with tools).

        None means that the model has none: render() then refuses. Give CHATML to serve such a model anyway.
        Raises InvalidConfig for a template that jinja2 cannot read.
        """
        self._limits = limits or TemplateLimits()
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._environment = BoundedEnvironment(now)
        sources = {"default": templates} if isinstance(templates, str) else dict(templates or {})
        self._templates = {name: self._compiled(name, source) for name, source in sources.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._templates)

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
        """The prompt.

        add_generation_prompt    end with the beginning of an assistant's turn
        continue_final_message   end inside the last message, for the model to go on with it
        extras                   further values for the template, such as enable_thinking (chat_template_kwargs)

        Raises CallerError for messages that are wrong, and TemplateFailed where the template refuses or fails.
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

    def _compiled(self, name: str, source: str) -> _Compiled:
        if len(source) > self._limits.template_chars_max:
            raise InvalidConfig(
                f"the chat template '{name}' has {len(source)} characters and {self._limits.template_chars_max} are allowed"
            )
        try:
            tree = self._environment.bounded(source)
            constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
            literals = tuple(sorted(constants, key=len, reverse=True))
            return _Compiled(self._environment.from_string(tree), literals, frozenset(re.findall(r"\w+", source)))
        except TemplateSyntaxError as error:
            where = f"line {error.lineno}: {error.message}"
            raise InvalidConfig(f"the chat template '{name}' is not valid jinja: {where}") from error
        except (OverBudget, RecursionError) as error:
            raise InvalidConfig(f"the chat template '{name}' cannot be compiled: {error}") from error

    def _chosen(self, *, with_tools: bool) -> _Compiled:
        if not self._templates:
            raise CallerError("this model has no chat template: use the completions endpoint, or start the server with one")
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise CallerError(f"this model has the chat templates {', '.join(self._templates)}, and no 'default' one")
        return self._templates["default"]

    def _checked_list(self, values: object, name: str) -> list[Any] | None:
        """None where there are none: templates ask `if tools`, and some `is not none`."""
        if values is None:
            return None
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise CallerError(f"{name} must be a list, not {type(values).__name__}")
        if len(values) > self._limits.tools_max:
            raise CallerError(f"{name} has {len(values)} entries and at most {self._limits.tools_max} are allowed")
        if any(not isinstance(value, Mapping) for value in values):
            raise CallerError(f"every entry of {name} must be an object")
        return list(values) or None

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

    def _rendered(self, chosen: _Compiled, values: Mapping[str, Any]) -> str:
        budget = Budget(self._limits.units_max, self._limits.prompt_chars_max)
        try:
            return run_within(budget, lambda: "".join(self._within_size(chosen.template.generate(values))))
        except OverBudget as error:
            raise TemplateFailed(f"the model's chat template was stopped: {error}") from None
        except RaisedByTemplate as error:
            raise TemplateFailed(f"the model's chat template refuses this chat: {_reason(error, chosen.literals)}") from None
        except UndefinedError as error:
            raise TemplateFailed(f"the model's chat template misses a value: {_missing_name(error, chosen.names)}") from None
        except SecurityError:
            raise TemplateFailed("the model's chat template tried something that templates may not do") from None
        except (RecursionError, MemoryError) as error:
            raise TemplateFailed(f"the model's chat template nests or grows too far ({type(error).__name__})") from None
        except Exception as error:  # a template can fail in every way Python can; its words may hold the prompt
            raise TemplateFailed(f"the model's chat template failed on this chat ({type(error).__name__})") from None

    def _within_size(self, pieces: Iterator[str]) -> Iterator[str]:
        left = self._limits.prompt_chars_max
        for piece in pieces:
            left -= len(piece)
            if left < 0:
                raise OverBudget(f"the prompt would have more than {self._limits.prompt_chars_max} characters")
            yield piece


def _cut(prompt: str) -> str:
    at = prompt.rfind(_CUT_HERE)
    if at < 0:
        raise TemplateFailed("continue_final_message: the model's chat template leaves out or changes the last message")
    kept_spaces = prompt.startswith(_CUT_HERE + " ", at)
    return prompt[:at] if kept_spaces else prompt[:at].rstrip()


def _reason(error: RaisedByTemplate, literals: Sequence[str]) -> str:
    """What the template says, as far as it stands in the template: the rest may come from the chat and is left out."""
    words = str(error)
    for literal in literals:
        if words == literal:
            return words[:_SHOWN_CHARS_MAX]
        if len(literal) >= 8 and words.startswith(literal):
            return literal.rstrip()[:_SHOWN_CHARS_MAX] + " ..."
    return "(its reason may repeat the chat and is not shown)"


def _missing_name(error: UndefinedError, names: frozenset[str]) -> str:
    """The name at the end of jinja2's "... is undefined" or "... has no attribute ...", if the template has it."""
    for name in re.findall(r"'(\w{1,64})'", str(error))[::-1]:
        if name in names:
            return f"'{name}'"
    return "(a name that is not in the template)"
