"""Options of sampling and answer length, shared by all commands that have them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

DEFAULT = "Default: the model's."
MAX_TOKENS = 2048
"""Default length of an answer: enough for a model with reasoning."""


def _int64(seed: int | None) -> int | None:
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise typer.BadParameter("it must be a whole number from -2^63 to 2^63 - 1")
    return seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling options, with names as in the API and in `LLM`. None: the model's default."""

    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Tokens per answer, at most; reasoning counts.")
    ] = MAX_TOKENS
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", metavar="T", min=0.0, max=2.0, help=f"Sampling temperature; 0 is greedy. {DEFAULT}"),
    ] = None
    top_p: Annotated[
        float | None, typer.Option("--top-p", metavar="P", min=1e-6, max=1.0, help=f"Nucleus sampling. {DEFAULT}")
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", metavar="K", min=-1, help=f"Sample from the K likeliest tokens; -1: from all. {DEFAULT}"),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p", metavar="P", min=0.0, max=1.0, help=f"Leave out tokens below this share of the likeliest one. {DEFAULT}"
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty",
            metavar="R",
            min=1e-6,
            max=10.0,
            help=f"Penalty for tokens that were there before; 1 is none. {DEFAULT}",
        ),
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="A text that ends the answer. May be given again.")
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            callback=_int64,
            help="Random seed. The same seed gives the same answer; default: a new one.",
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """The options without those left to the model."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, [])}
