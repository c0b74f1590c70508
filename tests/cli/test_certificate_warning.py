"""A certificate that clients refuse, or soon will, is said at the start; the server starts all the same."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from command_rig import baton_here, serving

from baton.api.http.certificate_dates import certificate_warning

if shutil.which("openssl") is None:
    pytest.skip("openssl makes the certificates of these tests", allow_module_level=True)

BEGIN, END = datetime(2026, 1, 1, 12, tzinfo=UTC), datetime(2060, 2, 1, 12, tzinfo=UTC)
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
CA_CONFIG = """[ca]
default_ca = ours
[ours]
database = index.txt
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = any
[any]
commonName = supplied
"""


def openssl(folder: Path, *arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30, cwd=folder)


def certificate(folder: Path, name: str, begin: datetime, end: datetime) -> Path:
    """NAME.pem, with its key in NAME.key. Signed by itself, and no authority."""
    (folder / "index.txt").write_text("")
    (folder / "ca.cnf").write_text(CA_CONFIG)
    openssl(folder, "req", "-new", *KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
    dates = ("-startdate", f"{begin:%Y%m%d%H%M%SZ}", "-enddate", f"{end:%Y%m%d%H%M%SZ}")
    made = ("-selfsign", "-keyfile", f"{name}.key", "-in", f"{name}.csr", "-out", f"{name}.pem")
    openssl(folder, "ca", "-batch", "-config", "ca.cnf", "-notext", *made, *dates)
    return folder / f"{name}.pem"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """long.pem: BEGIN to END. old.pem: over for years."""
    folder = tmp_path_factory.mktemp("certificates")
    certificate(folder, "long", BEGIN, END)
    certificate(folder, "old", datetime(1990, 5, 4, tzinfo=UTC), datetime(2020, 5, 4, 3, 2, 1, tzinfo=UTC))
    return folder


@pytest.mark.parametrize(
    ("now", "words", "refused"),
    [
        (BEGIN - timedelta(seconds=1), "is NOT YET VALID, only from 2026-01-01 12:00 UTC on", True),
        (END + timedelta(seconds=1), "EXPIRED on 2060-02-01 12:00 UTC", True),
        (END - timedelta(days=13, hours=23), "ends on 2060-02-01 12:00 UTC, in 13 days", False),
        (END - timedelta(hours=5), "ends on 2060-02-01 12:00 UTC, in less than a day", False),
    ],
)
def test_what_is_said_names_the_file_and_the_date(folder: Path, now: datetime, words: str, refused: bool):
    warned = certificate_warning(str(folder / "long.pem"), now)
    assert warned is not None
    assert words in warned.text
    assert f"--ssl-certfile {folder / 'long.pem'}" in warned.text
    assert "\n" not in warned.text
    assert warned.refused is refused


@pytest.mark.parametrize("now", [BEGIN, BEGIN + timedelta(days=400), END - timedelta(days=14)])
def test_a_good_certificate_is_not_spoken_of(folder: Path, now: datetime):
    assert certificate_warning(str(folder / "long.pem"), now) is None


def test_the_one_of_a_chain_that_is_over_is_named(folder: Path):
    chain = folder / "chain.pem"
    parts = ("long.key", "long.pem", "old.pem")
    chain.write_text(
        "a comment, with a byte that is no ASCII: \u00fc\n" + "".join((folder / part).read_text() for part in parts)
    )
    warned = certificate_warning(str(chain), END - timedelta(days=1))
    assert warned is not None
    assert "certificate 2 of 2 EXPIRED on 2020-05-04 03:02 UTC" in warned.text


@pytest.mark.parametrize(
    "content",
    ["", "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n", "-----BEGIN CERTIFICATE-----\n!\n-----END"],
)
def test_what_cannot_be_read_is_left_to_openssl(tmp_path: Path, content: str):
    (tmp_path / "x.pem").write_text(content)
    assert certificate_warning(str(tmp_path / "x.pem"), BEGIN) is None
    assert certificate_warning(str(tmp_path / "not-there.pem"), BEGIN) is None


def with_certificate(folder: Path, name: str) -> tuple[str | Path, ...]:
    return ("--ssl-certfile", folder / f"{name}.pem", "--ssl-keyfile", folder / f"{name}.key")


@pytest.mark.parametrize("command", ["serve", "router", "up"])
def test_each_command_says_it_in_one_line_before_anything_is_loaded(folder: Path, tmp_path: Path, command: str):
    (tmp_path / "secret").write_text("0123456789abcdef" * 4)
    (tmp_path / "secret").chmod(0o600)
    more = {"router": ("--cluster-secret", tmp_path / "secret"), "up": ("--mixed", "1")}.get(command, ())
    ran = baton_here(command, tmp_path / "no-model", "--port", "0", "--quiet", *more, *with_certificate(folder, "old"))
    (line,) = [line for line in ran.stderr.splitlines() if "EXPIRED" in line]
    assert line.startswith(
        f"baton {command}: WARNING: --ssl-certfile {folder / 'old.pem'}: the certificate EXPIRED on 2020-05-04"
    )
    assert ran.stderr.index(line) < ran.stderr.index("no-model:"), ran.stderr


def test_an_end_that_is_near_is_said_unless_quiet(folder: Path, tmp_path: Path):
    now = datetime.now(UTC)
    certificate(folder, "short", now - timedelta(days=1), now + timedelta(days=3, hours=1))
    options = ("serve", tmp_path / "no-model", "--port", "0", *with_certificate(folder, "short"))
    assert "the certificate ends on" in baton_here(*options).stderr
    assert "certificate" not in baton_here(*options, "--quiet").stderr


def test_an_expired_certificate_is_served(tiny_model: Path, folder: Path):
    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    with serving(tiny_model, "--kv-memory-gib", "0.05", *with_certificate(folder, "old")) as server:
        with urllib.request.urlopen(f"{server.url}/live", timeout=30, context=anyone) as answer:
            assert answer.status == 200
        code, err = server.interrupt()
    assert code == 0
    assert err.count("EXPIRED") == 1
