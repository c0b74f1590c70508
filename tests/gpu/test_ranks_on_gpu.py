"""Steps of two ranks on one GPU (or in the interpreter), two processes that exchange through gloo: the tokens of one rank."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")

import torch
from rank_steps import CASES, LARGE, WHOLE, WHOLE_DECODES, compute

SCRIPT = Path(__file__).parent / "rank_steps.py"
MODES = ["fastest", "deterministic"]


class InTurns:
    """Two ranks as threads of which one runs at a time: Triton's interpreter allows no more."""

    def __init__(self, rank, turns, parts):
        self.rank, self.turns, self.parts = rank, turns, parts

    def gather(self, part):
        self.parts[self.rank].append(part.clone())
        number = len(self.parts[self.rank])
        self.pass_turn()
        return torch.stack([parts[number - 1] for parts in self.parts])

    def sum(self, rows):
        rows.copy_(self.gather(rows).sum(0))

    def pass_turn(self):
        self.turns[1 - self.rank].release()
        assert self.turns[self.rank].acquire(timeout=300)


def in_turns(config, place, mode, **more):
    turns, parts = [threading.Semaphore(1), threading.Semaphore(0)], ([], [])

    def run(rank):
        assert turns[rank].acquire(timeout=300)
        collective = InTurns(rank, turns, parts)
        try:
            return compute(config, rank, 2, collective, place.device, place.dtype, mode, **more)
        finally:
            turns[1 - rank].release()

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


def check(one, two, *, exact, case, tolerance=1e-5):
    assert np.array_equal(two[0]["logits"], two[1]["logits"]), case
    assert np.array_equal(two[0]["tokens"], two[1]["tokens"]), case
    if exact:
        assert np.array_equal(two[0]["tokens"], one["tokens"]), case
        np.testing.assert_allclose(two[0]["logits"], one["logits"], atol=tolerance, rtol=tolerance, err_msg=case)
    else:  # rounded to bfloat16; after another token nothing can be compared
        np.testing.assert_allclose(two[0]["logits"][:2], one["logits"][:2], atol=0.1, rtol=0.1, err_msg=case)


def test_two_ranks_give_the_tokens_of_one(place):
    """Of a model with an MLP in its first layer, and experts in its second."""
    if place.device != "cpu":
        pytest.skip("on a GPU the ranks are processes, below")
    case = "shared expert"
    one = compute(CASES[case], 0, 1, None, place.device, place.dtype, MODES[0], decodes=0)
    check(one, in_turns(CASES[case], place, MODES[0], decodes=0), exact=True, case=case)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_of_every_trait(place, case, mode):
    one = compute(CASES[case], 0, 1, None, place.device, place.dtype, mode)
    check(one, in_turns(CASES[case], place, mode), exact=place.dtype == torch.float32, case=case)


def run_processes(folder, place, modes, cases):
    """One rank, then two on the same GPU."""
    for ranks in (1, 2):
        dtype = str(place.dtype).removeprefix("torch.")
        arguments = [str(ranks), str(folder), place.device, dtype, ";".join(modes), ";".join(cases)]
        running = [subprocess.Popen([sys.executable, str(SCRIPT), str(rank), *arguments]) for rank in range(ranks)]
        assert [process.wait(timeout=560) for process in running] == [0] * ranks


@pytest.mark.parametrize("cases", [CASES, LARGE], ids=["small", "large"])
def test_two_processes_give_the_tokens_of_one(place, cases, tmp_path):
    if place.device == "cpu":
        pytest.skip("no GPU here: the ranks take turns in one process, above")
    run_processes(tmp_path, place, MODES, cases)
    for case in cases:
        for mode in MODES:
            one = np.load(tmp_path / f"{case} {mode}.0of1.npz")
            two = [np.load(tmp_path / f"{case} {mode}.{rank}of2.npz") for rank in range(2)]
            check(one, two, exact=place.dtype == torch.float32, case=case)


@pytest.mark.timeout(560)
@pytest.mark.parametrize("case", WHOLE)
def test_two_processes_of_a_whole_model_decode_the_tokens_of_one(place, case, tmp_path):
    """Errors of 32 layers add up: the logits are a hundred times as far apart as those of two layers may be."""
    if place.device == "cpu" or place.dtype != torch.float32:
        pytest.skip("on a GPU, in float32")
    run_processes(tmp_path, place, MODES[1:], [case])
    one = np.load(tmp_path / f"{case} {MODES[1]}.0of1.npz")
    two = [np.load(tmp_path / f"{case} {MODES[1]}.{rank}of2.npz") for rank in range(2)]
    print(f"{case}: {one['tokens'].tolist()}; largest difference {np.abs(one['logits'] - two[0]['logits']).max():.1e}")
    assert len(one["tokens"]) == 2 + 2 + WHOLE_DECODES - 1
    check(one, two, exact=True, case=case, tolerance=1e-3)
