"""A packed model on a KV pool: steps in, hidden rows and logits out, by one call into the library each. Not thread-safe."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
from numpy.typing import NDArray

from baton.errors import EngineError
from baton.models.config import ModelConfig
from baton.models.raw_tensor import Floats
from baton.models.rotary import RotaryTable
from baton.native.exchange import RankExchange, rank_missing
from baton.native.library import Library, Model, NativeExperts, NativeLayerWeights, NativeShape, NativeStep
from baton.native.packing import PackedModel

Int64s = NDArray[np.int64]
Addresses = NDArray[np.uintp]


class NativeDecoder:
    def __init__(
        self,
        library: Library,
        packed: PackedModel,
        *,
        pool: int,
        blocks: int,
        block_size: int,
        half_block: int,
        kv_kind: int,
        threads: int,
        exchange: RankExchange | None = None,
    ) -> None:
        """`pool`: address of the first of `blocks` blocks. `kv_kind`: its data type (library.KV_...); `half_block`: elements of
        a layer's keys in a block. `exchange`: with the other ranks, if there are any; then all calls are collective."""
        config = packed.config
        positions = min(config.context_tokens_max, blocks * block_size)
        ropes = [config.layer_rope(layer) for layer in range(config.layers)]
        angles = {rope: RotaryTable(rope, config.head_dim, positions) for rope in dict.fromkeys(ropes)}
        # copied, because another decoder may have other tables
        blocks_of_layers = (NativeLayerWeights * config.layers)(*packed.blocks)
        for block, rope in zip(blocks_of_layers, ropes, strict=True):
            block.cosines, block.sines = (table.ctypes.data for table in (angles[rope].cosines, angles[rope].sines))
        self._library = library
        self._kept = (packed, angles)
        self._model = Model(
            layers=config.layers,
            hidden=config.hidden_size,
            vocabulary=config.vocab_size,
            inner=config.intermediate_size if any(map(_is_dense, packed.blocks)) else 0,
            attention=NativeShape(
                heads=config.heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                block_size=block_size,
                block_stride=config.layers * 2 * half_block,
                values_at=half_block,
                scale=config.attention_scale,
            ),
            experts=experts_of(config),
            norm_eps=config.norm_eps,
            embedding_scale=config.traits.embedding_scale,
            layer_norm=config.traits.layer_norm,
            qk_norm_across_heads=config.traits.qk_norm_across_heads,
            parallel=config.traits.parallel,
            kv_kind=kv_kind,
            embedding_kind=packed.embedding_kind,
            positions=positions,
            embedding=packed.embedding.ctypes.data,
            embedding_row_bytes=packed.embedding.shape[1],
            final_norm=packed.final_norm,
            blocks=blocks_of_layers,
            head=packed.head,
            pool=pool,
            exchange=None if exchange is None else ctypes.pointer(exchange.native),
        )
        self._exchange = exchange  # keeps its memory mapped
        self.vocabulary, self.width = config.vocab_size, config.hidden_size
        self._logits: Floats = np.empty((0, config.vocab_size), np.float32)
        self._logits_at = 0
        self._handle: int | None = library.new(self._model, threads)
        if not self._handle:
            raise EngineError("there is not enough memory for the decoder's buffers")
        # The library's threads may still read the last job. They end before its memory is freed, also at the end of the
        # process: without this one exit in about 200 was a segmentation fault.
        self._end_threads = weakref.finalize(self, library.free, self._handle)

    @property
    def threads(self) -> int:
        return int(self._library.threads(self._handle))

    def report_progress(self, word: int) -> None:
        """Sets the counter to advance from now on, several times per layer. `word`: address of its 64 bits."""
        self._library.progress(self._handle, word)

    def hidden(self, step: NativeStep) -> Floats:
        """[tokens, width], before the last norm: the library's memory, valid until the next call."""
        address = self._library.hidden(self._handle, step)
        if not address:
            raise self._failed(f"a step of {step.tokens} tokens")
        numbers = (ctypes.c_float * (step.tokens * self.width)).from_address(address)
        return np.frombuffer(numbers, np.float32).reshape(step.tokens, self.width)

    def logits(self, hidden: Floats) -> Floats:
        """[rows, vocabulary]: valid until the next call; the caller may change them."""
        rows = np.ascontiguousarray(hidden, np.float32)
        if len(rows) > len(self._logits):  # reused, because new memory would be cleared page by page in every step
            self._logits = np.empty((len(rows), self.vocabulary), np.float32)
            self._logits_at = self._logits.ctypes.data
        if self._library.logits(self._handle, rows.ctypes.data, len(rows), self._logits_at):
            raise self._failed(f"the logits of {len(rows)} rows")
        return self._logits[: len(rows)]

    def likeliest(self, hidden: Floats, allowed: Addresses | None = None) -> Int64s:
        """[rows] token ids, or an error code per row (csrc/sample.h). `allowed`: [rows] addresses of a bit mask of allowed
        tokens; 0: all. No logits are stored."""
        rows, tokens = np.ascontiguousarray(hidden, np.float32), np.empty(len(hidden), np.int64)
        masks = None if allowed is None else allowed.ctypes.data
        if self._library.likeliest(self._handle, rows.ctypes.data, len(rows), masks, tokens.ctypes.data):
            raise self._failed(f"the logits of {len(rows)} rows")
        return tokens

    def choose(self, logits: Floats, draws: NDArray[np.void], allowed: Addresses | None = None) -> Int64s:
        """[rows] token ids, or an error code per row (csrc/sample.h). `draws`: [rows] of csrc/sample.h's Draw. `allowed`: as in
        `likeliest`; the logits of other tokens become minus infinity."""
        tokens, masks = np.empty(len(logits), np.int64), None if allowed is None else allowed.ctypes.data
        if self._library.choose(self._handle, logits.ctypes.data, draws.ctypes.data, masks, len(logits), tokens.ctypes.data):
            raise EngineError(f"there is not enough memory to choose from a vocabulary of {self.vocabulary}")
        return tokens

    def _failed(self, work: str) -> EngineError:
        if self._exchange is not None and self._exchange.native.missing:
            return rank_missing(self._exchange.native)
        return EngineError(f"there is not enough memory for {work}")

    def close(self) -> None:
        """Ends the threads. The decoder cannot be used afterwards."""
        self._end_threads()
        self._handle = None


def _is_dense(block: NativeLayerWeights) -> bool:
    return not block.mixture.gate_up


def experts_of(config: ModelConfig) -> NativeExperts:
    experts = config.experts
    if experts is None:
        return NativeExperts()
    return NativeExperts(
        count=experts.count,
        per_token=experts.per_token,
        inner=experts.inner_size,
        shared=experts.shared_size,
        shared_gate=experts.shared_gate,
        sigmoid=experts.scoring == "sigmoid",
        normalised=experts.normalised,
        scale=experts.scale,
        first=config.own_experts.start,
        own=len(config.own_experts),
    )
