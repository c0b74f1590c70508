"""Certificates of a cluster, made with the openssl command: members, an expired one, and one of a foreign authority."""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from baton.trust.keyring import Keyring
from baton.trust.tls import TlsFiles

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
CA_CONFIG = """[ca]
default_ca = ours
[ours]
database = index.txt
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = any
copy_extensions = copy
unique_subject = no
[any]
commonName = supplied
"""


class Certificates:
    """`files(name)`: certificate and key of a member, signed by `by`; `trusts`: the authority that it accepts."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl makes the certificates of these tests")
        self.folder = folder
        (folder / "index.txt").write_text("")
        (folder / "ca.cnf").write_text(CA_CONFIG)
        for authority in ("ours", "foreign"):
            out = ("-keyout", f"{authority}.key", "-out", f"{authority}.pem")
            self._openssl("req", "-x509", *KEY, *out, "-subj", f"/CN={authority}", "-days", "30")

    def files(self, name: str, *, by: str = "ours", trusts: str = "ours", days: int = 30) -> TlsFiles:
        """`days`: until it expires; negative: it has expired."""
        begin, end = datetime.now(UTC) - timedelta(days=60), datetime.now(UTC) + timedelta(days=days)
        subject = ("-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}.example")
        self._openssl("req", "-new", *KEY, *subject, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signer = ("-cert", f"{by}.pem", "-keyfile", f"{by}.key", "-in", f"{name}.csr", "-out", f"{name}.pem")
        dates = ("-startdate", f"{begin:%Y%m%d%H%M%SZ}", "-enddate", f"{end:%Y%m%d%H%M%SZ}")
        self._openssl("ca", "-batch", "-config", "ca.cnf", "-notext", *signer, *dates)
        return TlsFiles(*(str(self.folder / file) for file in (f"{name}.pem", f"{name}.key", f"{trusts}.pem")))

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60, cwd=self.folder)


def write_secret(path: Path, *lines: str) -> Path:
    """As an operator replaces it: at once."""
    other = path.with_suffix(".new")
    other.touch(0o600)
    other.write_text("".join(f"{line}\n" for line in lines))
    return other.replace(path)


def keyring(folder: Path, *lines: str, tls: TlsFiles | None = None) -> Keyring:
    return Keyring(str(write_secret(folder / "secret", *lines)), tls)
