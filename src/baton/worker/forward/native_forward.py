"""The forward pass in C (baton/native), for CPUs. Imports no torch."""

from __future__ import annotations

import numpy as np

from baton.config import WorkerConfig
from baton.errors import InvalidConfig
from baton.kvpool.base import Pool
from baton.kvpool.layout import INT8_FOURS, KVKind
from baton.kvpool.pool import KVPool
from baton.models.config import ModelConfig
from baton.models.loaders.weights import Progress, RawWeights
from baton.models.open import OpenedModel
from baton.native.balance import balance
from baton.native.decoder import Addresses, NativeDecoder
from baton.native.exchange import RankExchange
from baton.native.library import KV_BLOCK, KV_F16, KV_F32, KV_INT8, KV_WIDTH, Library, NativeStep
from baton.native.packing import PackedModel
from baton.protocol.progress import ProgressWord
from baton.worker.arithmetic import native_arithmetic
from baton.worker.arrays import Floats, Int64s
from baton.worker.draws import Draws
from baton.worker.flat_batch import FlatBatch
from baton.worker.forward.base import LoadedForward
from baton.worker.token_masks import Masks

KV_KINDS: dict[KVKind, int] = {
    KVKind("float32"): KV_F32,
    KVKind("float16"): KV_F16,
    INT8_FOURS: KV_INT8,
}
"""The library's numbers of the KV types."""


def load_native(
    library: Library,
    opened: OpenedModel,
    settings: WorkerConfig,
    progress: Progress | None = None,
    exchange: RankExchange | None = None,
) -> LoadedForward:
    """Reads the weights. `settings.threads` is a resolved number of threads. `exchange`: with the other ranks of a set."""
    weights = RawWeights(opened.weights, opened.config, progress)
    packed = PackedModel(library, opened.config, weights, settings.quantization, settings.threads)
    balance(library, packed, exchange)

    def with_pool(pool: Pool) -> NativeForward:
        assert isinstance(pool, KVPool)
        return NativeForward(library, packed, pool, settings.threads, exchange)

    return LoadedForward(kv_kind_for(library, opened.config, settings), with_pool)


def kv_kind_for(library: Library, model: ModelConfig, settings: WorkerConfig) -> KVKind:
    """The KV type of the settings; else the fastest whose error is small beside the rounding of the weights."""
    regular = settings.block_size == KV_BLOCK and model.head_dim % KV_WIDTH == 0
    if settings.kv_dtype == "int8" and not regular:
        raise InvalidConfig(
            f"kv_dtype int8 needs block_size {KV_BLOCK} and heads whose width is a multiple of {KV_WIDTH}; here it is "
            f"{settings.block_size} and {model.head_dim}: take float16"
        )
    if settings.kv_dtype == "bfloat16" or settings.kv_dtype == "fp8":
        raise InvalidConfig(f"kv_dtype {settings.kv_dtype} needs a GPU: take float16")
    if settings.kv_dtype == "int8":
        return INT8_FOURS
    if settings.kv_dtype != "auto":
        return KVKind(settings.kv_dtype)
    if settings.quantization == "none":
        return KVKind("float32")
    # Plain C has no instruction for int8 dot products: int8 would be smaller there, but slower.
    return INT8_FOURS if regular and library.variant.name != "plain" else KVKind("float16")


class NativeForward:
    def __init__(
        self, library: Library, packed: PackedModel, pool: KVPool, threads: int, exchange: RankExchange | None = None
    ) -> None:
        layout = pool.layout
        self.name = f"native ({library.variant.name})"
        self.arithmetic = native_arithmetic(library.variant)
        self.config = packed.config
        self.final_norm = packed.final_norm_weights
        self._decoder = NativeDecoder(
            library,
            packed,
            pool=pool.data.ctypes.data,
            blocks=pool.blocks,
            block_size=layout.block_size,
            half_block=layout.half,
            kv_kind=KV_KINDS[layout.kind],
            threads=threads,
            exchange=exchange,
        )
        self._pool: KVPool | None = pool  # kept alive: the library has only its address
        self._flat: FlatBatch | None = None
        self._step = NativeStep()

    def hidden(self, flat: FlatBatch) -> Floats:
        if flat is not self._flat:  # address lookups are slow
            self._flat, self._step = flat, _step_of(flat)
        return self._decoder.hidden(self._step)

    def logits(self, hidden: Floats) -> Floats:
        return self._decoder.logits(hidden)

    def likeliest(self, hidden: Floats, masks: Masks | None = None) -> Int64s:
        return self._decoder.likeliest(hidden, None if masks is None else addresses_of(masks, len(hidden)))

    def choose(self, logits: Floats, draws: Draws, masks: Masks | None = None) -> Int64s:
        allowed = None if masks is None else addresses_of(masks, len(logits))
        return self._decoder.choose(np.ascontiguousarray(logits), draws, allowed)

    def report_progress(self, word: ProgressWord) -> None:
        self._decoder.report_progress(word.address)
        self._word = word  # kept alive: the library has only its address

    def close(self) -> None:
        self._decoder.close()
        self._pool = None


def addresses_of(masks: Masks, rows: int) -> Addresses:
    """[rows] address of each row's mask; 0: none."""
    found: Addresses = np.zeros(rows, np.uintp)
    found[masks.rows] = masks.bits.ctypes.data + masks.bits.strides[0] * np.arange(len(masks.rows), dtype=np.uintp)
    return found


def _step_of(flat: FlatBatch) -> NativeStep:
    """Addresses of the batch's arrays: valid as long as the batch lives."""
    spans = flat.spans
    arrays = (spans.tables, spans.slots, spans.starts, spans.contexts, flat.token_ids, flat.positions)
    stride = spans.tables.strides[0] // spans.tables.itemsize
    return NativeStep(len(spans.slots), len(flat.token_ids), stride, *(array.ctypes.data for array in arrays))
