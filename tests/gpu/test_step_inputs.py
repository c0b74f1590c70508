"""Packing of a step's numbers into one run of int32."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")

import torch

from baton.worker.cuda.step_inputs import (
    ALIGNED,
    MixedPadding,
    StepBatch,
    decode_views,
    ints_needed,
    mixed_views,
    pack_decode,
    pack_mixed,
    split_few_rows,
)


def batch_of(contexts, counts, due=None):
    contexts, counts = np.array(contexts), np.array(counts)
    return StepBatch(
        token_ids=np.arange(int(counts.sum())) + 1000,
        slots=np.arange(len(counts)) * 2 + 1,
        starts=np.concatenate(([0], np.cumsum(counts))),
        contexts=contexts,
        due=np.ones(len(counts), bool) if due is None else np.array(due),
        outputs=np.arange(len(counts)) + 7,
    )


def test_decode_is_padded_and_the_longest_starts_first():
    run = np.full(ints_needed(8, 8, 32), 77, np.int32)
    packing = pack_decode(batch_of([5, 90, 31], [1, 1, 1]), 8, run, 8, fixed=False)
    views = decode_views(packing, torch.from_numpy(run))
    assert views.token_ids.tolist() == [1000, 1001, 1002, 0, 0, 0, 0, 0]
    assert views.positions.tolist() == [5, 90, 31, -1, -1, -1, -1, -1]
    assert views.row_slots.tolist() == [1, 3, 5, -1, -1, -1, -1, -1]
    assert views.due_slots.tolist() == views.row_slots.tolist()
    assert views.order.tolist() == [1, 2, 0, 3, 4, 5, 6, 7]
    assert views.due_rows is None
    assert views.tiles is None


def test_mixed_has_the_rows_of_all_and_tiles_of_prompts():
    run = np.zeros(ints_needed(80, 4, 32), np.int32)
    batch = batch_of([40, 0, 100, 6], [1, 70, 1, 3], due=[True, False, True, True])
    views = mixed_views(pack_mixed(batch, run, 8, 32, fixed=True), torch.from_numpy(run))
    assert views.positions.tolist() == [40, *range(70), 100, 6, 7, 8]
    assert views.row_slots.tolist() == [1, *[3] * 70, 5, 7, 7, 7]
    assert views.order.tolist() == [71, 0], "rows of those that run one token, the longest first"
    assert views.tiles.tolist() == [[1, 64], [1, 32], [3, 0], [1, 0]]
    assert views.due_rows.tolist() == [0, 71, 74]
    assert views.due_slots.tolist() == [1, 5, 7]
    assert views.outputs.tolist() == [7, 9, 10]
    assert views.split_tokens.tolist() == [256]


def test_outputs_that_run_again_are_decoded_row_by_row():
    run = np.zeros(ints_needed(80, 4, 32), np.int32)
    batch = batch_of([40, 60, 10, 6], [1, 8, 1, 3])
    batch = dataclasses.replace(batch, of_prompt=np.array([0, 5, 1, 0]))
    views = mixed_views(pack_mixed(batch, run, 8, 32, fixed=True), torch.from_numpy(run))
    assert views.order.tolist() == [8, 7, 6, 0, 12, 11, 10], "rows 6 to 8 of the second, and all of the first and last"
    assert views.tiles.tolist() == [[1, 0], [2, 0]]
    assert not batch.decodes
    alone = dataclasses.replace(batch_of([9], [1]), of_prompt=np.array([1]))
    assert not alone.decodes, "the last token of a prompt is the prompt's"
    assert dataclasses.replace(alone, of_prompt=np.array([0])).decodes


def test_few_rows_behind_a_long_context_are_split():
    counts, contexts = np.array([1, 16, 16, 17]), np.array([9, 512, 511, 600])
    assert split_few_rows(counts, contexts, 64).tolist() == [0, 0, 16, 17]
    assert split_few_rows(counts, contexts, 16) is None, "more rows than can be decoded"
    assert split_few_rows(counts[2:], contexts[2:], 64) is None


def test_padding_leaves_what_is_there_in_place():
    run, padded = (np.zeros(ints_needed(96, 8, 32), np.int32) for _ in range(2))
    batch = batch_of([40, 0, 100, 6], [1, 70, 1, 3], due=[True, False, True, True])
    padding = MixedPadding(96, 8, 4, 15)
    plain = mixed_views(pack_mixed(batch, run, 8, 32, fixed=False), torch.from_numpy(run))
    views = mixed_views(pack_mixed(batch, padded, 8, 32, fixed=False, padding=padding), torch.from_numpy(padded))
    for name, count in (("token_ids", 96), ("positions", 96), ("slots", 8), ("starts", 9), ("order", 4), ("tiles", 15)):
        there, found = getattr(plain, name), getattr(views, name)
        assert (len(found), found[: len(there)].tolist()) == (count, there.tolist())
    assert views.positions[75:].tolist() == [-1] * 21
    assert views.order[2:].tolist() == [-1, -1]
    assert views.tiles[4:].tolist() == [[-1, -1]] * 11
    assert views.due_rows.tolist() == plain.due_rows.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_needed_is_enough_and_everything_is_aligned(seed):
    rng = np.random.default_rng(seed)
    sequences = int(rng.integers(1, 20))
    counts = rng.integers(1, 90, sequences)
    batch = batch_of(rng.integers(0, 500, sequences), counts)
    run = np.zeros(ints_needed(int(counts.sum()), sequences, 32), np.int32)
    packing = pack_mixed(batch, run, 8, 32, fixed=False)
    assert packing.size <= len(run)
    assert all(begin % ALIGNED == 0 for begin, _ in packing.places.values()), "kernels are compiled for 16 bytes"


def test_even_lengths():
    assert batch_of([1000, 1010, 990], [1, 1, 1]).even
    assert batch_of([0, 0], [1, 1]).even
    assert not batch_of([1000, 100, 100], [1, 1, 1]).even


def test_no_prompt_of_the_warm_up_is_longer_than_the_context():
    from baton.worker.cuda.graphs import rows_to_warm_up
    from baton.worker.cuda.layer_steps import StepLimits

    assert rows_to_warm_up(StepLimits(rows=8192, sequences=4, context_tokens=4096)) == [2, 20, 40, 100, 200, 4096]
    assert rows_to_warm_up(StepLimits(rows=64, sequences=4, context_tokens=4096)) == [2, 20, 40, 64]
    assert rows_to_warm_up(StepLimits(rows=64, sequences=4, context_tokens=16)) == [2, 16]


@pytest.mark.parametrize("slots", [4, 256, 1024])
def test_recorded_steps_fit_their_inputs_with_more_slots_than_rows(slots):
    """As of a draft model, whose steps have 256 rows however many slots the main model has."""
    from baton.worker.cuda.layer_steps import StepLimits
    from baton.worker.cuda.mixed_graphs import MixedGraphs

    limits = StepLimits(rows=256, sequences=slots, context_tokens=4096, greedy=True)
    step = SimpleNamespace(
        limits=limits, config=SimpleNamespace(kv_heads=8), rows_per_tile=32, deterministic=False, last_hidden=None
    )
    run = torch.zeros(ints_needed(limits.rows, limits.sampled, step.rows_per_tile), dtype=torch.int32)
    graphs, recorded = MixedGraphs(step, run), []
    graphs.capture(recorded.append)
    assert recorded
    batch = batch_of([600, 7], [2, 200])
    padding = graphs.padding_for(batch)
    assert padding is not None
    packing = pack_mixed(batch, run.numpy(), 8, step.rows_per_tile, fixed=False, padding=padding)
    assert packing.size <= len(run)
    assert len(mixed_views(packing, run).slots) == min(slots, 256)
