"""The attention kernel gives what plain torch gives, and the same bits whatever else is in the step."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import History, KernelAttention, Shape
from kernels import Team
from product_oracle import mixing_matrix
from steps import random_steps

from baton.kvpool.layout import KVDtype, KVFormat
from baton.native.library import Library
from baton.worker.attention.gathered import GatheredAttention

TOLERANCE = 1e-5
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16"])
"""Of keys and values. int8 has tests of its own."""
POISONS = pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])


def random_shape(rng: random.Random) -> Shape:
    kv_heads = rng.choice([1, 2, 3])
    return Shape(
        heads=kv_heads * rng.choice([1, 2, 3, 4, 7]),
        kv_heads=kv_heads,
        head_dim=rng.choice([2, 6, 10, 16, 24, 40, 64, 80, 128]),
        block_size=rng.randint(1, 32) if rng.random() < 0.7 else 16,
        window=rng.choice([None, 1, 3, 17, 70]),
        dtype=rng.choice(["float32", "float16"]),
        sinks=rng.choice([False, True]),
    )


@pytest.mark.parametrize("first", range(3))
def test_kernel_equals_torch(library, first):
    for seed in range(first, 12, 3):
        assert_kernel_equals_torch(library, seed)


def assert_kernel_equals_torch(library, seed):
    rng = random.Random(seed)
    history = History(random_shape(rng), [rng.randint(1, 200) for _ in range(rng.randint(1, 4))], seed)
    config, pools = history.shape.config(), (history.pool(), history.pool())
    with Team(library, rng.choice([1, 2])) as team:
        backends = KernelAttention(team, config, pools[0]), GatheredAttention(config, pools[1])
        for parts in random_steps(rng, history.lengths):
            for layer in (0, 1):
                ours, expected = (torch.cat(history.run(backend, parts, layer)) for backend in backends)
                torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)
    assert np.array_equal(pools[0].data, pools[1].data, equal_nan=True)


def in_bytes(x: torch.Tensor) -> torch.Tensor:
    """What int8 keeps of keys or values: 127 steps to the largest number of each token and head."""
    most = x.abs().amax(-1, keepdim=True)
    return (x * (torch.full_like(most, 127) / most)).round() * (most / 127)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """What csrc/hadamard.h makes of the last dimension, rounded where it rounds: after every sum."""
    width, apart = x.shape[-1], 1
    while width % (2 * apart) == 0:
        pairs = x.reshape(*x.shape[:-1], -1, 2, apart)
        x = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        apart *= 2
    if (factor := width // apart) > 1:
        parts = x.unflatten(-1, (factor, apart))
        total = sum(parts[..., i, :] for i in range(1, factor)) + parts[..., 0, :]
        x = (parts.double() + total[..., None, :].double() * float(np.float32(-2 / factor))).float().flatten(-2)
    return x


def unmixed(x: torch.Tensor) -> torch.Tensor:
    matrix = torch.from_numpy(mixing_matrix(x.shape[-1]))
    return (x.double() @ matrix / (x.shape[-1] & -x.shape[-1])).float()


def in_mixed_bytes(x: torch.Tensor) -> torch.Tensor:
    """What is left of queries and keys."""
    return unmixed(in_bytes(mixed(x)))


@pytest.mark.parametrize("width", [64, 128, 192])
def test_mixing_can_be_taken_back(width):
    x = torch.randn(5, width)
    torch.testing.assert_close(unmixed(mixed(x)), x, atol=1e-5, rtol=0)


def with_rounded_numbers(history: History) -> History:
    exact = History(replace(history.shape, dtype="float32", format="turned"), history.lengths)
    exact.sinks = history.sinks
    exact.q, exact.k = ([in_mixed_bytes(x) for x in every] for every in (history.q, history.k))
    exact.v = [in_bytes(x) for x in history.v]
    return exact


@pytest.mark.parametrize("seed", range(8))
def test_in_bytes_it_is_torch_with_rounded_numbers(library, seed):
    """Torch gets queries, keys and values as bytes have them. Weights then have 14 bits of the largest of their segment: they
    are rounded to less than a ten-thousandth."""
    rng = random.Random(seed)
    shape = replace(random_shape(rng), head_dim=rng.choice([64, 128, 192]), block_size=16, dtype="int8", format="int8-fours")
    history = History(shape, [rng.randint(1, 400) for _ in range(rng.randint(1, 4))], seed)
    exact = with_rounded_numbers(history)
    config, bound = shape.config(), 5e-4 * max(float(v.abs().max()) for v in history.v)
    with Team(library, rng.choice([1, 2])) as team:
        kernel, oracle = KernelAttention(team, config, history.pool()), GatheredAttention(config, exact.pool())
        for parts in random_steps(rng, history.lengths):
            for layer in (0, 1):
                ours, expected = torch.cat(history.run(kernel, parts, layer)), torch.cat(exact.run(oracle, parts, layer))
                torch.testing.assert_close(ours, expected, atol=bound, rtol=0)


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (700, False), (700, True)])
def test_so_it_is_where_a_sequence_is_longer_than_a_split(library, window, sinks):
    """What splits give is joined: one after another in a prompt, and of a single row when all of them are there."""
    shape = Shape(heads=3, kv_heads=1, head_dim=64, dtype="int8", format="int8-fours", window=window, sinks=sinks)
    history = History(shape, [1300])
    exact, config, bound = with_rounded_numbers(history), shape.config(), 5e-4 * float(history.v[0].abs().max())
    with Team(library, 2) as team:
        kernel, oracle = KernelAttention(team, config, history.pool()), GatheredAttention(config, exact.pool())
        for parts in ([(0, 0, 1299)], [(0, 1299, 1)]):
            for layer in (0, 1):
                ours, expected = torch.cat(history.run(kernel, parts, layer)), torch.cat(exact.run(oracle, parts, layer))
                torch.testing.assert_close(ours, expected, atol=bound, rtol=0)


def test_one_token_that_gets_nearly_everything_leaves_the_others_their_share(library):
    """The first token of a text often gets nearly all; what the other 600 say together must not be rounded away. Those of its
    own segment are, here: each loses less than half a unit of the largest weight."""
    history = History(Shape(head_dim=64, dtype="int8", format="int8-fours"), [600])
    history.q[0][:], history.k[0][:] = 0.5, 0.0
    history.k[0][0] = 1.0  # a score of 4: e^4 to 1 each
    history.q[0] *= 2.6  # of 10.4: about 33,000 to 599
    history.v[0][0], history.v[0][1:] = 0.0, 1.0
    with Team(library) as team:
        ours = history.run(KernelAttention(team, history.shape.config(), history.pool()), [(0, 0, 600)], 0)[0]
    share = 599 / (599 + float(np.exp(10.4)))
    assert 0 <= share - float(ours[-1].min()) < 128 * 0.5 / 16383 < share / 4


@pytest.mark.parametrize(("dtype", "form"), [("float32", "turned"), ("float16", "turned"), ("int8", "int8-fours")])
@pytest.mark.parametrize("sink", [-100.0, 100.0])
def test_a_sink_may_take_nothing_or_all(library, dtype, form, sink):
    history = History(Shape(head_dim=64, dtype=dtype, format=form, sinks=True), [50])
    config = history.shape.config()
    with Team(library) as team:
        history.sinks = torch.full((6,), sink)
        beside = history.run(KernelAttention(team, config, history.pool()), [(0, 0, 50)], 0)[0]
        history.sinks = None
        without = history.run(KernelAttention(team, config, history.pool()), [(0, 0, 50)], 0)[0]
    torch.testing.assert_close(beside, without if sink < 0 else torch.zeros_like(without), atol=1e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 20])
def test_a_query_of_zeros_sees_the_mean(library, window):
    history = History(Shape(head_dim=64, dtype="int8", format="int8-fours", window=window), [150])
    history.q[0][:] = 0.0
    with Team(library) as team:
        backend = KernelAttention(team, history.shape.config(), history.pool())
        ours = torch.cat([history.run(backend, [part], 1)[0] for part in [(0, 0, 100), (0, 100, 1), (0, 101, 49)]])
    values = in_bytes(history.v[0]).repeat_interleave(3, 1).flatten(1)  # [token, head, dim]: 6 heads share 2
    for token in (0, 7, 99, 100, 101, 149):
        first = 0 if window is None else max(0, token - window + 1)
        torch.testing.assert_close(ours[token], values[first : token + 1].mean(0), atol=2e-3, rtol=0)


def alone(library: Library, history: History) -> list[list[torch.Tensor]]:
    """Each sequence by itself, in one step: [sequence][layer]."""
    with Team(library) as team:
        backend = KernelAttention(team, history.shape.config(), history.pool())
        return [[history.run(backend, [part], layer)[0] for layer in (0, 1)] for part in history.all_at_once()]


def assert_same_bits_in_any_company(library: Library, shape: Shape) -> None:
    rng = random.Random(7)
    history = History(shape, [150, 1, 77, 130])
    expected = alone(library, history)
    for threads in (1, 2):
        with Team(library, threads) as team:
            backend = KernelAttention(team, shape.config(), history.pool())
            for parts in random_steps(rng, history.lengths):
                for layer in (0, 1):
                    for (sequence, at, count), out in zip(parts, history.run(backend, parts, layer), strict=True):
                        assert torch.equal(out, expected[sequence][layer][at : at + count])


@DTYPES
@pytest.mark.parametrize(
    "shape", [Shape(), Shape(head_dim=64), Shape(block_size=5, head_dim=10, window=9), Shape(heads=14, sinks=True)]
)
def test_a_sequence_gets_the_same_bits_in_any_chunks_and_company(library, shape, dtype):
    assert_same_bits_in_any_company(library, replace(shape, dtype=dtype))


@pytest.mark.parametrize(
    "shape", [Shape(), Shape(heads=14, window=30, sinks=True), Shape(heads=1, kv_heads=1), Shape(heads=3, kv_heads=3)]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_so_it_does_in_bytes(library, shape, head_dim):
    """On a processor with tiles: few rows on vectors and many on tiles, the same bits."""
    assert_same_bits_in_any_company(library, replace(shape, head_dim=head_dim, dtype="int8", format="int8-fours"))


@pytest.mark.parametrize("shape", [Shape(), Shape(heads=14, window=30)])
def test_so_it_does_on_tiles(tiled, shape):
    assert_same_bits_in_any_company(tiled, replace(shape, head_dim=128, dtype="int8", format="int8-fours"))


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_long_sequence_that_the_team_shares_gets_the_same_bits(library, threads, window):
    """Decoded alone, its spans go to all members; in a prompt, one member goes through them after each other."""
    shape = Shape(heads=3, kv_heads=1, head_dim=64, dtype="int8", format="int8-fours", window=window)
    history = History(shape, [1300, 520, 40])
    expected = alone(library, history)
    with Team(library, threads) as team:
        backend = KernelAttention(team, shape.config(), history.pool())
        for steps in [[(0, 0, 1290), (1, 0, 510), (2, 0, 30)], *([(s, n, 1)] for s in (0, 1, 2) for n in range(1290, 1294))]:
            parts = [(s, at - {0: 0, 1: 780, 2: 1260}[s] if count == 1 else at, count) for s, at, count in steps]
            for (sequence, at, count), out in zip(parts, history.run(backend, parts, 1), strict=True):
                assert torch.equal(out, expected[sequence][1][at : at + count])
        parts = [(0, 1294, 5), (1, 514, 1), (2, 34, 1)]
        for (sequence, at, count), out in zip(parts, history.run(backend, parts, 1), strict=True):
            assert torch.equal(out, expected[sequence][1][at : at + count])


def assert_extreme_scores_are_right(library: Library, dtype: KVDtype, tolerance: float, form: KVFormat = "turned") -> None:
    history = History(Shape(head_dim=64, dtype=dtype, format=form), [90])
    history.q[0] *= 100.0
    history.q[0], history.k[0] = history.q[0].bfloat16().float(), history.k[0].bfloat16().float()
    parts, config = [(0, 0, 90)], history.shape.config()
    with Team(library) as team:
        ours = history.run(KernelAttention(team, config, history.pool()), parts, 0)[0]
    exact = History(replace(history.shape, dtype="float32", format="turned"), [90]).pool()
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, history.run(GatheredAttention(config, exact), parts, 0)[0], atol=tolerance, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float16", 5e-3)])
def test_extreme_scores_stay_finite_and_right(library, dtype, tolerance):
    assert_extreme_scores_are_right(library, dtype, tolerance)


def test_so_they_do_in_bytes(library):
    history = History(Shape(head_dim=64, dtype="int8", format="int8-fours"), [90])
    history.q[0] *= 100.0
    exact = History(replace(history.shape, dtype="float32", format="turned"), [90])
    exact.q, exact.k, exact.v = [in_mixed_bytes(history.q[0])], [in_mixed_bytes(history.k[0])], [in_bytes(history.v[0])]
    parts, config = [(0, 0, 90)], history.shape.config()
    with Team(library) as team:
        ours = history.run(KernelAttention(team, config, history.pool()), parts, 0)[0]
    expected = exact.run(GatheredAttention(config, exact.pool()), parts, 0)[0]
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, expected, atol=5e-2, rtol=0)


def assert_poison_stays_in_its_sequence(
    library: Library, dtype: KVDtype, poison: float, where: str, form: KVFormat = "turned"
) -> None:
    history = History(Shape(dtype=dtype, format=form, head_dim=64), [40, 40])
    getattr(history, where)[0][3] = poison
    with Team(library) as team:
        sick, well = history.run(KernelAttention(team, history.shape.config(), history.pool()), history.all_at_once(), 0)
    assert not (sick[3] if where == "q" else sick[3:]).isfinite().any(), where
    assert well.isfinite().all(), where


def assert_what_is_not_seen_changes_no_bit(library: Library, dtype: KVDtype, form: KVFormat = "turned") -> None:
    """Later tokens of the same step, with huge values where the earlier ones have none: no weight, however small, may meet
    them."""
    history = History(Shape(dtype=dtype, format=form, head_dim=64), [100])
    history.v[0][:60, :, :32], history.v[0][60:] = 0.0, 1e30
    config = history.shape.config()
    with Team(library) as team:
        together = history.run(KernelAttention(team, config, history.pool()), [(0, 0, 100)], 0)[0]
        alone = history.run(KernelAttention(team, config, history.pool()), [(0, 0, 60)], 0)[0]
    assert torch.equal(together[:60], alone)


@DTYPES
def test_what_is_not_seen_changes_no_bit(library, dtype):
    assert_what_is_not_seen_changes_no_bit(library, dtype)


def test_nor_does_it_in_int8(library):
    assert_what_is_not_seen_changes_no_bit(library, "int8", "int8-fours")


@DTYPES
@POISONS
def test_what_is_no_number_stays_in_its_own_sequence(library, dtype, poison):
    for where in ("q", "k", "v"):
        assert_poison_stays_in_its_sequence(library, dtype, poison, where)


@POISONS
def test_so_it_does_in_int8(library, poison):
    for where in ("q", "k", "v"):
        assert_poison_stays_in_its_sequence(library, "int8", poison, where, "int8-fours")
