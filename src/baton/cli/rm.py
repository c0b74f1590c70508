"""`baton rm`: removes downloaded models from the caches. Other files are never touched."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.say import Failed, complaints
from baton.models.download import size_text

HELP = """Remove models that were fetched, and say how much came free.

\b
Examples:
  baton rm smollm2                  an alias
  baton rm owner/repo               all that is here of a repository
  baton rm owner/repo:Q4_K_M        one GGUF file
  baton rm owner/repo@v1.0          one revision; shared bytes stay

`baton models` lists what is here. A folder or file of your own is not removed.
"""


def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names, as in `baton models`.", show_default=False)],
) -> None:
    with complaints("rm"):
        for model in models:
            typer.echo(f"{model}: removed, {size_text(remove_model(model))} came free")


def remove_model(model: str) -> int:
    """Removes a model and returns the freed bytes. Raises Failed if there is no such model."""
    from baton.models.aliases import ALIASES, cache_folder
    from baton.models.hub import hub_name, matches_name
    from baton.models.hub_cache import cached_models, remove

    if model in ALIASES:
        path = cache_folder() / ALIASES[model].file
        if not path.is_file():
            raise Failed(f"{model}: is not here")
        freed = path.stat().st_size
        path.unlink()
        return freed
    name = hub_name(model)
    if name is None:
        raise Failed(f"{model}: neither an alias nor a Hugging Face id (owner/repo, owner/repo:QUANT); see `baton models`")
    found = [each for each in cached_models() if matches_name(name, each)]
    if not found:
        raise Failed(f"{model}: is not here; `baton models` lists what is")
    return remove(found)
