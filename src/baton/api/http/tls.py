"""TLS settings: the server's certificate, and client certificates where required. The command line checks the files before
anything is loaded: a wrong file is reported in one line."""

from __future__ import annotations

import ssl

from baton.config import ServeConfig
from baton.errors import InvalidConfig


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """The server's TLS settings: TLS 1.2 or later, with Python's default ciphers. None: the server speaks http."""
    if not config.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    named = f"--ssl-certfile {config.ssl_certfile}" + (f" and --ssl-keyfile {config.ssl_keyfile}" if config.ssl_keyfile else "")
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, _no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise InvalidConfig(f"{named}: cannot be used ({_why(error)}); give a certificate and its key in PEM form") from None
    if config.ssl_ca_certs:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            message = f"--ssl-ca-certs {config.ssl_ca_certs}: cannot be used ({_why(error)}); give certificates in PEM form"
            raise InvalidConfig(message) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    """Refuse a key with a password. Without this callback every process that reads the key would ask for it on the terminal."""
    raise ValueError("the key has a password: make a copy without one that only the server's user may read")


def _why(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
