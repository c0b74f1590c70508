"""Threads that block on sockets."""

import asyncio
import gc
import socket

import pytest

from baton.kvcache.socket_threads import Beside, SocketThreads
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import KVPool


def test_the_error_of_a_connection_that_was_shut_down_is_not_logged_as_lost(caplog: pytest.LogCaptureFixture):
    """The caller was cancelled, so nobody awaits the error that ended its thread."""

    async def main() -> None:
        threads = SocketThreads(1)
        sock, peer = socket.socketpair()

        def receive(_: object) -> None:
            if not sock.recv(1):
                raise ConnectionResetError

        running = asyncio.create_task(threads.run(sock, receive))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        await asyncio.sleep(0)
        threads.close()
        sock.close()
        peer.close()

    asyncio.run(main())
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize("where", ["the thread", "beside it", "the error before"])
def test_a_pool_can_be_closed_while_an_error_of_its_thread_lives(where: str):
    """The error is kept by its future until the garbage collector comes."""

    async def main() -> None:
        threads = SocketThreads(1)
        pool = KVPool.create(KVLayout(layers=1, kv_heads=1, head_dim=4, block_size=4, dtype="float32"), 1)
        sock, peer = socket.socketpair()

        def fail() -> None:
            view = pool.data[0].data
            raise ConnectionResetError(len(view))

        def work(beside: Beside) -> None:
            if where == "beside it":
                beside(fail).result()
            elif where == "the thread":
                fail()
            else:
                try:
                    fail()
                except ConnectionResetError:
                    raise ConnectionAbortedError from None

        with pytest.raises(ConnectionError) as error:
            await threads.run(sock, work)
        pool.close()
        assert error.value.__traceback__ is not None
        threads.close()
        sock.close()
        peer.close()

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
