"""A whole server, with tiers, that is killed: nothing is left behind, and the next one starts without any cleaning up."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from chaos_server import Server, until

BODY = {"prompt": "abcdefgh", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
ROLES = ("supervisor", "front", "templates", "engine", "worker", "cache")


def shared_memory_of(pid: int) -> set[int]:
    """Inodes of the anonymous memory that it has descriptors of: KV pools, host pool, progress word."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:" in os.readlink(fd):
                found.add(fd.stat().st_ino)
        except OSError:
            continue
    return found


def held_by_anybody(inodes: set[int]) -> list[int]:
    """Processes that still have one of them. Memory without a name lives exactly as long as somebody has it."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if _shared(pid) & inodes]


def _shared(pid: int) -> set[int]:
    try:
        return shared_memory_of(pid)
    except OSError:  # it is gone, or not ours
        return set()


def test_a_killed_start_and_killing_everything_leave_no_process_socket_or_segment(tiny: Path, tmp_path: Path):
    """Three times on the same port and the same storage, without cleaning up; in the last start the answer is the same."""
    tiers = {"kv_host_gib": 0.01, "kv_storage": f"file:{tmp_path / 'kv'}"}
    port = killed_start(tiny, tmp_path, "worker", "loading", tiers)
    with Server(tiny, tmp_path / "first", port=port, **tiers).wait_ready() as server:
        first = server.ask("/v1/completions", BODY).tokens
        plan = server.ask("/config").json["plan"]
        assert (plan["processes"], plan["pool_created_by"], plan["pool_attached_by"]) == ("worker, cache", "worker", "transfer")
        assert plan["preempted_kv"] == "storage", "the lowest tier there is"
        assert plan["kv_host_blocks"] > 0
        assert plan["kv_storage"] == tiers["kv_storage"]
        processes = [server.process(role) for role in ROLES]
        segments = set().union(*(shared_memory_of(process.pid) for process in processes))
        assert segments
        for process in processes:
            process.send(signal.SIGKILL)
        assert server.wait_ended() == -signal.SIGKILL
        server.require_all_gone()
        until(lambda: not held_by_anybody(segments), "no memory is left")
    with Server(tiny, tmp_path / "second", port=port, **tiers).wait_ready() as server:
        assert server.ask("/v1/completions", BODY).tokens == first
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait_ended() == 0
        assert "Traceback" not in server.errors


def killed_start(model: Path, folder: Path, role: str, phase: str, settings: dict[str, Any]) -> int:
    """The port of a server that was killed in that phase."""
    orders = {"gate": {"at": phase, "folder": str(folder)}}
    with Server(model, folder / "killed", orders=orders, **settings) as server:
        until((folder / "reached").exists, f"the worker is {phase}") if phase != "plan" else server.wait_ready()
        server.process(role).send(signal.SIGKILL)
        if role != "cache":
            assert server.wait_ended() != 0
            if role == "worker":
                assert "ERROR the worker process was killed by SIGKILL before it was ready" in server.errors
            server.require_all_gone()
        return server.port


PHASES: list[tuple[str, str]] = []
if os.environ.get("BATON_EVERY_PHASE"):
    roles = ("supervisor", "front", "engine", "worker")
    PHASES = [(role, phase) for role in roles for phase in ("start", "loading")] + [("cache", "plan")]


@pytest.mark.parametrize(("role", "phase"), PHASES)
def test_a_start_that_was_killed_is_followed_by_one_that_works(tiny: Path, tmp_path: Path, role: str, phase: str):
    settings = {"kv_host_gib": 0.01, "kv_storage": f"file:{tmp_path / 'kv'}"}
    port = killed_start(tiny, tmp_path, role, phase, settings)
    with Server(tiny, tmp_path / "again", port=port, **settings).wait_ready() as server:
        assert server.ask("/v1/completions", BODY).status == 200


def test_the_size_of_the_pool_is_measured_and_told(tiny: Path, tmp_path: Path):
    with Server(tiny, tmp_path, kv_blocks=None, memory_utilization=0.98).wait_ready() as server:
        plan = server.ask("/config").json["plan"]
        assert plan["kv_blocks_by"] == "gpu_memory_utilization"
        assert 0 < plan["memory_used_gib"] + plan["kv_pool_gib"] < 0.98 * plan["memory_gib"]
        assert server.ask("/v1/completions", BODY).status == 200


@pytest.mark.slow  # the message alone: tests/worker/test_profile.py
def test_no_block_fits(tiny: Path, tmp_path: Path):
    with Server(tiny, tmp_path, kv_blocks=None, memory_utilization=1e-6) as server:
        assert server.wait_ended() == 1
        assert "ERROR no KV block fits: gpu_memory_utilization 1e-06" in server.errors
        assert "--kv-blocks" in server.errors
        assert "Traceback" not in server.errors
