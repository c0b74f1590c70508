"""The importable suite on our own transports."""

from __future__ import annotations

from messenger_peer import SECRET, serving
from redis_server import free_port

from baton.kvcache.shared_memory import SharedMemory
from baton.kvcache.tcp import Tcp
from baton.testing import TransportConformance


class TestSharedMemory(TransportConformance):
    def serving(self, folder):
        return serving(f"unix:{folder}/peer.sock")

    def reading(self):
        return SharedMemory()


class TestTcp(TransportConformance):
    def serving(self, folder):
        return serving(f"tcp://127.0.0.1:{free_port()}")

    def reading(self):
        return Tcp(SECRET)
