"""`baton run`: prompts in, texts out, in this process and without a server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.sampling_options import RepetitionPenalty, Seed, Temperature, TopK, TopP
from baton.cli.say import Failed, bar, complaints, print_json, resolve_model, waiting
from baton.config import Device, Quantization

if TYPE_CHECKING:
    from baton.llm import LLM, Answer

HELP = """Generate once, without a server. stdout is the text and nothing else.

\b
Examples:
  baton run smollm2 'What is the capital of Japan?'
  baton run smollm2 --raw 'Once upon a time'        continue a text
  baton run smollm2 --file prompts.txt --json       one prompt per line
  cat prompts.txt | baton run smollm2 --file -
"""


def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a .gguf file, a Hugging Face id, or an alias.")],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT...", help="Each argument is a prompt.")] = None,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="File with more prompts, one per line; - is stdin.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, without a chat template.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per answer, at most.")] = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    n: Annotated[int, typer.Option("-n", min=1, max=128, help="Answers per prompt.")] = 1,
    device: Annotated[Device, typer.Option(help="Compute device, as for baton serve.")] = "auto",
    quantization: Annotated[Quantization, typer.Option(help="How weights are stored, as for baton serve.")] = "auto",
    threads: Annotated[int, typer.Option(metavar="N", min=0, help="Compute threads. 0: one per core.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list: texts, token counts, finish reasons.")] = False,
) -> None:
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k,
        "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    with complaints("run"):
        asked = [*(prompts or ()), *(_lines(file) if file is not None else ())]
        if not asked:
            raise Failed("no prompt; write one after the model, or give --file")
        if raw and system is not None:
            raise Failed("--raw continues a text and has no place for --system; leave out one of them")
        begin = monotonic()
        llm = load(model, threads=threads, device=device, quantization=quantization)
        loaded = monotonic()
        answers = _generate(llm, asked, sampling, n, raw=raw, system=system)
        _print(asked, answers, as_json=as_json)
        _sum_up(answers, loaded - begin, monotonic() - loaded)


def quiet_waiting() -> None:
    """Before torch is there: threads that wait sleep, as in the server's worker. On few cores a spinning one takes its
    neighbour's time (7 times slower beside one busy process, measured)."""
    from baton.runtime.process_table import QUIET_WAITING

    for name, value in QUIET_WAITING.items():
        os.environ.setdefault(name, value)


def load(model: str, **settings: Any) -> LLM:
    """The in-process engine. LLM itself tells nothing while it reads the weights, so a spinner turns."""
    quiet_waiting()
    path = resolve_model(model)
    with waiting(f"loading {model}"):
        from baton.llm import LLM

        return LLM(str(path), **settings)


def _lines(file: Path) -> list[str]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Failed(f"--file {file}: cannot be read ({error})") from None
    return [line for line in text.splitlines() if line.strip()]


def _generate(llm: LLM, prompts: list[str], sampling: dict[str, Any], n: int, *, raw: bool, system: str | None) -> list[Answer]:
    from baton.llm import SamplingParams

    params = SamplingParams(**sampling)
    before = [{"role": "system", "content": system}] if system is not None else []
    with bar("generating") as advance:
        report = lambda done, total: advance(done, total, "prompts")  # noqa: E731
        if raw:
            return llm.generate(prompts, params, n=n, progress=report)
        return llm.chat([[*before, {"role": "user", "content": prompt}] for prompt in prompts], params, n=n, progress=report)


def _print(prompts: list[str], answers: list[Answer], *, as_json: bool) -> None:
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


def _sum_up(answers: list[Answer], load_seconds: float, seconds: float) -> None:
    tokens = sum(len(output.token_ids) for answer in answers for output in answer.outputs)
    line = f"{tokens} tokens in {seconds:.2f} s ({tokens / max(seconds, 1e-9):.1f} tok/s), loaded in {load_seconds:.1f} s"
    typer.echo(f"[{line}]", err=True)
