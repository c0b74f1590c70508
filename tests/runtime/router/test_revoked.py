"""An instance that the secret file revokes leaves the router, whenever the file says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

from certificates import keyring, write_secret
from cluster_rig import Cluster
from run_loop import finish

from baton.protocol.instance import InstanceRefused

KEY = "k" * 40


def test_an_open_session_ends_with_the_reason_and_the_others_stay(tmp_path: Path):
    credentials = keyring(tmp_path, KEY)

    async def main() -> None:
        async with Cluster(credentials=credentials, beat_seconds=0.05) as cluster:
            one, other = await cluster.instance("one"), await cluster.instance("other")
            write_secret(tmp_path / "secret", KEY, "revoked one")
            refused = await one.heard(InstanceRefused)
            assert refused.reason == "one is revoked (in the cluster's secret file)"
            assert one.serving is not None
            await asyncio.wait_for(one.serving, 20)
            assert [instance.hello.name for instance in cluster.client.sessions] == ["other"]
            assert other.serving is not None
            assert not other.serving.done()

    finish(main())


def test_a_hello_of_a_revoked_name_is_refused_until_the_line_is_gone(tmp_path: Path, caplog):
    credentials = keyring(tmp_path, KEY, "revoked one")

    async def main() -> None:
        async with Cluster(credentials=credentials) as cluster:
            refused = await cluster.refused(await cluster.connect("one"))
            assert "one is revoked" in refused.reason
            assert cluster.client.sessions == []
            write_secret(tmp_path / "secret", KEY)
            await cluster.instance("one")

    finish(main())
    assert "instance one is refused: one is revoked" in caplog.text
