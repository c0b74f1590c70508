"""A few hundred drawn requests against a real server. `python tests/chaos/chaos_fuzz.py` runs as many as one likes."""

from __future__ import annotations

import asyncio

from chaos_fuzz import bombard
from chaos_products import Products, memory_problems
from chaos_server import Server

REQUESTS = 200
PRODUCTS = 60


def test_no_request_surprises_the_server(alone: Server):
    before = {role: alone.process(role).pid for role in ("supervisor", "front", "engine", "worker")}
    statuses, problems = asyncio.run(bombard(alone.port, range(REQUESTS)))
    print(dict(statuses))
    assert not problems, "\n".join(problems)
    assert sum(statuses.values()) == REQUESTS
    assert statuses[200] > REQUESTS / 4, "the generator makes hardly anything good"
    assert statuses[400] > REQUESTS / 10, "the generator makes hardly anything bad"
    alone.wait_idle()
    assert {role: alone.process(role).pid for role in before} == before
    assert "Traceback" not in alone.errors


def test_no_product_of_sizes_and_counts_hurts_the_server(alone: Server):
    """1 MB of bad words in a list of 64 prompts once ended it."""
    before = {role: alone.process(role) for role in ("supervisor", "front", "engine", "worker")}
    statuses, problems = asyncio.run(bombard(alone.port, range(PRODUCTS), make=Products))
    print(dict(statuses), {role: f"{process.peak_mib:.0f} MiB" for role, process in before.items()})
    assert not problems, "\n".join(problems)
    assert statuses[200] > PRODUCTS / 10, "the generator makes hardly anything good"
    assert statuses[400] > PRODUCTS / 4, "the generator makes hardly anything too large"
    alone.wait_idle()
    assert all(alone.process(role).pid == process.pid for role, process in before.items())
    assert not memory_problems({role: process.peak_mib for role, process in before.items()})
    assert "Traceback" not in alone.errors
