"""Python bindings of the C library: structures as in csrc/, and the functions that are called."""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from functools import cache

from baton.errors import EngineError
from baton.native import build_cache, prebuilt
from baton.native.build import NoCompiler, build_library, find_compiler
from baton.native.variants import Variant, supported_variants

log = logging.getLogger(__name__)

F32, Q8_0, Q4_0, Q4_1, F16, BF16, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4 = range(12)
"""Formats of rows in files: csrc/gguf_blocks.h. Matrices are of the first four kinds, of MXFP4,"""
GROUPED_INT8 = 12
"""or int8 with a scale per 32 weights, as Q8_0."""
GATES = {"silu": 1, "gelu_tanh": 2, "swiglu_oai": 3}
"""Activations of a paired matrix: csrc/matrix.h."""
KV_F32, KV_F16, KV_INT8 = range(3)
"""Data types of keys and values: csrc/attention.h."""
KV_BLOCK, KV_WIDTH = 16, 64
"""Requirements of KV_INT8: tokens per block, and a divisor of the head width."""


class Matrix(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("kind", "paired")),
        *((name, c_int64) for name in ("outputs", "inputs", "panels", "groups")),
        *((name, c_void_p) for name in ("numbers", "scales", "corrections", "bias", "input_squares")),
    )


class Norm(Structure):
    """Norm of a layer. A null weight: no norm."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class Mixture(Structure):
    """A mixture of experts, in place of an MLP: csrc/experts.h."""

    _fields_ = (
        *((name, POINTER(Matrix)) for name in ("gate_up", "down")),
        ("router", Matrix),
        ("correction", c_void_p),
    )


class NativeLayerWeights(Structure):
    _fields_ = (
        *((name, Norm) for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")),
        *((name, c_void_p) for name in ("sinks", "q_norm", "k_norm", "cosines", "sines")),
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
        ("mixture", Mixture),
        ("window", c_int64),
    )


class NativeShape(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "block_size", "block_stride", "values_at")),
        ("scale", c_float),
    )


class NativeExperts(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("count", "per_token", "inner", "shared")),
        *((name, c_int32) for name in ("shared_gate", "sigmoid", "normalised")),
        ("scale", c_float),
        *((name, c_int64) for name in ("first", "own")),
    )


class NativeExchange(Structure):
    """Memory for exchanges that ranks share: csrc/exchange.h."""

    _fields_ = (
        *((name, c_int64) for name in ("rank", "ranks", "slot_bytes", "wait_most")),
        ("memory", c_void_p),
        ("meetings", c_uint32),
        ("missing", c_int32),
    )


class Model(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("layers", "hidden", "vocabulary", "inner")),
        ("attention", NativeShape),
        ("experts", NativeExperts),
        *((name, c_float) for name in ("norm_eps", "embedding_scale")),
        *(
            (name, c_int32)
            for name in ("kv_kind", "embedding_kind", "layer_norm", "qk_norm_across_heads", "parallel", "reserved")
        ),
        ("positions", c_int64),
        ("embedding", c_void_p),
        ("embedding_row_bytes", c_int64),
        ("final_norm", Norm),
        ("blocks", POINTER(NativeLayerWeights)),
        ("head", Matrix),
        ("pool", c_void_p),
        ("exchange", POINTER(NativeExchange)),
    )


class NativeStep(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("sequences", "tokens", "table_stride")),
        *((name, c_void_p) for name in ("tables", "slots", "starts", "contexts", "token_ids", "positions")),
    )


class Library:
    """One loaded variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        c = load_file(variant)
        _check_structures(c)
        self.allow = _function(c.baton_allow, c_int)
        self.has_tiles = _function(c.baton_has_tiles, c_int)
        self.plan = _function(c.baton_plan, None, POINTER(Matrix), POINTER(c_int64 * 3))
        rows = (c_int64, c_void_p, c_int64, c_void_p, c_int64)
        self.pack = _function(c.baton_pack, c_int, POINTER(Matrix), *rows, c_void_p, c_int64)
        self.new = _function(c.baton_new, c_void_p, POINTER(Model), c_int64)
        self.free = _function(c.baton_free, None, c_void_p)
        self.threads = _function(c.baton_threads, c_int64, c_void_p)
        self.progress = _function(c.baton_progress, None, c_void_p, c_void_p)
        self.hidden = _function(c.baton_hidden, c_void_p, c_void_p, POINTER(NativeStep))
        self.logits = _function(c.baton_logits, c_int, c_void_p, c_void_p, c_int64, c_void_p)
        self.likeliest = _function(c.baton_likeliest, c_int, c_void_p, c_void_p, c_int64, c_void_p, c_void_p)
        self.choose = _function(c.baton_choose, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p)
        self.sum = _function(c.baton_sum, c_int, POINTER(NativeExchange), c_void_p, c_int64)
        self.gather = _function(c.baton_gather, c_int, POINTER(NativeExchange), c_void_p, c_int64, c_void_p)
        self.product = _function(c.baton_product, c_int, c_void_p, POINTER(Matrix), c_void_p, c_int64, c_void_p, c_int64)
        self.route = _function(c.baton_route, None, POINTER(NativeExperts), *(c_void_p, c_void_p, c_int64, c_void_p, c_void_p))
        layer = (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p)
        self.attention = _function(c.baton_attention, c_int, c_void_p, POINTER(NativeStep), POINTER(NativeShape), *layer)


STRUCTURES: tuple[type[Structure], ...] = (
    *(Matrix, Mixture, NativeLayerWeights, NativeShape, NativeExperts, Model, NativeStep, NativeExchange),
)
"""Structures in the order of baton_sizes (csrc/decoder.c)."""


def load_file(variant: Variant) -> ctypes.CDLL:
    """A prebuilt library if one fits, else a compiled one. A library that cannot be loaded is compiled again, once."""
    if (path := prebuilt.find(variant)) is not None:
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            log.warning("the prebuilt %s kernels cannot be loaded (%s): they are compiled here", variant.name, error)
    path = build_library(variant)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        log.warning("the %s kernels cannot be loaded (%s): they are compiled again", variant.name, error)
        build_cache.discard(path)
        return ctypes.CDLL(str(build_library(variant)))


def _check_structures(c: ctypes.CDLL) -> None:
    """Compares sizes with the library: a field that only one side has would make it read wrong memory. Raises EngineError."""
    sizes = (c_int64 * len(STRUCTURES))()
    sizes_of = _function(c.baton_sizes, c_int64, POINTER(c_int64), c_int64)
    if sizes_of(sizes, len(STRUCTURES)) != len(STRUCTURES):
        raise EngineError("the kernels have other structures than this version of baton")
    for structure, size in zip(STRUCTURES, sizes, strict=True):
        if ctypes.sizeof(structure) != size:
            raise EngineError(f"{structure.__name__} has {size} bytes in the kernels and {ctypes.sizeof(structure)} here")


def _function(function: ctypes._NamedFuncPointer, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    function.restype = result
    function.argtypes = arguments
    return function


@cache
def load_variant(variant: Variant) -> Library:
    """Load the library of a variant. Raises NoCompiler if it cannot be compiled, or if the system does not allow these
    instructions."""
    library = Library(variant)
    if library.allow() != 0:
        raise NoCompiler(f"the system does not allow the {variant.name} instructions ({variant.description})")
    return library


@cache
def load_best() -> Library:
    """The best variant that this machine runs, prebuilt or compiled. Raises NoCompiler if there is none."""
    variants = supported_variants()
    if not any(map(prebuilt.find, variants)):
        find_compiler()  # one error for all variants
    errors = []
    for variant in variants:
        try:
            return load_variant(variant)
        except (NoCompiler, OSError) as error:
            log.warning("kernels for %s: %s", variant.description, error)
            errors.append(str(error))
    raise NoCompiler("; ".join(errors))
