"""Platforms of other packages, by entry point (group `baton.platforms`): `--device NAME`.

A plug-in runs in the worker process: if it crashes, the engine replaces the worker. Wrong settings raise InvalidConfig before
any weights are read.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from baton.config import WorkerConfig
from baton.config.values import PLATFORMS
from baton.errors import EngineError, InvalidConfig
from baton.worker.platforms.base import Platform, PlatformOpener


def open_plug_in(device: str, config: WorkerConfig, path: Path) -> tuple[Platform, WorkerConfig]:
    found = tuple(entry_points(group=PLATFORMS, name=device))
    if not found:
        raise InvalidConfig(f"--device {device}: no entry point of {PLATFORMS} has this name here")
    (entry, *others) = found
    if others:
        raise InvalidConfig(f"--device {device}: {len(found)} packages bring this name; uninstall all but one")
    try:
        opener: PlatformOpener = entry.load()
        platform, resolved = opener(config, path)
    except EngineError:
        raise
    except Exception as error:
        raise InvalidConfig(f"the platform plug-in {entry.value} cannot be opened: {error!r}") from error
    _check(device, platform, resolved)
    return platform, resolved


def _check(device: str, platform: Platform, resolved: WorkerConfig) -> None:
    """Checks what a plug-in is likely to forget, and combinations that it cannot support. Raises InvalidConfig."""
    if (resolved.device, platform.name) != (device, device):
        raise InvalidConfig(f"the platform plug-in {device} calls its device {resolved.device} and itself {platform.name}")
    if resolved.dtype == "auto":
        raise InvalidConfig(f"the platform plug-in {device} leaves dtype auto: it must say what it computes in")
    if resolved.pool != "private" and not platform.shares_pools:
        raise InvalidConfig(
            f"--device {device}: no other process can read its KV pool: leave out --kv-host-gib, --kv-storage and --role"
        )
