"""Processes as the kernel tells of them, and the light HTTP client against a server of a few lines."""

import asyncio
import os
import subprocess
import sys

import pytest

from measuring.client import Load, load_bodies, request_bytes
from measuring.figures import NotMeasured
from measuring.machine import CORES, TICKS, Disturbance, Reading, Stat, busy_seconds, memory_mib, stat_of, tree
from measuring.processes import Driver, busy_neighbour

ECHO = """
import json, sys
print(json.dumps({"ready": "echo"}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    print("noise", flush=True)
    print(json.dumps({"tokens": order["output"]}), flush=True)
"""


def test_stat_is_read_from_behind_the_name():
    fields = " ".join(["S", "7", *["0"] * 9, "100", "50", "25", "25", *["0"] * 5])
    assert stat_of(f"12 (a name) with (brackets)) {fields}") == Stat(7, 200 / TICKS)


def test_a_tree_is_all_below_its_roots():
    stats = {1: Stat(0, 0.0), 2: Stat(1, 0.0), 3: Stat(2, 0.0), 4: Stat(1, 0.0), 9: Stat(0, 0.0)}
    assert tree([2], stats) == {2, 3}
    assert tree([1], stats) == {1, 2, 3, 4}


def test_foreign_time_is_what_neither_engine_nor_bench_used():
    early = Reading(at=0.0, waited=0.0, busy=100.0, ours=10.0)
    late = Reading(at=10.0, waited=1.0, busy=120.0, ours=25.0)
    found = Disturbance.between(early, late, cores=2)
    assert found.pressure == pytest.approx(0.1)
    assert found.foreign == pytest.approx(0.25)
    assert not found.quiet


def test_idle_and_waiting_for_the_disk_are_not_busy():
    assert busy_seconds(f"cpu {TICKS} 0 {TICKS} 999 999 0 0 {TICKS} 0 0\ncpu0 1") == 3.0


def test_memory_of_this_process():
    assert 5 < memory_mib(os.getpid()) < 10_000
    assert CORES >= 1


def test_a_driver_answers_in_turns_and_ends(tmp_path):
    with (tmp_path / "log").open("w") as log:
        driver = Driver([sys.executable, "-c", ECHO], log, {})
        assert driver.wait_ready() == {"ready": "echo"}
        driver.pause()
        with driver.turn():
            assert driver.generate([[1, 2]], 3)["tokens"] == 3
            with pytest.raises(NotMeasured, match="3 tokens where 6"):
                driver.generate([[1], [2]], 3)
        driver.stop()
        assert driver.popen.returncode == 0
        with pytest.raises(NotMeasured, match="ended"):
            Driver([sys.executable, "-c", "raise SystemExit(3)"], log, {}).wait_ready()


def test_a_neighbour_is_busy_and_goes_away():
    with busy_neighbour() as pid:
        assert subprocess.run(["kill", "-0", str(pid)], check=False).returncode == 0
    assert subprocess.run(["kill", "-0", str(pid)], check=False, capture_output=True).returncode != 0


# The client


async def _serve_and_load(pieces, bodies, clients):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        return await asyncio.to_thread(load_bodies, server.sockets[0].getsockname()[1], bodies, 2, clients)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
TEXT = b'data: {"choices":[{"text":"a"}]}\n\n'
EMPTY = b'data: {"choices":[{"text":""}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


def load(*pieces):
    return asyncio.run(_serve_and_load(pieces, [request_bytes(1, "m", [1], 2)] * 3, 2))


def test_a_load_counts_tokens_and_gaps():
    found = load(HEAD, TEXT[:9], TEXT[9:], EMPTY, TEXT, USAGE, DONE)
    assert isinstance(found, Load)
    assert found.output_rate == pytest.approx(6 / found.seconds)
    assert found.ttft_mean >= 5
    assert found.itl_p99 >= 5


def test_the_end_of_the_last_line_is_not_waited_for():
    assert load(HEAD, TEXT, TEXT, USAGE, DONE[:-2], DONE[-2:]).output_rate > 0


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([b"HTTP/1.1 429 Too Many\r\n\r\nwait"], "429"),
        ([HEAD, TEXT, DONE], "0 tokens where 2"),
        ([HEAD, TEXT], "before the answer did"),
        ([HEAD, b'data: {"error": {"message": "lost"}}\n\n'], "lost"),
    ],
)
def test_less_than_the_whole_answer_is_no_figure(pieces, why):
    with pytest.raises(NotMeasured, match=why):
        load(*pieces)
