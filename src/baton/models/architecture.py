"""In what architectures differ: how files name them, and which traits they have. All of them share one decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from baton.models.config import Experts, Traits
from baton.models.config_fields import Fields


class Architecture(ABC):
    """One file an architecture; never made an object of."""

    name: ClassVar[str]
    "ModelConfig.architecture."
    hf_names: ClassVar[tuple[str, ...]]
    "`architectures` in a Hugging Face config.json."
    gguf_name: ClassVar[str]
    "`general.architecture` in a GGUF file."
    gguf_rotary_interleaved: ClassVar[bool]
    "GGUF files of this architecture keep the two dimensions of a rotary pair side by side (loaders/gguf.py)."

    @classmethod
    @abstractmethod
    def traits_from_hf(cls, fields: Fields) -> Traits:
        """From config.json."""

    @classmethod
    def experts_from_hf(cls, fields: Fields) -> Experts | None:
        """From config.json. None: the architecture has none."""
        return None

    @classmethod
    @abstractmethod
    def traits_from_gguf(cls, fields: Fields, tensors: Collection[str]) -> Traits:
        """From metadata (keys without the architecture's prefix) and the names of the tensors."""
