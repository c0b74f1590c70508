"""The forward pass in C (baton/native): what a CPU with a compiler runs. Loads no torch."""

from __future__ import annotations

from baton.config import WorkerConfig
from baton.models.loaders.weights import Progress, RawWeights
from baton.models.open import OpenedModel
from baton.native.decoder import NativeDecoder
from baton.native.library import Library, Step
from baton.native.packing import PackedModel
from baton.worker.arrays import Floats
from baton.worker.flat_batch import FlatBatch
from baton.worker.forward.base import LoadedForward
from baton.worker.kv_pool import KVPool


def load_native(
    library: Library, opened: OpenedModel, settings: WorkerConfig, progress: Progress | None = None
) -> LoadedForward:
    """Reads the weights. `settings.threads` is a number of threads here: somebody has counted the cores."""
    packed = PackedModel(library, opened.config, RawWeights(opened.weights, opened.config, progress), settings.quantization)
    quantised = settings.quantization != "none"
    kv_dtype = settings.kv_dtype if settings.kv_dtype != "auto" else "float16" if quantised else "float32"
    return LoadedForward(kv_dtype, lambda pool: NativeForward(library, packed, pool, settings.threads))


class NativeForward:
    def __init__(self, library: Library, packed: PackedModel, pool: KVPool, threads: int) -> None:
        layout = pool.layout
        self.name = f"native ({library.variant.name})"
        self.config = packed.config
        self._decoder = NativeDecoder(
            library,
            packed,
            pool=pool.data.ctypes.data,
            block_size=layout.block_size,
            kv_halves=layout.dtype == "float16",
            threads=threads,
        )

    def hidden(self, flat: FlatBatch) -> Floats:
        spans = flat.spans
        arrays = (spans.tables, spans.slots, spans.starts, spans.contexts, flat.token_ids, flat.positions)
        stride = spans.tables.strides[0] // spans.tables.itemsize
        step = Step(len(spans.slots), len(flat.token_ids), stride, *(array.ctypes.data for array in arrays))
        return self._decoder.hidden(step)

    def logits(self, hidden: Floats) -> Floats:
        return self._decoder.logits(hidden)

    def close(self) -> None:
        self._decoder.close()
