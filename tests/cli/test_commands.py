"""`baton --version`, `list`, `ps`, and `up` without a word: what people of other servers type first."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from command_rig import BATON, ENVIRONMENT, baton, baton_here, serving

from baton.cli.ps import duration_text
from baton.runtime.processes.build_info import _built_commit

SMALL = ("--kv-memory-gib", "0.05", "--threads", "1")


def test_version_names_the_commit_and_no_path():
    for arguments in (["--version"], ["version"]):
        ran = baton(*arguments)
        assert ran.returncode == 0, ran.stderr
        assert re.fullmatch(r"baton \d\S+( \(commit [0-9a-f]{12}\))?\n", ran.stdout)


def test_a_build_may_note_its_commit(tmp_path):
    file = tmp_path / "_commit.txt"
    assert _built_commit(file) == ""
    for text, found in (("0123456789abcdef\n", "0123456789abcdef"), ("/home/somebody\n", ""), ("", "")):
        file.write_text(text)
        assert _built_commit(file) == found


def test_list_shows_what_is_here_and_what_can_be_served(tmp_path):
    for repo, architecture in (("own--good", "LlamaForCausalLM"), ("own--other", "Gemma2ForCausalLM")):
        snapshot = tmp_path / "hub" / f"models--{repo}" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        (snapshot / "model.safetensors").write_bytes(b"12345678")
    ran = baton("list", XDG_CACHE_HOME=str(tmp_path), HF_HOME=str(tmp_path), HF_HUB_CACHE="")
    assert ran.returncode == 0, ran.stderr
    header, *rows = ran.stdout.splitlines()
    assert header.split() == ["NAME", "SIZE", "SERVE", "IT", "WITH"]
    smollm2, good, other = (next(row for row in rows if row.startswith(name)) for name in ("smollm2", "own/good", "own/other"))
    assert "baton serve smollm2   (downloads it first)" in smollm2
    assert good.rstrip().endswith("baton serve own/good@abc")
    assert "no: architecture Gemma2ForCausalLM is not supported" in other


def test_ps_asks_a_running_server(tiny_model):
    with serving(tiny_model, *SMALL, "--served-model-name", "tiny") as server:
        ran = baton("ps", "--url", server.url)
        assert ran.returncode == 0, ran.stderr
        header, row = ran.stdout.splitlines()
        assert header.split() == ["MODEL", "INSTANCES", "RUNNING", "WAITING", "KV", "USED", "UPTIME", "URL"]
        assert re.fullmatch(rf"tiny +1 +0 +0 +0% +\d+ (s|min) +{server.url} *", row)
        found = json.loads(baton_here("ps", "--url", f"{server.url}/v1", "--json").stdout)
        assert (found["models"], found["instances"], found["running"], found["waiting"]) == (["tiny"], 1, 0, 0)


@pytest.mark.slow
def test_ps_shows_what_it_may_see(tiny_model):
    with serving(tiny_model, *SMALL, "--served-model-name", "tiny", "--api-key", "plain", "--admin-api-key", "admin") as server:
        ran = baton_here("ps", "--url", server.url, "--api-key", "plain")
        assert ran.returncode == 0, ran.stderr
        assert re.match(r"tiny +- +- +- +- +\d+ (s|min)", ran.stdout.splitlines()[1])
        assert "admin key" in ran.stderr
        assert json.loads(baton_here("ps", "--url", server.url, "--api-key", "admin", "--json").stdout)["running"] == 0
        assert "401" in baton_here("ps", "--url", server.url).stderr


def test_up_without_a_word_starts_two_instances_and_ps_sees_them(tiny_model):
    process = subprocess.Popen(
        [*BATON, "up", tiny_model, "--port", "0", "--device", "cpu", *SMALL],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    try:
        lines: list[str] = []
        while not any("Ctrl-C" in line for line in lines):
            lines.append(process.stdout.readline())
            assert lines[-1], process.communicate()[1]
        assert any("mixed-0, mixed-1" in line for line in lines)
        url = next(line.split()[-1] for line in lines if "chat page" in line).rstrip("/")
        found = json.loads(baton("ps", "--url", url, "--json").stdout)
        assert (found["instances"], found["running"], found["kv_used"]) == (2, 0, 0.0)
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_ps_without_a_server_says_what_to_do():
    ran = baton_here("ps", "--url", "http://127.0.0.1:9")
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
    assert "no server answers at http://127.0.0.1:9" in ran.stderr
    assert "start one with `baton serve`, or give --url" in ran.stderr


def test_durations():
    seconds = (None, 5.9, 60, 3600 + 120, 50 * 3600)
    assert [duration_text(each) for each in seconds] == ["-", "5 s", "1 min", "1 h 2 min", "2 days"]
