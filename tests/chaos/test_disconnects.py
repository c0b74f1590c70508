"""Clients that leave: at any moment, in any way, hundreds of times (make chaos: a thousand). Nothing of theirs may stay."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
from pathlib import Path
from typing import Any

from chaos_server import Server, request_bytes

REQUESTS = 1000 if os.environ.get("BATON_SLOW") else 300
CONCURRENT = 24
ROLES = ("supervisor", "front", "engine", "worker")


def body(dice: random.Random) -> dict[str, Any]:
    return {
        "prompt": "x" * dice.randint(1, 60),
        "max_tokens": dice.randint(1, 120),
        "n": dice.choice((1, 1, 2)),
        "temperature": 1.0,
        "seed": dice.randrange(99),
        "ignore_eos": True,
        "stream": dice.random() < 0.6,
    }


async def leave(port: int, dice: random.Random) -> str:
    """One client that leaves somewhere between its first byte and its last. Says where."""
    content = request_bytes("/v1/completions", body(dice))
    head = content.index(b"\r\n\r\n") + 4
    moment = dice.choice(("in the headers", "before the body", "in the body", "after the body", "in the answer", "at the end"))
    cut = {"in the headers": dice.randrange(head), "before the body": head, "in the body": dice.randrange(head, len(content))}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content[: cut.get(moment, len(content))])
        await writer.drain()
        if moment == "in the answer":
            for _ in range(dice.randint(1, 12)):
                await asyncio.wait_for(reader.read(64), 60)
        elif moment == "at the end":
            while await asyncio.wait_for(reader.read(1 << 16), 60):
                pass
        elif dice.random() < 0.5:
            await asyncio.sleep(dice.random() * 0.05)
    except ConnectionError:
        pass
    finally:
        if dice.random() < 0.5:  # without a word: the other side gets a reset
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
    return moment


async def crowd(port: int, count: int, seed: int) -> dict[str, int]:
    seats = asyncio.Semaphore(CONCURRENT)
    moments: dict[str, int] = {}

    async def one(number: int) -> None:
        async with seats:
            moment = await leave(port, random.Random(f"{seed} {number}"))
            moments[moment] = moments.get(moment, 0) + 1

    await asyncio.gather(*(one(number) for number in range(count)))
    return moments


def test_clients_that_leave_hold_nothing(tiny: Path, tmp_path: Path):
    with Server(tiny, tmp_path, kv_blocks=120, slots=8).wait_ready() as server:
        asyncio.run(crowd(server.port, REQUESTS // 3, seed=1))
        server.wait_idle()
        processes = {role: server.process(role) for role in ROLES}
        before = {role: (process.fds, process.threads, process.rss_mib) for role, process in processes.items()}
        moments = asyncio.run(crowd(server.port, REQUESTS, seed=2))
        numbers = server.wait_idle()
        after = {role: (process.fds, process.threads, process.rss_mib) for role, process in processes.items()}
        print(f"{moments}\nbefore {before}\nafter  {after}")
        assert all(server.process(role).pid == processes[role].pid for role in ROLES), "somebody died"
        assert numbers["baton:worker_losses_total"] == 0
        assert numbers['baton:answers_broken_total{how="disconnected"}'] > REQUESTS / 10
        for role in ROLES:
            assert after[role][0] <= before[role][0] + 2, f"{role} keeps file descriptors"  # a connection being closed now
            assert after[role][1] <= before[role][1], f"{role} keeps threads"
            assert after[role][2] <= before[role][2] + 12.0, f"{role} keeps memory"
        reply = server.ask("/v1/completions", {"prompt": "still here?", "max_tokens": 4, "temperature": 0})
        assert reply.status == 200
