"""Products against the definition in float64; and the same bits for any number of rows, threads, and kind of processor."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from golden_model import runnable_variants
from kernels import Team, fused_libraries, load, pack, packed_head, rounds_once, small_config
from product_oracle import Product, activation_groups, gated, product, random_matrix

from baton.models.config import Traits
from baton.models.dequantise import dequantise
from baton.models.quantise import FOUR_BITS, ROW_MOST, to_q4_1, to_q8_0
from baton.models.raw_tensor import RawTensor
from baton.models.tensor_types import F32, MXFP4, Q4_0, Q4_1, Q8_0, TensorType
from baton.native.library import GROUPED_INT8
from baton.native.library import Q8_0 as KIND_Q8_0
from baton.native.packing import PackedModel

KINDS = pytest.mark.parametrize("kind", [F32, Q8_0, Q4_0, Q4_1, MXFP4], ids=lambda kind: kind.name)
SHAPES = ((1, 32), (31, 64), (33, 96), (97, 160), (64, 576), (40, 1536))
"""(outputs, inputs): outputs that fill their last cell and that do not, inputs of one group, of an odd number, of many."""
ROWS = 200
SLICES = ((0, 1), (7, 1), (3, 2), (5, 3), (0, 4), (9, 5), (2, 6), (0, 7), (11, 11), (20, 12), (13, 13), (0, 16), (1, 17),
          (30, 20), (40, 31), (8, 32), (0, 33), (60, 127), (3, 128), (50, 129), (0, 200))  # fmt: skip
"""(first row, rows): every size of tile, and one more and one less than each place where the way to compute changes."""


def activations(rows: int, width: int, seed: int = 1) -> np.ndarray:
    """Groups of very different sizes, and some that are all zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width // 32, 32), np.float32) * np.exp(rng.standard_normal((rows, width // 32, 1)) * 2)
    x[rng.random((rows, width // 32)) < 0.05] = 0.0
    return x.reshape(rows, width).astype(np.float32)


def assert_near(library, ours: np.ndarray, expected: Product) -> None:
    far = np.abs(ours - expected.values) > expected.error_max * (1 if rounds_once(library) else 2) + 1e-37
    assert not far.any(), f"{far.sum()} of {far.size}: {ours[far][:3]} for {expected.values[far][:3]}"


@cache
def case(kind: TensorType, shape: tuple[int, int]) -> tuple[RawTensor, np.ndarray]:
    """The same for every variant: a matrix, and rows."""
    return random_matrix(np.random.default_rng(0), kind, *shape), activations(ROWS, shape[1])


@cache
def expected_of(kind: TensorType, shape: tuple[int, int], tiles: bool) -> Product:
    raw, x = case(kind, shape)
    return product(x, raw, tiles=tiles)


@KINDS
def test_products_are_what_their_definition_says(library, kind):
    for shape in SHAPES:
        assert_products_are_as_defined(library, kind, shape)


def assert_products_are_as_defined(library, kind, shape):
    raw, x = case(kind, shape)
    packed = packed_head(library, raw)
    with Team(library, 2) as team:
        all_rows = team.product(packed.head, x, shape[0])
        assert_near(library, all_rows, expected_of(kind, shape, bool(library.has_tiles())))
        for first, rows in SLICES:
            few = team.product(packed.head, x[first : first + rows], shape[0])
            assert np.array_equal(few, all_rows[first : first + rows]), f"{rows} rows give other bits than {ROWS}"


@KINDS
def test_products_are_near_those_of_the_numbers_that_the_file_means(library, kind):
    """Found by an audit: on tiles, each weight of a Q4_0 or Q4_1 block with a negative scale was off by twice that scale. About
    half of the blocks of a Q4_0 file are such. The oracle above had the same mistake."""
    for shape in SHAPES:
        raw, x = case(kind, shape)
        exact = x.astype(np.float64) @ dequantise(raw).astype(np.float64).T
        packed = packed_head(library, raw)
        with Team(library, 2) as team:
            found = team.product(packed.head, x, shape[0])
        assert np.linalg.norm(found - exact) < 0.02 * np.linalg.norm(exact), shape


@KINDS
def test_threads_change_nothing(library, kind):
    raw, x = random_matrix(np.random.default_rng(0), kind, 160, 96), activations(40, 96)
    packed = packed_head(library, raw)
    found = []
    for threads in (1, 2, 3, 8):
        with Team(library, threads) as team:
            found.append([team.product(packed.head, x[:rows], 160) for rows in (1, 2, 5, 40)])
    for others in found[1:]:
        assert all(np.array_equal(ours, first) for ours, first in zip(others, found[0], strict=True))


@KINDS
@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
def test_variants_that_round_once_give_the_same_bits(kind, shape):
    raw, x = case(kind, shape)
    found = []
    for library in fused_libraries(nibbles=kind in FOUR_BITS):
        packed = packed_head(library, raw)
        with Team(library) as team:
            found.append(team.product(packed.head, x[:50], shape[0]))
    assert all(np.array_equal(found[0], other) for other in found[1:])


@KINDS
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_do_not_overflow(library, kind, sign):
    """Bytes of -128, nibbles of 0 and 15 (of MXFP4 7, too: 12), activations that are all at the end of their range."""
    raw = random_matrix(np.random.default_rng(0), kind, 64, 1536)
    if kind != F32:
        numbers = raw.data.reshape(64, -1, kind.block_bytes)[:, :, {Q4_1: 4, MXFP4: 1}.get(kind, 2) :]
        largest = {Q8_0: (0x80, 0x7F, 0x81), MXFP4: (0xFF, 0x77, 0x7F)}
        numbers[:32], numbers[32:48], numbers[48:] = largest.get(kind, (0xFF, 0x00, 0x0F))
    x = np.full((20, 1536), sign * 3.0, np.float32)
    x[10:, ::2] *= -1
    packed = packed_head(library, raw)
    tiles = bool(library.has_tiles())
    with Team(library) as team:
        for rows in (1, 2, 20):
            assert_near(library, team.product(packed.head, x[20 - rows :], 64), product(x[20 - rows :], raw, tiles=tiles))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOUR_BITS, ids=lambda kind: kind.name)
def test_so_it_is_on_tiles_for_which_another_processor_stands_in(kind):
    variant = next((each for each in runnable_variants() if each.name == "amx"), None)
    if variant is None:
        pytest.skip("this processor has neither tiles nor the instructions that stand in for them")
    library = load(variant)
    test_products_are_what_their_definition_says(library, kind)
    for sign in (1, -1):
        test_the_largest_numbers_do_not_overflow(library, kind, sign)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_rows_of_bytes_do_not_overflow(library, sign):
    """A single number, mixed, is the largest byte in all places: on both sides, for as many inputs as there may be."""
    weights, x = np.zeros((32, ROW_MOST), np.float32), np.zeros((20, ROW_MOST), np.float32)
    weights[:, 0], x[:, 0] = np.linspace(0.5, 2.0, 32), sign * 3.0
    config = small_config(vocab_size=32, hidden_size=ROW_MOST)
    packed = pack(library, config, {"lm_head.weight": RawTensor.of_floats(weights)}, "int8")
    with Team(library) as team:
        for rows in (1, 3, 20):
            np.testing.assert_allclose(team.product(packed.head, x[:rows], 32), x[:rows, :1] * weights[:, 0], rtol=1e-6)


def test_how_activations_are_rounded(library):
    """Seen through a matrix that changes nothing: ties go to the even one, tiny groups become zeros, and a group that is larger
    than its neighbours has numbers of two bytes."""
    blocks = np.full((64, 2, Q4_0.block_bytes), 0x88, np.uint8)
    blocks[:, :, :2] = np.array([1.0], np.float16).view(np.uint8)
    places = np.arange(64)
    blocks[places, places // 32, 2 + places % 16] = np.where(places % 32 < 16, 0x89, 0x98)
    raw = RawTensor(Q4_0, (64, 64), blocks.reshape(64, -1))
    packed = packed_head(library, raw)
    x = np.zeros((7, 64), np.float32)
    x[0, :6], x[0, 32] = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5], 127.0
    x[1, 32:] = 1e-40
    x[2] = np.linspace(-5, 7, 64)
    x[3, 40] = 3.4e38
    x[4, ::2] = 1e-35
    x[5] = np.nextafter(np.float32(1.0), np.float32(0.0))
    x[6, :7], x[6, 32:34] = [-8159.0, 0.5, 1.5, 2.5, -0.5, 8000.0, 31.5], [127.0, 0.5]
    groups = activation_groups(x)
    expected = (groups.numbers * groups.scales[:, :, None]).reshape(x.shape).astype(np.float32)
    assert expected[0, :6].tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0]
    assert expected[6, :7].tolist() == [-8159.0, 0.0, 2.0, 2.0, 0.0, 8000.0, 32.0]
    assert expected[6, 32:34].tolist() == [127.0, 0.0]
    assert not expected[1].any()
    with Team(library) as team:
        for rows in (1, 7):
            ours = team.product(packed.head, x[:rows], 64)
            if library.has_tiles():  # where no matrix changes nothing
                assert_near(library, ours, product(x[:rows], raw, tiles=True))
            else:
                assert np.array_equal(ours, expected[:rows])


@KINDS
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf], ids=str)
def test_what_is_no_number_stays_in_its_row_and_shows(library, kind, poison):
    raw, x = random_matrix(np.random.default_rng(0), kind, 48, 96), activations(24, 96)
    packed = packed_head(library, raw)
    sick = [0, 5, 17, 23]
    poisoned = x.copy()
    poisoned[sick, [0, 31, 50, 95]] = poison
    well = np.setdiff1d(np.arange(24), sick)
    with Team(library, 2) as team:
        healthy = team.product(packed.head, x, 48)
        assert np.isfinite(healthy).all()
        for rows in (slice(0, 24), slice(0, 2), slice(0, 1), slice(16, 24)):
            ours = team.product(packed.head, poisoned[rows], 48)
            here = np.arange(24)[rows]
            assert not np.isfinite(ours[np.isin(here, sick)]).any()
            assert np.array_equal(ours[np.isin(here, well)], healthy[here[np.isin(here, well)]])


@KINDS
@pytest.mark.parametrize("poison", [np.nan, np.inf], ids=str)
def test_a_weight_that_is_no_number_shows_in_its_output(library, kind, poison):
    if kind == MXFP4:
        pytest.skip("every exponent is a number")
    if kind == F32:
        raw = random_matrix(np.random.default_rng(0), kind, 40, 64)
        raw.data.view(np.float32)[7, 40] = poison
    else:
        raw = random_matrix(np.random.default_rng(0), kind, 40, 64)
        raw.data.reshape(40, 2, -1)[7, 1, :2] = np.array([poison], np.float16).view(np.uint8)
    packed = packed_head(library, raw)
    with Team(library) as team:
        for rows in (1, 20):
            ours = team.product(packed.head, activations(20, 64)[:rows] + np.float32(0.01), 40)
            assert np.flatnonzero(~np.isfinite(ours).all(0)).tolist() == [7]
            assert not np.isfinite(ours[:, 7]).any()


# The output head of a model of four bits


def grouped_head(library, raw: RawTensor) -> PackedModel:
    config = small_config(vocab_size=raw.shape[0], hidden_size=raw.shape[1])
    return pack(library, config, {"lm_head.weight": raw}, "int4")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_head_beside_weights_of_four_bits_keeps_the_groups_of_its_file(library, shape):
    if library.has_tiles():
        pytest.skip("on tiles bytes are always rotated")
    raw, x = random_matrix(np.random.default_rng(0), Q8_0, *shape), activations(ROWS, shape[1])
    numbers = raw.data.reshape(shape[0], -1, Q8_0.block_bytes)[:, :, 2:]
    numbers[::3] = 0x80  # the largest products that there are
    packed = grouped_head(library, raw)
    assert packed.head.kind == GROUPED_INT8
    with Team(library, 2) as team:
        all_rows = team.product(packed.head, x, shape[0])
        assert_near(library, all_rows, product(x, raw, grouped=True))
        for first, rows in SLICES:
            few = team.product(packed.head, x[first : first + rows], shape[0])
            assert np.array_equal(few, all_rows[first : first + rows]), f"{rows} rows give other bits than {ROWS}"


def test_a_head_of_floats_becomes_the_blocks_that_our_own_quantisation_makes(library):
    if library.has_tiles():
        pytest.skip("on tiles bytes are always rotated")
    values = np.random.default_rng(6).standard_normal((50, 128), np.float32)
    values[3] = 0.0
    packed, x = [grouped_head(library, raw) for raw in (RawTensor.of_floats(values), to_q8_0(values))], activations(5, 128)
    with Team(library) as team:
        of_floats, of_blocks = (team.product(each.head, x, 50) for each in packed)
    assert np.array_equal(of_floats, of_blocks)


def test_a_head_in_a_model_of_bytes_is_rotated(library):
    raw = random_matrix(np.random.default_rng(0), Q8_0, 64, 96)
    config = small_config(vocab_size=64, hidden_size=96)
    kinds = [pack(library, config, {"lm_head.weight": raw}, way).head.kind for way in ("auto", "int8")]
    assert kinds == [KIND_Q8_0, KIND_Q8_0]


def test_a_wide_group_changes_no_bit_of_the_rows_beside_it(library):
    """A tile reads second bytes for all its rows where one of them has any."""
    for kind in FOUR_BITS:
        raw, x = random_matrix(np.random.default_rng(0), kind, 64, 576), np.ones((24, 576), np.float32)
        x += np.random.default_rng(1).standard_normal(x.shape, np.float32) * np.float32(0.1)
        packed, beside = packed_head(library, raw), x.copy()
        beside[::2, 64:96] *= 100
        with Team(library) as team:
            for rows in (1, 2, 3, 4, 6, 8, 24):
                alone, mixed = team.product(packed.head, x[:rows], 64), team.product(packed.head, beside[:rows], 64)
                assert np.array_equal(alone[1::2], mixed[1::2])
                assert not np.array_equal(alone[::2], mixed[::2])


# Stacked matrices


def stacked(*parts: RawTensor) -> RawTensor:
    rows = sum(part.shape[0] for part in parts)
    return RawTensor(parts[0].type, (rows, parts[0].shape[1]), np.concatenate([part.data for part in parts]))


@KINDS
@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_and_values_lie_in_one_matrix(library, kind, bias):
    config = small_config(hidden_size=96, heads=3, kv_heads=1, head_dim=10, traits=Traits(qkv_bias=bias))
    rng = np.random.default_rng(4)
    q, k, v = (random_matrix(rng, kind, rows, 96) for rows in (30, 10, 10))
    given = {f"layers.0.attention.{name}.weight": raw for name, raw in zip("qkv", (q, k, v), strict=True)}
    biases = rng.standard_normal(50).astype(np.float32)
    if bias:
        parts = np.split(biases, [30, 40])
        given |= {f"layers.0.attention.{n}.bias": RawTensor.of_floats(b) for n, b in zip("qkv", parts, strict=True)}
    packed = pack(library, config, given, "none" if kind == F32 else "auto")
    x = activations(20, 96)
    with Team(library, 2) as team:
        for rows in (1, 20):
            ours = team.product(packed.blocks[0].qkv, x[:rows], 50)
            tiles = bool(library.has_tiles())
            assert_near(library, ours, product(x[:rows], stacked(q, k, v), biases if bias else None, tiles=tiles))


@KINDS
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_gates_and_what_they_let_through(library, kind, activation):
    for width in (1, 16, 17, 50, 96):
        for bias in (False, True):
            assert_gates_let_through(library, kind, bias, width, activation)


def assert_gates_let_through(library, kind, bias, width, activation):
    config = small_config(hidden_size=64, intermediate_size=width, traits=Traits(mlp_bias=bias, activation=activation))
    rng = np.random.default_rng(5)
    gate, up = random_matrix(rng, kind, width, 64), random_matrix(rng, kind, width, 64)
    given = {"layers.0.mlp.gate.weight": gate, "layers.0.mlp.up.weight": up}
    biases = rng.standard_normal(2 * width).astype(np.float32)
    if bias:
        given["layers.0.mlp.gate.bias"] = RawTensor.of_floats(biases[:width])
        given["layers.0.mlp.up.bias"] = RawTensor.of_floats(biases[width:])
    packed = pack(library, config, given, "none" if kind == F32 else "auto")
    x = activations(20, 64) * np.float32(3)
    with Team(library, 2) as team:
        all_rows = team.product(packed.blocks[0].gate_up, x, width)
        both = product(x, stacked(gate, up), biases if bias else None, tiles=bool(library.has_tiles()))
        assert_near(library, all_rows, gated(both, activation))
        for rows in (1, 2, 3):
            assert np.array_equal(team.product(packed.blocks[0].gate_up, x[:rows], width), all_rows[:rows])


@pytest.mark.parametrize("gate", [-1e4, -90.0, -30.0, -1e-3, 0.0, 1e-3, 30.0, 90.0, 1e4])
def test_gates_of_any_size(library, gate):
    """One gate and one up, by their biases alone."""
    config = small_config(hidden_size=32, intermediate_size=1, traits=Traits(mlp_bias=True))
    zeros, numbers = RawTensor.of_floats(np.zeros((1, 32), np.float32)), {"gate": gate, "up": 3.0}
    given = {f"layers.0.mlp.{name}.weight": zeros for name in numbers}
    given |= {f"layers.0.mlp.{n}.bias": RawTensor.of_floats(np.array([b], np.float32)) for n, b in numbers.items()}
    packed = pack(library, config, given, "none")
    with Team(library) as team:
        ours = float(team.product(packed.blocks[0].gate_up, np.ones((1, 32)), 1)[0, 0])
    exact = float(np.float32(gate))
    assert ours == pytest.approx(3.0 * exact / (1.0 + np.exp(min(-exact, 700.0))), rel=1e-6, abs=1e-30)


@pytest.mark.parametrize(("gate", "up"), [(1e4, -1e4), (7.5, 8.0), (-1e4, 1e4), (np.nan, 1.0), (1.0, np.nan)])
def test_gates_of_gpt_oss_are_cut_off_and_what_is_no_number_stays(library, gate, up):
    traits = Traits(mlp_bias=True, activation="swiglu_oai")
    config = small_config(hidden_size=32, intermediate_size=1, traits=traits)
    given = {f"layers.0.mlp.{name}.weight": RawTensor.of_floats(np.zeros((1, 32), np.float32)) for name in ("gate", "up")}
    biases = {"gate": gate, "up": up}
    given |= {f"layers.0.mlp.{n}.bias": RawTensor.of_floats(np.array([b], np.float32)) for n, b in biases.items()}
    packed = pack(library, config, given, "none")
    with Team(library) as team:
        ours = float(team.product(packed.blocks[0].gate_up, np.ones((1, 32)), 1)[0, 0])
    if np.isnan([gate, up]).any():
        assert np.isnan(ours)
    else:
        cut = min(gate, 7.0)
        expected = cut / (1.0 + np.exp(min(-1.702 * cut, 700.0))) * (max(min(up, 7.0), -7.0) + 1.0)
        assert ours == pytest.approx(expected, rel=1e-6, abs=1e-30)


# What a model's own quantisation gives


@pytest.mark.parametrize(("quantise", "kind"), [(to_q8_0, Q8_0), (to_q4_1, Q4_1)], ids=["Q8_0", "Q4_1"])
def test_our_own_blocks(library, quantise, kind):
    raw = quantise(np.random.default_rng(6).standard_normal((50, 128), np.float32))
    assert raw.type == kind
    x = activations(5, 128)
    packed = packed_head(library, raw)
    with Team(library) as team:
        expected = product(x, raw, tiles=bool(library.has_tiles()))
        assert_near(library, team.product(packed.head, x, 50), expected)
