"""Groups of options as dataclasses, shared by several commands.

@dataclass(frozen=True, kw_only=True) class Machine:
    threads: Annotated[int, typer.Option("--threads", help="...")] = 0

@app.command() @expanded def offline(model: str, *, machine: Machine) -> None: ...      # typer sees `model` and `threads`
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each dataclass parameter of the command by the fields of the class."""
    names = vars(sys.modules[command.__module__])
    hints = get_type_hints(command, names, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        inner = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            option = inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=inner[field.name]
            )
            parameters.append(option)

    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
