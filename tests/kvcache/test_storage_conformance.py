"""The importable suite on our own backends and on the plug-in of examples/."""

from __future__ import annotations

import sqlite3
import sys

import pytest
from example_package import install_example
from redis_server import SERVER, RedisServer

from baton.kvcache.storage.files import FileBackend
from baton.testing import StorageConformance
from baton.testing.storage_suite import key_of, layout_of


class TestFiles(StorageConformance):
    def address(self, folder):
        return f"file:{folder}/kv?quota_gib=1"

    def damage(self, address, number):
        folder = address.removeprefix("file:").partition("?")[0]
        path = FileBackend(folder, layout_of(), 2**30).path_of(key_of(number))
        with open(path, "r+b") as file:
            file.seek(-1, 2)
            file.write(b"\0")


@pytest.mark.skipif(SERVER is None, reason="redis-server is not installed: apt-get install redis-server")
class TestRedis(StorageConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls, tmp_path_factory):
        cls.redis = RedisServer(tmp_path_factory.mktemp("redis"))
        yield
        cls.redis.stop()

    def address(self, folder):
        self.redis.ask("FLUSHALL")
        return f"redis://127.0.0.1:{self.redis.port}/0"

    def damage(self, address, number):
        self.redis.ask("SETRANGE", f"baton:kv:{layout_of().object_name(key_of(number))}", "500", "??")


class TestByTokens(StorageConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def plug_in(cls, tmp_path_factory):
        folder = str(install_example(tmp_path_factory.mktemp("installed")))
        sys.path.append(folder)
        yield
        sys.path.remove(folder)

    def address(self, folder):
        return f"tokens:{folder}/blocks.db"

    def damage(self, address, number):
        with sqlite3.connect(address.removeprefix("tokens:")) as connection:
            name = layout_of().object_name(key_of(number))
            connection.execute(
                "UPDATE blocks SET object = CAST(substr(object, 1, 900) || x'00' AS BLOB) WHERE name = ?", (name,)
            )
