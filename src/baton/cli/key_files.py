"""Keys from files (--api-key-file, --admin-api-key-file), for secrets that an orchestrator mounts. Read once, at the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from baton.cli.say import Failed
from baton.config import ServeConfig, is_api_key


def with_key_files(config: ServeConfig) -> ServeConfig:
    """The config with the keys of its files added. Raises Failed."""
    if config.api_key_file:
        config = replace(config, api_key=_joined(config.api_key, config.api_key_file, "--api-key-file"))
    if config.admin_api_key_file:
        admin = _joined(config.admin_api_key, config.admin_api_key_file, "--admin-api-key-file")
        config = replace(config, admin_api_key=admin)
    return config


def _joined(keys: tuple[str, ...], file: str, option: str) -> tuple[str, ...]:
    try:
        lines = Path(file).expanduser().read_text("ascii").splitlines()
    except (OSError, ValueError) as error:
        raise Failed(
            f"{option} {file}: cannot be read ({getattr(error, 'strerror', None) or 'it is not ASCII text'})"
        ) from None
    found = [(number, key) for number, line in enumerate(lines, 1) if (key := line.strip()) and not key.startswith("#")]
    if not found:
        # A server whose keys are missing must not start without authentication.
        raise Failed(f"{option} {file}: holds no key; write one per line")
    for number, key in found:
        if not is_api_key(key):
            raise Failed(f"{option} {file}: line {number} is no key: printable ASCII without spaces is wanted")
    return tuple(dict.fromkeys([*keys, *(key for _, key in found)]))
