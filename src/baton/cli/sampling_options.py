"""Options that say how tokens are drawn, the same for every command that has them."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT = "Default: the model's."

Temperature = Annotated[
    float | None, typer.Option(metavar="T", min=0.0, max=2.0, help=f"Sampling temperature; 0 is greedy. {DEFAULT}")
]
TopP = Annotated[float | None, typer.Option(metavar="P", min=1e-6, max=1.0, help=f"Nucleus sampling. {DEFAULT}")]
TopK = Annotated[
    int | None, typer.Option(metavar="K", min=-1, help=f"Sample from the K likeliest tokens; -1: from all. {DEFAULT}")
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(metavar="R", min=1e-6, max=10.0, help=f"Penalty for tokens that were there before; 1 is none. {DEFAULT}"),
]


def _int64(seed: int | None) -> int | None:
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise typer.BadParameter("it must be a whole number from -2^63 to 2^63 - 1")
    return seed


SEED_HELP = "Random seed. The same seed gives the same answer; default: a new one."
Seed = Annotated[int | None, typer.Option(metavar="N", callback=_int64, help=SEED_HELP)]
