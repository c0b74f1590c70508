"""What `baton serve` says when it is ready, without a server."""

from __future__ import annotations

import pytest

from baton.cli.serve import ready_text
from baton.config import ServeConfig, TiersConfig
from baton.protocol.control import InstanceReady
from baton.runtime.engine import _resolved_tiers

ROW = {
    "role": "mixed", "processes": "worker, cache", "pool_created_by": "worker", "pool_attached_by": "transfer",
    "device": "cpu", "dtype": "float32", "kv_blocks_by": "kv_blocks", "kv_cache_dtype": "int8", "kv_pool_gib": 2.0,
}  # fmt: skip


def said(tiers: TiersConfig, **settings: object) -> list[str]:
    plan = {**ROW, **_resolved_tiers(tiers, tiers.machine(2**20), 2**20)}
    ready = InstanceReady(100, 16, 64, 258, 512, 512, plan=plan)
    return ready_text(ServeConfig(model="tiny", served_model_name=["tiny"], **settings), ready, 1.0).splitlines()


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        (TiersConfig(host_gib=2.0), "2.0 GiB of host memory (2,048 blocks); written through, preempted KV: host"),
        (
            TiersConfig(host_gib=1.0, storage="redis://user:secret@host:6379/0", write="back", preempted="drop"),
            "1.0 GiB of host memory (1,024 blocks) and redis://***@host:6379/0; written back, preempted KV: drop",
        ),
    ],
)
def test_lower_tiers_are_told_and_no_password_is(tiers: TiersConfig, words: str):
    assert [line.split(maxsplit=1)[1] for line in said(tiers) if line.startswith("  tiers")] == [words]


def test_without_lower_tiers_nothing_is_said_of_them():
    assert not [line for line in said(TiersConfig()) if "tiers" in line]


@pytest.mark.parametrize("there", [True, False])
def test_the_chat_page_is_named_if_there_is_one(there: bool):
    assert any("chat page" in line for line in said(TiersConfig(), chat_page=there)) is there
