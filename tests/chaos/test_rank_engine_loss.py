"""The engine above a set of ranks is killed: none of its ranks and no directory is left, and every open answer continues on
another engine and another set, with the tokens of an undisturbed run, once."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_server import Server, until
from test_engine_loss import BODIES, choices, completion_tokens, lost_in_mid_stream
from test_rank_kills import RANKS, ranks_of


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the servers of a test make their directories. Its path is short, as those of sockets must be."""
    with tempfile.TemporaryDirectory() as made:
        monkeypatch.setenv("TMPDIR", made)
        yield Path(made)
        assert os.listdir(made) == [], "directories are left"


@pytest.mark.parametrize(
    "names",
    [pytest.param(("greedy", "whole"), id="two kinds"), pytest.param(tuple(BODIES), marks=pytest.mark.slow, id="all kinds")],
)
def test_every_open_answer_goes_on_with_another_engine_and_set_of_ranks(
    tiny: Path, tmp_path: Path, temporary: Path, names: tuple[str, ...]
):
    bodies = {name: BODIES[name] for name in names}
    with Server(tiny, tmp_path, orders={"delay": [1, 0.03]}, slots=16, **RANKS).wait_ready() as server:
        alone = {name: server.ask("/v1/completions", body) for name, body in bodies.items()}
        ranks = ranks_of(server, "worker")
        replies = lost_in_mid_stream(server, bodies, after=12)
        for name, reply in replies.items():
            assert choices(reply) == choices(alone[name]), name
            assert completion_tokens(reply) == completion_tokens(alone[name]), name
        until(lambda: not any(rank.alive for rank in ranks), "no rank of the killed engine is left")
        assert {rank.pid for rank in ranks_of(server, "worker")}.isdisjoint(rank.pid for rank in ranks)
        server.wait_idle()
        assert len(os.listdir(temporary)) == 1, "the directory of the killed engine's ranks is removed"
        assert "Traceback" not in server.errors
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait_ended() == 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stopped_while_nothing_ran_is_replaced(tiny: Path, tmp_path: Path, temporary: Path, rank: int):
    """By the deadline of the next step, or by the ping that it does not answer."""
    with Server(tiny, tmp_path, step_seconds_max=2.0, **RANKS).wait_ready() as server:
        alone = server.ask("/v1/completions", BODIES["greedy"])
        ranks = ranks_of(server, "worker")
        ranks[rank].send(signal.SIGSTOP)
        assert choices(server.ask("/v1/completions", BODIES["greedy"])) == choices(alone)
        until(lambda: not any(rank.alive for rank in ranks), "no rank of the former set is left")
        server.wait_idle()
        assert "Traceback" not in server.errors
        server.popen.send_signal(signal.SIGTERM)  # once: a second one leaves the directory to the next server
        assert server.wait_ended() == 0
