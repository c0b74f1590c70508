"""--help that fits a terminal of 80 columns, for every command.

Usage, description, examples, then options by group: a name is never truncated, a value is a short word (N, FILE), choices and
the default are in the text. A command with many options shows the common ones; --help-all shows all. For an unknown option a
name is suggested only if the spelling is close.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, takewhile
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from baton.cli.quick_values import read_quickly
from baton.cli.settings import FLAG_WORDS
from baton.cli.spellings import in_our_form
from baton.config.schema import BASIC, BASIC_BESIDE, GROUPS, flag_of
from baton.familiar import BY_ALIAS, FOREIGN, closest

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

WIDTH_MAX = 100
WIDTH_MIN = 40
TEXT_AT = 26
"""Column at which descriptions begin. A longer name has its own line."""


class HelpfulTyper(typer.Typer):
    """A Typer whose commands and groups use this module's help format."""

    def __init__(self, **options: Any) -> None:
        options = {"cls": HelpfulGroup, "rich_markup_mode": None, "no_args_is_help": True, "add_completion": False, **options}
        options.setdefault("context_settings", {"help_option_names": ["-h", "--help"]})
        super().__init__(**options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[CommandT], CommandT]:
        options = {"cls": HelpfulCommand, **options}
        if options["cls"] is HelpfulCommand:
            options.setdefault("context_settings", {"help_option_names": ["-h", "--help"]})
        return super().command(name, **options)


class HelpfulCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return read_quickly(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(command_help(self, ctx, everything=False))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--help-all" in args and has_server_options(self):
            typer.echo(command_help(self, ctx, everything=True).rstrip())
            ctx.exit()
        args = in_our_form(self, ctx, args)
        refuse_value_of_flag(self, ctx, args)
        refuse_option_as_value(self, ctx, args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":
                suggest_close(error, self.params)
            elif type(error).__name__ == "BadParameter":
                say_what_number(error)
            raise


class HelpfulGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return read_quickly(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        names = self.list_commands(ctx)
        commands = [(name, self.get_command(ctx, name)) for name in names]
        rows = [(name, command.get_short_help_str(200)) for name, command in commands if command and not command.hidden]
        own = [(name_of(param), text_of(param)) for param in options_by_group(self.params)[OWN]]
        blocks = [usage(self, ctx), *paragraphs(self.help or "", width()), table("Commands", rows, width())]
        formatter.write(joined([*blocks, table(OWN, [*own, HELP_ROW], width())]))


HELP_ROW = ("-h, --help", "Show this text.")
HELP_ALL_ROW = ("--help-all", "Show all options, by group.")
OWN = "Options"


def width() -> int:
    return max(WIDTH_MIN, min(WIDTH_MAX, shutil.get_terminal_size().columns))


def command_help(command: Any, ctx: Any, *, everything: bool) -> str:
    brief, columns = not everything and has_server_options(command), width()
    wanted = basic_names(command)
    params = [param for param in command.params if not brief or param.name in wanted]
    arguments = [(name_of(param), text_of(param)) for param in params if param.param_type_name == "argument"]
    blocks = [usage(command, ctx), *paragraphs(command.help or "", columns)]
    blocks += [table("Arguments", arguments, columns)] if arguments else []
    for group, them in options_by_group(params).items():
        rows = [(name_of(param), text_of(param, brief=brief and group != OWN)) for param in them]
        rest = [HELP_ROW, *([HELP_ALL_ROW] if has_server_options(command) else [])] if group == OWN else []
        blocks.append(table(group, [*rows, *rest], columns))
    return joined(blocks)


def options_by_group(params: Iterable[Any]) -> dict[str, list[Any]]:
    """The command's own group first, then the others in order, then options without a group."""
    found: dict[str, list[Any]] = {}
    for param in params:
        if param.param_type_name == "option" and not param.hidden:
            found.setdefault(getattr(param, "rich_help_panel", None) or OWN, []).append(param)
    own = found.pop(OWN, [])
    order = [*[*found][:1], *GROUPS, *found]
    places = {name: place for names in GROUPS.values() for place, name in enumerate(names)}
    shown = {group: found[group] for group in dict.fromkeys(order) if group in found}
    return {group: sorted(them, key=lambda param: places.get(param.name, 0)) for group, them in shown.items()} | {OWN: own}


def has_server_options(command: Any) -> bool:
    """Whether the command has the options of a server, which are too many for one screen."""
    return any(param.name == "positional" for param in command.params)


def basic_names(command: Any) -> set[str]:
    """Options that --help shows. Those without a group belong to the command itself."""
    names = {param.name for param in command.params}
    free = {param.name for param in command.params if not getattr(param, "rich_help_panel", None)}
    return free | {*BASIC} | {name for name, beside in BASIC_BESIDE.items() if beside in names}


def joined(blocks: Iterable[str]) -> str:
    return "\n\n".join(block for block in blocks if block) + "\n"


def usage(command: Any, ctx: Any) -> str:
    pieces = " ".join(command.collect_usage_pieces(ctx))
    return f"Usage: {ctx.command_path} {pieces}"


def paragraphs(text: str, columns: int) -> list[str]:
    """Paragraphs of a text. Those that begin with \\b are kept as they are; others are wrapped."""
    found = []
    for part in re.split(r"\n[ \t]*\n", textwrap.dedent(plain(text)).strip()):
        kept = part.lstrip().startswith("\b")
        found.append(part.replace("\b\n", "").strip("\n") if kept else textwrap.fill(" ".join(part.split()), columns))
    return found


def plain(text: str) -> str:
    """The text without Rich's markup."""
    return re.sub(r"\[/?(bold|dim|italic)\]", "", text).replace("\\[", "[")


def table(title: str, rows: Sequence[tuple[str, str]], columns: int) -> str:
    lines = [f"{title}:"]
    indent = " " * TEXT_AT
    for name, text in rows:
        wrapped = textwrap.wrap(plain(text), columns - TEXT_AT, break_on_hyphens=False) or [""]
        if len(name) + 4 <= TEXT_AT:
            lines.append(f"  {name:<{TEXT_AT - 2}}{wrapped[0]}".rstrip())
            wrapped = wrapped[1:]
        else:
            lines.append(f"  {name}")
        lines += [indent + line for line in wrapped if line]
    return "\n".join(lines)


def name_of(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    names = sorted(param.opts, key=lambda name: name.startswith("--"))
    if getattr(param, "rich_help_panel", None):  # short options of other engines are accepted, but not shown
        names = [name for name in names if name.startswith("--")]
    if param.secondary_opts:
        names = [f"--[no-]{name[2:]}" if name.startswith("--") else name for name in names]
    value = "" if param.is_flag else f" {param.metavar or metavar_of(param)}"
    return ", ".join(names) + value


def text_of(param: Any, *, brief: bool = False) -> str:
    text = plain(param.help or "")
    if brief:
        sentence, separator, _ = text.partition(". ")
        notes = re.search(r" \[[^\[\]]*\]$", text)
        text = f"{sentence}.{notes[0] if notes else ''}" if separator else text
    notes_of = [f"one of {', '.join(choices_of(param))}"] if choices_of(param) and "[" not in text else []
    default = param.default if getattr(param, "show_default", False) else None
    if not isinstance(default, bool) and default not in (None, "", (), []):
        notes_of.append(f"default: {default}")
    return f"{text} [{'; '.join(notes_of)}]" if notes_of else text


def choices_of(param: Any) -> list[str]:
    kind = getattr(param, "type_descriptor", None)
    found = getattr(kind, "choices", None) if kind is not None else getattr(getattr(param, "type", None), "choices", None)
    return [str(choice) for choice in found or ()]


def metavar_of(param: Any) -> str:
    """A short word for the value."""
    if choices_of(param):
        return "NAME"
    kind = getattr(param, "type_descriptor", None)
    name = str(getattr(getattr(kind, "annotation", None), "__name__", "") or getattr(getattr(param, "type", None), "name", ""))
    words = {"int": "N", "integer": "N", "float": "X", "Path": "FILE", "path": "FILE"}
    return words.get(name.split(" ")[0], "TEXT")


# Mistyped options


def refuse_value_of_flag(command: Any, ctx: Any, args: Sequence[str]) -> None:
    """Refuses `--enable-prefix-caching true`: the word would be taken for the model."""
    flags = {name: param for param in command.params if getattr(param, "is_flag", False) for name in param.opts}
    for flag, word in pairwise(args):
        if flag in flags and word.lower() in FLAG_WORDS:
            off = f", or --no-{flag[2:]} to switch it off" if flags[flag].secondary_opts else ""
            ctx.fail(f"{flag} takes no value, and {word} stands behind it: write {flag} alone{off}")


def refuse_option_as_value(command: Any, ctx: Any, args: Sequence[str]) -> None:
    """Refuses `--api-key --port 8001`: often `--api-key $KEY --port 8001` with an empty variable. The key would be `--port`."""
    options = [param for param in command.params if param.param_type_name == "option"]
    names = {name for param in options for name in (*param.opts, *param.secondary_opts)}
    with_value = {name for param in options if not getattr(param, "is_flag", False) for name in param.opts}
    for option, word in pairwise(takewhile(lambda each: each != "--", args)):
        if option in with_value and word in names:
            meant = f" If {word} is the value, write {option}={word}" if option.startswith("--") else ""
            ctx.fail(f"{option} needs a value, and {word} follows. Is a variable empty?{meant}")


NUMBERS = {
    "valid integer": "it must be a whole number in digits, such as 8192",
    "valid number": "it must be a number in digits, such as 0.9",
}
"""By words of pydantic's message, which speaks of parsing a string."""


def say_what_number(error: Any) -> None:
    for words, ours in NUMBERS.items():
        if words in error.message and "unable to parse" in error.message:
            error.message = ours


def suggest_close(error: Any, params: Iterable[Any]) -> None:
    """Suggests only names that are close. Click suggests the nearest, which is often unrelated. For another name of a setting
    the setting's own is suggested, and an option that other engines alone have is not."""
    options = [param for param in params if param.param_type_name == "option" and param.name not in FOREIGN]
    known = {name: param.name for param in options for name in (*param.opts, *param.secondary_opts) if name.startswith("--")}
    found = closest(error.option_name, known)
    if found and (alias := BY_ALIAS.get(known[found])) is not None:
        ours = flag_of(alias.setting)
        found = f"--no-{ours[2:]}" if found.startswith("--no-") else ours
    error.possibilities = [found] if found else None
