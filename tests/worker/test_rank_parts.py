"""What several ranks do not do, in words, and what they agree on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.config import WorkerConfig
from baton.errors import InvalidConfig
from baton.models.loaders.dummy import DummyWeights
from baton.models.open import OpenedEncoder, OpenedModel
from baton.models.shapes import SHAPES
from baton.native.build import NoCompiler
from baton.native.exchange import RankExchange
from baton.worker import build
from baton.worker.collective.opening import agreed_steps, exchanged_numbers, open_collective, part_of_rank
from baton.worker.identity import identity_of
from baton.worker.kv_layout import KVLayout

CONFIG = replace(SHAPES["qwen3-0.6b"], layers=2, vocab_size=1024)
OPENED = OpenedModel(Path(), CONFIG, DummyWeights(CONFIG), scoring="yes or no")
TWO = WorkerConfig(rank=1, ranks=2, device="cpu")


def test_one_rank_has_the_model_as_it_is():
    assert part_of_rank(OPENED, WorkerConfig()) is OPENED
    assert open_collective(WorkerConfig(), CONFIG, None) is None


def test_a_rank_has_its_part():
    part = part_of_rank(OPENED, TWO)
    assert (part.config.heads, part.config.kv_heads, part.config.vocab_size) == (8, 4, 1024)
    assert part.config.head_rows == range(512, 1024)
    assert part.scoring == OPENED.scoring


@pytest.mark.parametrize(
    ("opened", "change", "why"),
    [
        (OPENED, {"speculate": "ngram"}, "--speculate ngram is not supported with several ranks"),
        (OpenedEncoder(Path(), None, DummyWeights(CONFIG)), {}, "the model is an encoder"),  # type: ignore[arg-type]
        (OPENED, {"memory_utilization": 0.8}, "--gpu-memory-utilization .* give --kv-memory-gib, which they divide"),
        (OPENED, {"ranks": 3}, "16 query heads, which 3 ranks cannot share evenly"),
    ],
)
def test_what_several_ranks_do_not_do_is_refused(opened, change, why):
    with pytest.raises(InvalidConfig, match=f"--tensor-parallel-size {change.get('ranks', 2)}: .*{why}"):
        part_of_rank(opened, replace(TWO, **change))


def test_a_share_of_memory_is_for_gpus_of_their_own():
    """On a CPU each rank took what the whole machine had free."""
    part_of_rank(OPENED, replace(TWO, memory_utilization=0.8, blocks=8))
    part_of_rank(OPENED, replace(TWO, memory_utilization=0.8, device="cuda"))


def test_labels_need_a_tied_head_on_a_gpu():
    untied = replace(OPENED, config=replace(CONFIG, tied_embeddings=False))
    untied = replace(untied, weights=DummyWeights(untied.config))
    assert part_of_rank(untied, replace(TWO, device="cuda")).scoring == ""
    assert part_of_rank(OPENED, replace(TWO, device="cuda")).scoring == OPENED.scoring


def test_a_device_that_computes_with_one_rank_is_refused(monkeypatch):
    """Of another package, which has no load_part."""
    one_rank = SimpleNamespace(name="npu")
    monkeypatch.setattr(build, "choose", lambda config, path: (one_rank, config))
    monkeypatch.setattr(build, "resolve", Path)
    monkeypatch.setattr(build, "opened_as", lambda config, path: OPENED)
    monkeypatch.setattr(build, "open_collective", lambda *_: pytest.fail("ranks meet"))
    with pytest.raises(InvalidConfig, match="--tensor-parallel-size 2: --device npu computes with one rank"):
        build.build_worker(TWO, collective_fd=0)


class Smaller:
    """Another rank has less of everything."""

    rank, ranks = 0, 2

    def least(self, number: int) -> int:
        return min(number, 7)

    def start_is_over(self) -> None: ...

    def close(self) -> None: ...


def test_ranks_agree_on_the_smallest_steps():
    config, steps = agreed_steps(replace(TWO, slots=64, tokens_per_step=512), {"slots": 64}, Smaller())
    assert (config.slots, config.tokens_per_step, steps) == (7, 7, {"slots": 7})
    assert agreed_steps(TWO, {"slots": 64}, None) == (TWO, {"slots": 64})


def test_a_rank_waits_less_than_the_engine_does():
    """So the rank that waits names the one that hangs, before the engine ends the start."""
    fd = os.memfd_create("ranks")
    try:
        exchange = open_collective(replace(TWO, slots=8, tokens_per_step=16, start_seconds_max=80.0), CONFIG, fd)
    except NoCompiler as error:
        pytest.skip(str(error))
    finally:
        os.close(fd)
    assert isinstance(exchange, RankExchange)
    assert exchange.native.wait_most == 40e9, "a rank that hangs in the last phase is named, if loading took less than half"
    exchange.start_is_over()
    assert exchange.native.wait_most == 3600e9, "the engine ends steps"


def test_the_memory_holds_the_largest_exchange():
    settings = replace(TWO, slots=8, tokens_per_step=16)
    assert exchanged_numbers(settings, CONFIG) == 64 * 1024  # the tokens that balance int8 matrices
    assert exchanged_numbers(replace(settings, tokens_per_step=512), CONFIG) == 512 * 1024
    assert exchanged_numbers(settings, replace(CONFIG, vocab_size=1 << 17)) == 1 << 17


def test_the_number_of_ranks_is_part_of_the_identity_and_the_rank_is_not():
    layout = KVLayout(layers=2, kv_heads=4, head_dim=128, block_size=16, dtype="float32")
    settings = [WorkerConfig(rank=rank, ranks=ranks) for rank, ranks in ((0, 1), (0, 2), (1, 2))]
    one, first, second = (identity_of(OPENED, b"", each, layout, "").digest() for each in settings)
    assert first == second != one
