"""Secrets are rotated, and instances revoked, by changing the file; a file that cannot be used changes nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from certificates import Certificates, keyring, write_secret
from run_loop import finish

from baton.errors import InvalidConfig, LinkFailed
from baton.trust import keyring as keyring_module
from baton.trust.handshake import LINK, READ, Purpose
from baton.trust.keyring import Keyring
from baton.trust.secret import Secret, parse_secrets
from baton.trust.session import prove_as_dialler, prove_as_listener
from baton.trust.stream import SocketStream

OLD, NEW, OTHER = ("o" * 40, "n" * 40, "x" * 40)


def keys(credentials: Keyring) -> list[str]:
    return [secret.key.decode() for secret in credentials.secrets()]


def test_lines_are_secrets_revoked_names_and_comments():
    read = parse_secrets(f"# of 2026\n{OLD}\n\n  {NEW}  \r\nrevoked decode-3\nrevoked gpu-box.example".encode())
    assert [secret.key.decode() for secret in read.secrets] == [OLD, NEW]
    assert read.revoked == {"decode-3", "gpu-box.example"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no secret; 32 to 4096 are wanted, one secret per line"),
        ("# nothing\n\n", "holds no secret"),
        ("revoked one\n", "holds no secret"),
        (f"{OLD}\n{NEW[:20]}\n", "line 2 holds 20 bytes; 32 to 4096 are wanted"),
        (f"{OLD}\nrevoked\n", "line 2 revokes 0 names; write one per line: revoked NAME"),
        (f"{OLD}\nrevoked one, two\n", "line 2 revokes 2 names"),
        ("x" * 300_000, "holds more than 262144 bytes"),
    ],
)
def test_a_file_that_is_empty_or_truncated_is_refused_in_words(tmp_path: Path, content: str, words: str):
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(InvalidConfig) as refused:
        Keyring(str(path))
    assert f"cluster secret {path}: {words}" in str(refused.value)
    assert not any(secret in str(refused.value) for secret in (OLD, NEW))


def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    credentials = keyring(tmp_path, OLD)
    assert keys(credentials) == [OLD]
    write_secret(tmp_path / "secret", NEW, OLD, "revoked d0")
    assert keys(credentials) == [NEW, OLD]
    assert credentials.revoked(["d0"]) == "d0 is revoked (in the cluster's secret file)"
    assert not credentials.revoked(["d1", ""])
    (tmp_path / "secret").write_text(f"{OLD}\n")  # in place, perhaps within one tick of the file system's clock
    (tmp_path / "secret").write_text(f"{NEW}\n")
    assert keys(credentials) == [NEW]
    assert "changed, and read again" in caplog.text
    assert not any(secret in caplog.text for secret in (OLD, NEW))


def test_an_older_read_of_another_thread_replaces_no_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A slow reader has read the file before a revocation, and stores what it has read after a fast one has seen it."""
    monkeypatch.setattr(keyring_module, "SETTLED_SECONDS", -1.0)
    path = tmp_path / "names"
    path.write_text("a")
    has_read, may_store = threading.Event(), threading.Event()

    def read() -> str:
        content = path.read_text()
        if threading.current_thread() is slow:
            has_read.set()
            may_store.wait(60)
        return content

    slow = threading.Thread(target=lambda: values.current())
    values = keyring_module.Reloaded("names", (str(path),), read)

    def between(*_: object) -> None:
        if threading.current_thread() is not slow:
            may_store.set()
            slow.join(60)

    monkeypatch.setattr(keyring_module.logger, "info", between)  # after the read, before it is known
    path.write_text("a older")
    slow.start()
    has_read.wait(60)
    path.write_text("a newer one")
    assert values.current() == "a newer one"
    assert values.current() == "a newer one"


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    credentials = keyring(tmp_path, OLD)
    os.utime(tmp_path / "secret", (1, 1))
    monkeypatch.setattr("baton.trust.keyring.SETTLED_SECONDS", -1.0)
    assert keys(credentials) == [OLD]
    monkeypatch.setattr("baton.trust.keyring.read_secrets", lambda path: pytest.fail("it is read again"))
    assert keys(credentials) == [OLD]


@pytest.mark.parametrize("fault", ["empty", "truncated", "readable", "missing", "folder"])
def test_a_change_that_cannot_be_used_is_logged_once_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
):
    credentials, path = keyring(tmp_path, OLD, "revoked d0"), tmp_path / "secret"
    match fault:
        case "empty" | "truncated":
            path.write_text("" if fault == "empty" else OLD[:10])
        case "readable":
            path.chmod(0o644)
        case _:
            path.unlink()
            if fault == "folder":
                path.mkdir()
    for _ in range(3):
        assert keys(credentials) == [OLD]
        assert credentials.revoked(["d0"])
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 1
    assert logged[0].startswith(f"cluster secret {path}: ")
    assert logged[0].endswith("what was read before stays in use")
    if fault == "folder":
        path.rmdir()
    write_secret(path, NEW)
    assert keys(credentials) == [NEW]


async def proved(purpose: Purpose, listener: list[Secret], dialler: list[Secret]) -> None:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    with ours, theirs:
        async with asyncio.timeout(20):
            one, other = await asyncio.gather(
                prove_as_listener(SocketStream(ours), listener, purpose),
                prove_as_dialler(SocketStream(theirs), dialler, purpose),
            )
    assert one == other


@pytest.mark.parametrize("purpose", [LINK, READ], ids=["router and instance", "transfer"])
def test_every_step_of_a_rotation_lets_every_pair_prove_itself(purpose: Purpose):
    """Files are replaced one after the other: neighbouring steps are in use at the same time."""
    steps = [[OLD], [OLD, NEW], [NEW, OLD], [NEW]]
    secrets = [[Secret(key.encode()) for key in step] for step in steps]
    for before, after in pairwise(secrets):
        for listener, dialler in ((before, after), (after, before), (after, after)):
            finish(proved(purpose, listener, dialler))


def test_a_secret_that_was_removed_proves_nothing():
    async def main() -> None:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        dialling = asyncio.create_task(prove_as_dialler(SocketStream(theirs), [Secret(OLD.encode())], LINK))
        with pytest.raises(LinkFailed, match="the instance does not know any of our 2 cluster secrets") as failed:
            await prove_as_listener(SocketStream(ours), [Secret(NEW.encode()), Secret(OTHER.encode())], LINK)
        assert failed.value.reason == "secret"
        ours.close()
        with pytest.raises(LinkFailed, match="does it have another cluster secret"):
            await dialling
        theirs.close()

    finish(main())


def test_a_renewed_certificate_is_read_again_and_a_broken_one_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    made = Certificates(tmp_path)
    files = made.files("one")
    credentials = keyring(tmp_path, OLD, tls=files)
    first = credentials.tls()
    assert first is not None
    made.files("one")
    second = credentials.tls()
    assert second is not first
    Path(files.certfile).write_text("nothing")
    assert credentials.tls() is not None
    assert f"--cluster-ssl-certfile {files.certfile} and --cluster-ssl-keyfile {files.keyfile}: cannot be used" in caplog.text
    with pytest.raises(InvalidConfig, match="--cluster-ssl-certfile"):
        keyring(tmp_path, OLD, tls=files)
    with pytest.raises(InvalidConfig, match=r"--cluster-ssl-ca-certs .*nothing.pem: cannot be used \(No such file"):
        keyring(tmp_path, OLD, tls=made.files("one")._replace(ca_certs=str(tmp_path / "nothing.pem")))
