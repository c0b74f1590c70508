"""Finds the architecture of a model. An unknown name raises an error with what it lacks, and the list of supported ones."""

from __future__ import annotations

from collections.abc import Iterable

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture
from baton.models.encoders.families import FAMILIES as ENCODERS
from baton.models.families.cohere import Cohere
from baton.models.families.ernie import Ernie
from baton.models.families.exaone4 import Exaone4
from baton.models.families.gemma import Gemma
from baton.models.families.gemma3 import Gemma3
from baton.models.families.glm import Glm, Glm4Moe
from baton.models.families.gpt_oss import GptOss
from baton.models.families.granite import Granite, GraniteHybrid
from baton.models.families.llama import Llama
from baton.models.families.mixtral import Mixtral
from baton.models.families.olmo2 import Olmo2
from baton.models.families.olmoe import Olmoe
from baton.models.families.phi3 import Phi3
from baton.models.families.qwen2 import Qwen2
from baton.models.families.qwen2_moe import Qwen2Moe
from baton.models.families.qwen3 import Qwen3
from baton.models.families.qwen3_moe import Qwen3Moe
from baton.models.families.seed_oss import SeedOss
from baton.models.families.smollm3 import SmolLM3
from baton.models.families.stablelm import StableLM
from baton.models.missing_traits import missing_traits

ARCHITECTURES: dict[str, type[Architecture]] = {
    model.name: model
    for model in (
        *(Llama, Qwen2, Qwen3, Mixtral, Qwen2Moe, Qwen3Moe, Ernie, Phi3, Granite, SmolLM3, Olmo2, Glm, Glm4Moe),
        *(Cohere, StableLM, Gemma, Gemma3, GptOss, Olmoe, Exaone4, SeedOss, GraniteHybrid),
    )
}

_BY_HF_NAME = {name: model for model in ARCHITECTURES.values() for name in model.hf_names}
_BY_GGUF_NAME = {name: model for model in ARCHITECTURES.values() for name in model.gguf_names}


def architecture(name: str) -> type[Architecture]:
    """Looks up our own name, as in ModelConfig.architecture."""
    return _look_up(ARCHITECTURES, name, "model config")


def architecture_of_hf(names: Iterable[str], origin: str) -> type[Architecture]:
    """Looks up the `architectures` of a config.json; the first known one is used."""
    names = list(names)
    known = [name for name in names if name in _BY_HF_NAME]
    also = [name for family in ENCODERS.values() for name in family.hf_names]
    return _look_up(_BY_HF_NAME, known[0] if known else ", ".join(names) or "(none given)", origin, also)


def architecture_of_gguf(name: str, origin: str) -> type[Architecture]:
    """Looks up the `general.architecture` of a GGUF file."""
    return _look_up(_BY_GGUF_NAME, name, origin)


def _look_up(table: dict[str, type[Architecture]], name: str, origin: str, also: Iterable[str] = ()) -> type[Architecture]:
    """The architecture with this name. `also`: names that are supported and stand in another table."""
    if name not in table:
        missing = missing_traits(name)
        reason = f" (Baton lacks {missing})" if missing else ""
        supported = ", ".join([*table, *also])
        raise ModelUnsupported(f"{origin}: architecture {name} is not supported{reason}; supported are {supported}")
    return table[name]
