"""The parameters of a model, from the tensors of any kind of file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from baton.errors import InvariantBroken, ModelFileBroken
from baton.models.config import ModelConfig
from baton.models.encoders.config import EncoderConfig
from baton.models.parameters import LM_HEAD, Shape, expected_shapes
from baton.models.raw_tensor import RawTensor
from baton.models.tensor_types import TensorType

Progress = Callable[[int, int], None]
"""Progress callback with (bytes done, bytes in total), first with (0, total), last with (total, total)."""

NAMES_IN_AN_ERROR_MAX = 5


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Type, shape and origin of a tensor in a file."""

    type: TensorType
    shape: Shape
    nbytes: int
    origin: str
    "Origin of the tensor for errors: file and tensor name."

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def row_elements(self) -> int:
        return self.shape[-1] if self.shape else 1


class WeightSource(Protocol):
    """A source of a model's parameters."""

    @property
    def origin(self) -> str:
        """File or folder, for errors."""
        ...

    def stored(self) -> Mapping[str, StoredTensor]:
        """All tensors by our names; a tensor without one keeps its own. Reads no tensor."""
        ...

    def raw(self, name: str) -> RawTensor:
        """A parameter as stored, with its rows in our order."""
        ...


class RawWeights:
    """Parameters of one model; each is taken once."""

    def __init__(self, source: WeightSource, config: ModelConfig | EncoderConfig, progress: Progress | None = None) -> None:
        self._source = source
        self.stored = source.stored()
        self._left = expected_shapes(config)
        _check(source, self.stored, self._left, tied=config.tied_embeddings)
        self._progress = progress or (lambda done, total: None)
        self._done, self._total = 0, sum(self.stored[name].nbytes for name in self._left)
        self._progress(0, self._total)

    def take(self, name: str) -> RawTensor:
        del self._left[name]
        raw = self._source.raw(name)
        self._done += self.stored[name].nbytes
        self._progress(self._done, self._total)
        return raw

    def close(self) -> None:
        if self._left:
            raise InvariantBroken(f"{self._source.origin}: the model never asked for {_listed(list(self._left))}")


def _check(source: WeightSource, stored: Mapping[str, StoredTensor], expected: Mapping[str, Shape], tied: bool) -> None:
    missing = [name for name in expected if name not in stored]
    if missing:
        raise ModelFileBroken(f"{source.origin}: {len(missing)} of {len(expected)} tensors are missing: {_listed(missing)}")
    # Some files contain the head although it equals the embedding; the config decides.
    extra = [stored[name].origin for name in stored if name not in expected and not (tied and name == LM_HEAD)]
    if extra:
        raise ModelFileBroken(
            f"{source.origin}: {len(extra)} tensors have no place in a model of this config: {_listed(extra)}"
        )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise ModelFileBroken(
                f"{stored[name].origin}: the shape is {list(stored[name].shape)}, but the config asks for "
                f"{list(shape)} ({name})"
            )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMES_IN_AN_ERROR_MAX
    return ", ".join(names[:NAMES_IN_AN_ERROR_MAX]) + (f" and {more} more" if more > 0 else "")
