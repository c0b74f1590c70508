"""Credentials (trust/) from settings."""

from __future__ import annotations

from baton.config import CredentialOptions
from baton.trust.keyring import Keyring
from baton.trust.tls import TlsFiles


def credentials_of(options: CredentialOptions) -> Keyring:
    """The credentials of these settings. Raises InvalidConfig."""
    files = TlsFiles(options.cluster_ssl_certfile, options.cluster_ssl_keyfile, options.cluster_ssl_ca_certs)
    return Keyring(options.cluster_secret, files if files.certfile else None)
