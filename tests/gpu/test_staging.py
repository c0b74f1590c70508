"""Pinned buffers of decode steps, and what a launch does before its graph is replayed, on a device that runs everything as late
as it may (late_cuda.py)."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")

from late_cuda import device_steps, tokens_of

from baton.worker.cuda.graphs import RING
from baton.worker.cuda.step_inputs import StepBatch


def batch_of(rng: random.Random, rows: int, *, draws: bool = False) -> StepBatch:
    def column(most: int) -> np.ndarray:
        return np.array([rng.randrange(most) for _ in range(rows)])

    return StepBatch(
        *(column(50_000), column(8), np.arange(rows + 1), column(200), np.ones(rows, np.bool_)),
        outputs=column(100),
        draws=draws,
    )


def expected(batch: StepBatch) -> list[int]:
    return tokens_of(batch.token_ids, batch.contexts, batch.slots, batch.outputs).tolist()


@pytest.mark.parametrize("ahead", [1, 2, RING - 1])
def test_each_step_reads_its_own_inputs(monkeypatch, ahead):
    rng, uncollected = random.Random(ahead), deque()
    with device_steps(monkeypatch) as (steps, _):
        for _ in range(60):
            batch = batch_of(rng, rng.randint(1, 32), draws=rng.random() < 0.5)
            tokens = expected(batch)
            uncollected.append((steps.launch(batch), tokens))
            batch.token_ids[:] = batch.slots[:] = batch.contexts[:] = 0  # the caller may reuse its arrays
            if len(uncollected) > ahead:
                launched, tokens = uncollected.popleft()
                launched.done.synchronize()
                assert launched.tokens.tolist() == tokens


def test_a_buffer_whose_copy_is_queued_is_not_written(monkeypatch):
    """A host that launches more steps than there are buffers waits for the device."""
    rng, wanted = random.Random(0), []
    with device_steps(monkeypatch) as (steps, _):
        for _ in range(3 * RING):
            batch = batch_of(rng, 5)
            wanted.append(expected(batch))
            launched = steps.launch(batch)
        launched.done.synchronize()
    assert [tokens[:5] for tokens in steps.step.computed] == wanted


def test_a_launch_makes_few_calls_before_its_replay(monkeypatch):
    """Each takes microseconds in which the device may be idle (docs/internals/notes/gpu-runs.md)."""
    rng = random.Random(0)
    with device_steps(monkeypatch) as (steps, device):
        for _ in range(RING):
            steps.launch(batch_of(rng, 5))
        batch = batch_of(rng, 5)
        device.calls.clear()
        steps.launch(batch)
    assert device.calls[: device.calls.index("replay")] == ["set_stream", "copy_"]
