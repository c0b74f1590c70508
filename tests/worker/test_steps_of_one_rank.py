"""One rank costs nothing: its steps call nothing that is meant for several. Two ranks show that the calls would be counted."""

from __future__ import annotations

import os
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, get_args

import pytest
from test_model_runner import new, plan
from tiny_models import oracle_model

from baton.config import WorkerConfig
from baton.native.build import NoCompiler
from baton.native.library import load_best
from baton.protocol.progress import ProgressWord
from baton.protocol.step import StepDigest, StepResult
from baton.runtime.wire.channel import BlockingChannel
from baton.runtime.worker.step_loop import StepLoop
from baton.worker.build import BuiltWorker, build_worker
from calls_for_several import calls_for_several

Compute = Literal["native", "torch"]
STEPS = 6
PLANS = [plan(1, new=(new(0, range(5)), new(1, [7, 8], blocks=(3, 4))), run=[(0, 5), (1, 2)])]
PLANS += [plan(step, run=[(0, 1), (1, 1)]) for step in range(2, STEPS + 1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        load_best()
    except NoCompiler as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("model")
    oracle_model("llama").save_pretrained(folder)
    return folder


def ranks_of(model: Path, compute: Compute, count: int) -> list[BuiltWorker]:
    """The ranks of a worker, each built in a thread: they meet while they load."""
    settings = {"model": str(model), "device": "cpu", "compute": compute, "quantization": "none", "kv_dtype": "float32"}
    configs = [
        WorkerConfig(**settings, ranks=count, rank=rank, blocks=16, block_size=4, slots=4, threads=1) for rank in range(count)
    ]
    fd = os.memfd_create("ranks")
    try:
        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(lambda config: build_worker(config, collective_fd=fd), configs))
    finally:
        os.close(fd)


def run_steps(built: BuiltWorker, rank: int) -> tuple[list[StepResult | StepDigest], Counter[str]]:
    """Answers to PLANS, and the calls that are meant for several ranks."""
    ours, theirs = socket.socketpair()
    engine = BlockingChannel(ours)
    for each in PLANS:
        engine.send(each)
    ours.shutdown(socket.SHUT_WR)
    with calls_for_several() as calls:
        StepLoop(built.runner, BlockingChannel(theirs), ProgressWord.create(), rank).run()
    theirs.close()
    answers = [engine.receive() for _ in PLANS]
    ours.close()
    return answers, calls


@pytest.mark.parametrize("compute", get_args(Compute))
def test_a_step_of_one_rank_calls_nothing_that_is_meant_for_several(model: Path, compute: Compute):
    (built,) = ranks_of(model, compute, 1)
    answers, calls = run_steps(built, 0)
    assert [type(answer) for answer in answers] == [StepResult] * STEPS
    assert calls == {}
    assert built.runner.grammars.timed
    if compute == "native":
        decoder = built.runner.executor.forward._decoder  # the library exchanges where it has a pointer to the other ranks
        assert not decoder._model.exchange
    built.runner.close()


@pytest.mark.parametrize("compute", get_args(Compute))
def test_calls_of_two_ranks_are_counted(model: Path, compute: Compute):
    ranks = ranks_of(model, compute, 2)
    with ThreadPoolExecutor(2) as threads:
        (results, first), (digests, second) = threads.map(run_steps, ranks, range(2))
    assert [type(answer) for answer in results + digests] == [StepResult] * STEPS + [StepDigest] * STEPS
    assert second.pop("digest_of") == STEPS
    assert first == second
    assert not any(built.runner.grammars.timed for built in ranks), "each rank would spend a budget of time differently"
    if compute == "native":
        assert all(built.runner.executor.forward._decoder._model.exchange for built in ranks)
    else:
        sums = 2 * ranks[0].runner.executor.config.layers * STEPS
        assert first["RankExchange.sum"] == first["HostTensors.sum"] == first["_summed"] == sums
        assert first["RankExchange.gather"] == first["gather_logits"] == STEPS
    for built in ranks:
        built.runner.close()
