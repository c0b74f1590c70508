"""Output of all commands: results on stdout, everything else on stderr, errors in one line that says what to do.

Progress bars appear only on a terminal, not in a file or a pipe.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from baton.config import ANY_NAME, draft_model_of

if TYPE_CHECKING:
    from rich.console import Console

    from baton.config import ServeConfig

FAILED, USAGE, INTERRUPTED = 1, 2, 130

PACKAGES = {"yaml": "pyyaml"}
"""Names of pip packages that differ from their module."""


class Failed(Exception):
    """The command cannot continue; the message is one line that says what to do."""


def complain(command: str, message: str, code: int = FAILED) -> NoReturn:
    typer.echo(f"baton {command}: {one_line(message)}", err=True)
    raise typer.Exit(code)


class ServerLines:
    """Lines of a running server. The supervisor must neither block on their reader nor end when it is gone: in `baton serve
    2>&1 | tee log` the Ctrl-C that drains the server also ends tee."""

    def __init__(self, command: str) -> None:
        from baton.observe.line_writer import LineWriter

        self._command = command
        self._writer = LineWriter()

    def show(self, text: str) -> None:
        self._writer.put(sys.stdout, f"{text}\n")

    def say(self, text: str) -> None:
        self._writer.put(sys.stderr, f"baton {self._command}: {text}\n")

    def close(self) -> None:
        self._writer.close()


def ignore_further_signals() -> None:
    """End the process after an orderly end: further signals are ignored until it is gone. Called on the loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def one_line(message: str) -> str:
    return " ".join(message.split())


@contextmanager
def complaints(command: str) -> Iterator[None]:
    """Turns expected errors into one line and exit code 1; a traceback means a bug in Baton."""
    from baton.errors import EngineError

    try:
        yield
    except (EngineError, Failed) as error:
        complain(command, str(error))
    except ModuleNotFoundError as error:
        module = (error.name or "").split(".")[0]
        if module in ("", "baton"):
            raise
        complain(command, f"the package {module} is missing: pip install {PACKAGES.get(module, module)}")
    except KeyboardInterrupt:
        complain(command, "interrupted", INTERRUPTED)


def require_packages() -> None:
    """Checks the required packages: without the check each process of a server would end in a traceback."""
    from importlib.metadata import PackageNotFoundError, distribution, requires

    from baton import DISTRIBUTION

    try:
        needed = [line.split(";")[0].strip() for line in requires(DISTRIBUTION) or () if "extra ==" not in line]
    except PackageNotFoundError:
        return  # run from source: there are no requirements to check
    missing = []
    for requirement in needed:
        try:
            distribution(re.split(r"[^\w.-]", requirement)[0])
        except PackageNotFoundError:
            missing.append(requirement)
    if missing:
        raise Failed(f"packages are missing: pip install {' '.join(map(shlex.quote, missing))}")


def console(*, stderr: bool = False) -> Console:
    """A console for tables and text. A pipe has no width; it gets one that breaks no line of a table."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 160, highlight=False)


Advance = Callable[[int, int, str], None]
"""Progress callback: (done, total, a note)."""


@contextmanager
def bar(what: str, *, unit: str = "", quiet: bool = False) -> Iterator[Advance]:
    """A bar that appears with the first advance: a step that ends at once shows nothing. `unit` "bytes" formats bytes."""
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    shown = console(stderr=True)
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=shown, transient=True, disable=quiet or not shown.is_terminal) as progress:
        task: Any = None

        def advance(done: int, total: int, note: str = "") -> None:
            nonlocal task
            if task is None:
                task = progress.add_task(what, total=total, note=note)
            progress.update(task, completed=done, total=total, note=note)

        yield advance


def resolve_model(name: str, revision: str = "", *, command: str = "", quiet: bool = False, weights: bool = True) -> Path:
    """Resolves the user's model name to files on this machine that can be served. Announces what takes long. `weights`: as in
    models/names.py."""
    from baton.cli.progress import stages
    from baton.models.download import Listener
    from baton.models.names import resolve
    from baton.models.support import refuse_unsupported

    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # the hub's library draws its own bars, into files too
    with stages(stderr_lines(command), quiet=quiet) as shown:
        path = resolve(name, revision=revision, listener=Listener(shown.announce, shown.advance), weights=weights)
    refuse_unsupported(path)
    return path


def with_draft_model(config: ServeConfig, *, command: str, quiet: bool) -> ServeConfig:
    """The settings with the files of the draft model, if there is one, in place of its name."""
    if not draft_model_of(config.speculate):
        return config
    from baton.models.names import with_draft_files

    files_of = partial(resolve_model, command=command, quiet=quiet)
    return replace(config, speculate=with_draft_files(config.speculate, files_of))


def with_model(config: ServeConfig, path: Path) -> ServeConfig:
    """The settings with defaults that depend on the model."""
    from baton.models.aliases import stops_repetitions

    names = served_names(config.served_model_name, config.model)
    stops = stops_repetitions(path) if config.stop_on_repetition is None else config.stop_on_repetition
    return replace(config, model=str(path), served_model_name=names, stop_on_repetition=stops)


def stderr_lines(command: str) -> Callable[[str], None]:
    return lambda text: typer.echo(f"{f'baton {command}'.strip()}: {text}", err=True)


def served_name(model: str) -> str:
    """The name for clients: an alias or a hub id unchanged, for a path its last part."""
    path = Path(model).expanduser()
    if not path.exists():
        return model
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def served_names(given: Sequence[str], model: str) -> tuple[str, ...]:
    """The given names, or the model's own. '*' comes last: no answer has it as a name."""
    names = tuple(name for name in given if name != ANY_NAME) or (served_name(model),)
    return (*names, ANY_NAME) if ANY_NAME in given else names


def print_json(answer: object) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
