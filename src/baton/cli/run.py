"""`baton run`: answers prompts in this process; without a prompt it is a conversation, like `baton chat`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.options import expanded
from baton.cli.progress import stages
from baton.cli.sampling_options import Sampling
from baton.cli.say import Failed, bar, complaints, print_json, resolve_model, served_name, stderr_lines
from baton.config import Device, Quantization

if TYPE_CHECKING:
    from baton.llm import LLM, SequenceAnswer

HELP = """Answer prompts, without a server. stdout is the text and nothing else.

Without a prompt, in a terminal: a conversation.

\b
Examples:
  baton run smollm2                                 a conversation
  baton run smollm2 'What is the capital of Japan?'
  echo 'What is the capital of Japan?' | baton run smollm2
  baton run smollm2 --raw 'Once upon a time'        continue a text
  baton run smollm2 --file prompts.txt --json       one prompt per line
"""


@expanded
def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a .gguf file, a Hugging Face id, or an alias.")],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT...", help="Each argument is a prompt.")] = None,
    *,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="File with more prompts, one per line; - is stdin.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, without a chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")] = None,
    sampling: Sampling,
    n: Annotated[int, typer.Option("-n", min=1, max=128, help="Answers per prompt.")] = 1,
    device: Annotated[Device, typer.Option("--device", help="Compute device, as for baton serve.")] = "auto",
    quantization: Annotated[
        Quantization, typer.Option("--quantization", help="How weights are stored, as for baton serve.")
    ] = "auto",
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=0, help="Compute threads. 0: one per core.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list: texts, token counts, finish reasons.")] = False,
) -> None:
    with complaints("run"):
        if raw and system is not None:
            raise Failed("--raw continues a text and has no place for --system; leave out one of them")
        machine: dict[str, Any] = {"threads": threads, "device": device, "quantization": quantization}
        asked = [*(prompts or ()), *(_lines(file) if file is not None else ())]
        if not asked and file is None:
            if sys.stdin.isatty() and not (raw or as_json):
                converse(model, system, sampling, machine)
                return
            asked = [text] if (text := "" if sys.stdin.isatty() else sys.stdin.read().strip()) else []
        if not asked:
            raise Failed("no prompt; write one after the model, or give --file")
        answer_all(model, asked, sampling, n, machine, raw=raw, system=system, as_json=as_json)


def converse(model: str, system: str | None, sampling: Sampling, machine: dict[str, Any]) -> None:
    """Has a conversation with a private server, as `baton chat` does."""
    from baton.cli.conversation import Conversation, talk
    from baton.cli.private_server import private_server

    with private_server(model, command="run", **machine) as (server, name):
        talk(Conversation(server, name, sampling.given(), system))


def answer_prompt(model: str, prompt: str, system: str | None, sampling: Sampling, machine: dict[str, Any]) -> None:
    """Answers one prompt on a terminal through a server, which finds the model's reasoning: it is shown dimmed."""
    from baton.cli.conversation import Conversation, answer
    from baton.cli.private_server import private_server

    with private_server(model, command="run", **machine) as (server, name):
        answer(Conversation(server, name, sampling.given(), system), prompt)


def answer_all(
    model: str,
    prompts: list[str],
    sampling: Sampling,
    n: int,
    machine: dict[str, Any],
    *,
    raw: bool,
    system: str | None,
    as_json: bool,
) -> None:
    watched = len(prompts) == n == 1 and not as_json and sys.stdout.isatty()
    if watched and not raw:
        answer_prompt(model, prompts[0], system, sampling, machine)
        return
    begin = monotonic()
    llm = load(model, command="run", **machine)
    loaded = monotonic()
    if watched:
        tokens = _stream(llm, prompts[0], sampling)
    else:
        answers = _generate(llm, prompts, sampling, n, raw=raw, system=system)
        _print(prompts, answers, as_json=as_json)
        tokens = sum(len(output.token_ids) for answer in answers for output in answer.outputs)
    _summarize(tokens, loaded - begin, monotonic() - loaded)


def quiet_waiting() -> None:
    """Lets waiting threads sleep, as in the server's worker. Must run before torch is imported. On few cores a spinning thread
    takes its neighbour's time (7 times slower beside one busy process, measured)."""
    from baton.runtime.processes.process_table import QUIET_WAITING

    for name, value in QUIET_WAITING.items():
        os.environ.setdefault(name, value)


def load(model: str, *, command: str = "", **settings: Any) -> LLM:
    """Loads the engine in this process, which reports no progress."""
    quiet_waiting()
    path = resolve_model(model, command=command)
    with stages(stderr_lines(command)) as shown:
        shown.announce(f"loading {served_name(model)}", at_once=False)
        from baton.llm import LLM
        from baton.native.build import compilation_announced

        with compilation_announced(shown.announce):
            return LLM(str(path), **settings)


def _lines(file: Path) -> list[str]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Failed(f"--file {file}: cannot be read ({error})") from None
    return [line for line in text.splitlines() if line.strip()]


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system is not None else []
    return [*before, {"role": "user", "content": prompt}]


def _generate(
    llm: LLM, prompts: list[str], sampling: Sampling, n: int, *, raw: bool, system: str | None
) -> list[SequenceAnswer]:
    from baton.llm import SamplingParams

    params = SamplingParams(**sampling.given())
    with bar("generating") as advance:
        report = lambda done, total: advance(done, total, "prompts")  # noqa: E731
        if raw:
            return llm.generate(prompts, params, n=n, progress=report)
        return llm.chat([_messages(prompt, system) for prompt in prompts], params, n=n, progress=report)


def _stream(llm: LLM, prompt: str, sampling: Sampling) -> int:
    """Prints the continuation of a text while it is generated. Returns its number of tokens."""
    from baton.llm import SamplingParams

    with llm.stream([prompt], SamplingParams(**sampling.given())) as chunks:
        tokens = 0
        for chunk in chunks:
            tokens += len(chunk.token_ids)
            typer.echo(chunk.text, nl=False)
    typer.echo()
    return tokens


def _print(prompts: list[str], answers: list[SequenceAnswer], *, as_json: bool) -> None:
    if as_json:
        print_json([
            {
                "prompt": prompt,
                "prompt_tokens": len(answer.prompt_token_ids),
                "outputs": [
                    {"text": output.text, "finish_reason": output.finish_reason, "tokens": len(output.token_ids)}
                    for output in answer.outputs
                ],
            }
            for prompt, answer in zip(prompts, answers, strict=True)
        ])  # fmt: skip
        return
    for answer in answers:
        for output in answer.outputs:
            typer.echo(output.text)


def _summarize(tokens: int, load_seconds: float, seconds: float) -> None:
    line = f"{tokens} tokens in {seconds:.2f} s ({tokens / max(seconds, 1e-9):.1f} tok/s), loaded in {load_seconds:.1f} s"
    typer.echo(f"[{line}]", err=True)
