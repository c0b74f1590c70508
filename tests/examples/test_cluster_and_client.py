"""examples/two_machines on one machine, and examples/client_with_tools against it: the scripts as they are, real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from example_package import EXAMPLES
from redis_server import free_port

from baton.errors import ModelNotFound
from baton.models.names import resolve

START_SECONDS = 180


@contextmanager
def script(name: str, folder: Path, environment: dict[str, str]):
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            ["sh", str(EXAMPLES / "two_machines" / name)],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.mark.slow
def test_a_client_with_tools_asks_a_cluster_of_two(tmp_path):
    pytest.importorskip("openai", reason="the client is OpenAI's")
    try:
        resolve("smollm2")
    except ModelNotFound as error:
        pytest.skip(str(error))
    ports = {name: str(free_port()) for name in ("PORT", "CLUSTER_PORT")}
    own = [{"OWN_PORT": str(free_port())} for _ in range(2)]
    command = tmp_path / "bin" / "baton"  # of this very checkout
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from baton.cli.main import app; app()" "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(command.parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, **ports}
    url = f"http://127.0.0.1:{ports['PORT']}"
    with script("machine_a.sh", tmp_path, environment | own[0]) as first:
        give_up = time.monotonic() + START_SECONDS
        while not (tmp_path / "cluster.secret").exists():
            assert time.monotonic() < give_up
            time.sleep(0.1)
        with script("machine_b.sh", tmp_path, environment | own[1]) as second:
            own_url = f"http://127.0.0.1:{own[1]['OWN_PORT']}"
            while not (is_ready(url) and is_ready(own_url)):
                logs = "".join(log.read_text(errors="replace")[-2000:] for log in tmp_path.glob("*.log"))
                assert first.poll() is None is second.poll(), logs
                assert time.monotonic() < give_up, logs
                time.sleep(0.2)
            client = [sys.executable, str(EXAMPLES / "client_with_tools" / "client.py"), "--url", f"{url}/v1"]
            ran = subprocess.run(client, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.startswith("called weather({'city': ")
    assert len(ran.stdout.splitlines()) >= 2, "and the model answered"
