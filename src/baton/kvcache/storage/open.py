"""Opens a backend by the scheme of its address. Other schemes come from entry points (group `baton.kv_storage`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from baton.errors import InvalidConfig
from baton.kvcache.storage.backend import LayoutName, Opener, StorageBackend
from baton.kvcache.storage.listing import Listing
from baton.kvcache.storage.url import EXAMPLES, StorageURL, parse_url

GROUP = "baton.kv_storage"
REMEDIES: Final = {"mooncake": "its master evicts what is not used, and has metrics"}
"""Advice by scheme, for stores whose blocks cannot be listed."""


def open_backend(url: str, layout: LayoutName) -> StorageBackend:
    """Open the store at the address. Raises InvalidConfig for an address that can never work. A store that is only unreachable
    now is no error here."""
    parsed = parse_url(url)
    return opener(parsed)(parsed, layout)


def check_address(url: str) -> None:
    """Check the address before anything is loaded, and open nothing. Raises InvalidConfig for an address that can never
    work."""
    parsed = parse_url(url)
    opener(parsed)
    if parsed.scheme == "file":
        from baton.kvcache.storage.files import file_settings

        file_settings(parsed)
    elif parsed.scheme in ("redis", "rediss", "redis+unix"):
        from baton.kvcache.storage.redis_store import redis_settings

        redis_settings(parsed)
    elif parsed.scheme == "mooncake":
        from baton.kvcache.storage.mooncake_store import mooncake_settings

        mooncake_settings(parsed)


def opener(url: StorageURL) -> Opener:
    """The function that opens a store. Imports only the module of the scheme."""
    if url.scheme == "file":
        from baton.kvcache.storage.files import open_files

        return open_files
    if url.scheme in ("redis", "rediss", "redis+unix"):
        from baton.kvcache.storage.redis_store import open_redis

        return open_redis
    if url.scheme == "mooncake":
        from baton.kvcache.storage.mooncake_store import open_mooncake

        return open_mooncake
    from importlib.metadata import entry_points  # takes tens of milliseconds

    for entry in entry_points(group=GROUP, name=url.scheme):
        from baton.kvcache.storage.foreign import foreign_opener

        return foreign_opener(entry)
    installed = ", ".join(sorted(entry.name for entry in entry_points(group=GROUP)))
    raise InvalidConfig(
        f"no KV storage for {url.scheme}: (examples: {EXAMPLES}; by entry points of {GROUP}: {installed or 'none installed'})"
    )


def open_listing(url: str) -> Listing:
    """List the store's objects. `url`: as for --kv-storage, or a directory. Raises InvalidConfig if the store cannot be
    listed."""
    from baton.kvcache.storage.file_tools import FileListing
    from baton.kvcache.storage.files import file_settings

    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", url):
        return FileListing(Path(url).expanduser().absolute())
    parsed = parse_url(url)
    if parsed.scheme == "file":
        return FileListing(file_settings(parsed)[0])
    if parsed.scheme in ("redis", "rediss", "redis+unix"):
        from baton.kvcache.storage.redis_listing import RedisListing
        from baton.kvcache.storage.redis_store import redis_settings

        return RedisListing(redis_settings(parsed)[0])
    remedy = REMEDIES.get(parsed.scheme, "use the store's own tools")
    raise InvalidConfig(f"{parsed.scheme}: has no listing, so its blocks cannot be listed or removed here: {remedy}")
