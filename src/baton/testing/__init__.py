"""Conformance suites for plug-ins: classes of tests that their authors run with pytest.

    PlatformConformance     a device: `--device NAME` (entry points of `baton.platforms`)
    StorageConformance      a KV storage: `--kv-storage NAME:...` (entry points of `baton.kv_storage`)
    TransportConformance    a way to read another instance's KV pool (kvcache/transport.py); it has no entry point yet

A test file of a plug-in is a subclass that says what is tested; Baton's own tests run the same classes. They need pytest, and
the first one torch, its oracle: `pip install 'baton-serve[testing]'`.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    *(f"baton.testing.{name}" for name in ("platform_suite", "platforms", "step_rig", "storage_suite", "transport_suite"))
)

from baton.testing.platform_suite import PlatformConformance  # noqa: E402
from baton.testing.storage_suite import StorageConformance  # noqa: E402
from baton.testing.transport_suite import TransportConformance  # noqa: E402

__all__ = ["PlatformConformance", "StorageConformance", "TransportConformance"]
