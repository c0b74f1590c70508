"""Processes of one server are of one build. A package that is updated below a running server is found out, in words."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from engine_rig import Rig
from run_loop import finish

from baton import DISTRIBUTION
from baton.errors import EngineError
from baton.protocol.control import StartFailed
from baton.runtime.processes import build_info
from baton.runtime.processes.build_info import INSTALLED
from baton.runtime.processes.children import start_child
from baton.runtime.wire.channel import BlockingChannel

pytestmark = pytest.mark.usefixtures("child_path")

OLD = "0.0.1 0123456789ab"


@pytest.mark.parametrize("process", ["engine", "worker", "cache", "front", "router"])
def test_a_child_of_another_build_reports_both_and_ends(process: str, monkeypatch: pytest.MonkeyPatch):
    """Its settings are not read: those of another build have other fields."""
    monkeypatch.setattr(build_info, "INSTALLED", OLD)
    ours, theirs = socket.socketpair()
    child = start_child(f"baton.runtime.{process}", {"a setting of another build": 1}, {"control": theirs})
    with ours:
        message = BlockingChannel(ours).receive()
    assert child.wait(60) == 1
    assert isinstance(message, StartFailed)
    assert message.message == (
        f"the new {process} is of build {INSTALLED}, and the process that starts it of {OLD}: Baton was updated while the "
        "server was running; restart the whole server"
    )


def test_an_engine_whose_package_was_replaced_ends_with_the_reason_when_its_worker_is_lost(monkeypatch: pytest.MonkeyPatch):
    failed: list[BaseException | None] = []

    async def main() -> None:
        async with Rig(worker_restarts_max=1, restart_backoff_seconds_max=0.1) as rig:
            assert len(await rig.answer("a")) == 12, "children of the same build start"
            monkeypatch.setattr(build_info, "INSTALLED", OLD)  # this process is the engine
            assert rig.engine._worker is not None
            os.kill(rig.engine._worker.process.pid, signal.SIGKILL)
            rig.ask("b")
            await rig.until(lambda: rig.running.done() or "b" in rig.ended)
            failed.append(rig.running.exception() if rig.running.done() else EngineError(rig.ended["b"].detail))

    finish(main())
    assert "restart the whole server" in str(failed[0])


def test_the_build_of_a_checkout_is_its_version(monkeypatch: pytest.MonkeyPatch):
    """A commit during a run changes nothing: developers commit while servers run."""
    monkeypatch.setattr(build_info, "_noted_commit", lambda: "")
    assert build_info.installed_build() == build_info.__version__
    monkeypatch.setattr(build_info, "_noted_commit", lambda: "0123456789abcdef")
    assert build_info.installed_build() == f"{build_info.__version__} 0123456789ab"


def test_the_build_of_an_installation_from_git_is_the_commit_that_its_installer_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """PEP 610, as importlib.metadata finds it."""
    commit, notes = "0123456789abcdef0123456789abcdef01234567", tmp_path / "baton_serve-0.1.0.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text("Metadata-Version: 2.1\nName: baton-serve\nVersion: 0.1.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nothing"), str(tmp_path), *sys.path])
    assert build_info._installed_commit() == ""
    noted = json.dumps({"url": "https://example.org/baton", "vcs_info": {"vcs": "git", "commit_id": commit}})
    (notes / "direct_url.json").write_text(noted)
    assert build_info._installed_commit() == commit
    assert distribution(DISTRIBUTION).read_text("direct_url.json") == noted
