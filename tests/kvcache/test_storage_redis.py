"""The Redis backend against a real server, and against servers that misbehave."""

import os
import shutil
import signal
import socket
import subprocess
import threading
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace

import pytest
from redis_server import SERVER, RedisServer, free_port
from storage_rig import Rig, layout_of, soon

from baton.config import ServeConfig, shown, without_password
from baton.errors import InvalidConfig, StorageFailed
from baton.kvcache.storage import resp
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.storage.object import seal
from baton.kvcache.storage.open import open_backend
from baton.kvcache.storage.redis_store import IDLE_CONNECTIONS_MAX

needs_redis = pytest.mark.skipif(SERVER is None, reason="redis-server is not installed: apt-get install redis-server")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = RedisServer(tmp_path_factory.mktemp("redis"))
    yield started
    started.stop()


@pytest.fixture
def backend(server, rig):
    server.ask("FLUSHALL")
    opened = open_backend(f"redis://127.0.0.1:{server.port}/0", rig.layout)
    yield opened
    opened.close()


def name(rig, number):
    return f"baton:kv:{rig.layout.object_name(rig.keys([number])[0])}"


@needs_redis
def test_what_was_put_is_there(backend, rig):
    assert rig.has(backend, range(5)) == rig.get(backend, range(5)) == 0
    assert rig.put(backend, range(5)) == 5
    assert rig.has(backend, range(5)) == rig.get(backend, range(5)) == 5
    assert rig.get(backend, [*range(5), 99]) == 5


@needs_redis
def test_a_connection_that_the_server_has_dropped_while_it_was_idle_costs_nothing(backend, rig):
    """Servers do that (`timeout`), and the next call finds out: it is asked again, on another one."""
    rig.put(backend, range(3))
    for call, count in ((rig.has, 3), (rig.get, 3), (rig.put, 3)):
        assert len(backend._idle) == 1
        backend._idle[0]._socket.shutdown(socket.SHUT_RDWR)
        assert call(backend, range(3)) == count


@needs_redis
def test_an_idle_connection_that_breaks_in_the_middle_of_a_run_is_gone_on_with_on_another(backend, rig, monkeypatch):
    """Not from the start: the answers would be taken for those to later questions, and whole objects for damaged ones."""
    rig.put(backend, range(5))
    idle, calls = backend._idle[0], iter(range(100))
    receive = idle.receive

    def breaks(parts):
        if next(calls) == 6:  # three for each object
            raise ConnectionResetError("the server has closed the connection")
        receive(parts)

    monkeypatch.setattr(idle, "receive", breaks)
    assert rig.get(backend, range(5)) == 5
    assert backend.counters()["corrupt"] == 0


@needs_redis
def test_objects_that_fill_the_window_alone_are_asked_for_one_by_one(backend, rig, monkeypatch):
    monkeypatch.setattr(backend, "_window", 1)
    assert rig.put(backend, range(3)) == rig.get(backend, range(3)) == 3


@needs_redis
def test_a_deadline_that_passes_in_the_middle_of_a_run_ends_it(backend, rig):
    class Fading:
        """Time passes whenever somebody asks how much is left."""

        turns = 25

        def left(self):
            self.turns -= 1
            return max(0.0, float(self.turns))

    rig.put(backend, range(9))
    into = [memoryview(bytearray(rig.layout.block_bytes)) for _ in range(9)]
    with pytest.raises(StorageFailed) as failed:
        backend.get(rig.keys(range(9)), into, Fading())
    assert failed.value.reason == "timeout"
    assert 0 < failed.value.done < 9


@needs_redis
def test_databases_are_apart(server, rig):
    server.ask("FLUSHALL")
    here, there = (open_backend(f"redis://127.0.0.1:{server.port}/{number}", rig.layout) for number in (0, 5))
    assert rig.put(there, range(2)) == 2
    assert (rig.has(here, range(2)), rig.has(there, range(2))) == (0, 2)
    here.close()
    there.close()


def test_every_wait_has_the_deadline_of_its_call(rig, monkeypatch):
    """Connecting to a machine that does not answer takes minutes; a time-out of zero would be none at all."""
    waits = []

    class Nobody(socket.socket):
        def connect(self, address):
            waits.append(self.gettimeout())
            raise OSError("nobody there")

    monkeypatch.setattr(resp.socket, "socket", Nobody)
    backend = open_backend("redis://127.0.0.1:1", rig.layout)
    with pytest.raises(StorageFailed):
        backend.contains_prefix(rig.keys([0]), Deadline.after(7.0))
    assert waits[0] is not None
    assert 0 < waits[0] <= 7.0
    monkeypatch.undo()
    ours, theirs = socket.socketpair()
    connection = object.__new__(resp.Connection)
    connection._socket, connection._tls = ours, False
    connection.arm(SimpleNamespace(left=lambda: 1e-9))
    assert any(ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)), "it waits for ever"
    ours.close()
    theirs.close()


@needs_redis
def test_large_blocks_and_more_than_one_window(server, tmp_path):
    """200 blocks of 190 KB: 38 MB, in windows of 8 MiB, through both kinds of sockets."""
    rig = Rig(tmp_path, block_bytes=190_000)
    for url in (f"redis://127.0.0.1:{server.port}/3", f"redis+unix://{server.socket_path}"):
        server.ask("FLUSHALL")
        backend = open_backend(url, rig.layout)
        assert rig.put(backend, range(200)) == 200
        assert rig.has(backend, range(200)) == rig.get(backend, range(200)) == 200
        backend.close()


@needs_redis
def test_a_run_ends_at_its_first_gap_and_the_connection_stays_usable(server, tmp_path):
    server.ask("FLUSHALL")
    rig = Rig(tmp_path, block_bytes=50_000)
    backend = open_backend(f"redis://127.0.0.1:{server.port}", rig.layout)
    rig.put(backend, [number for number in range(300) if number != 7])
    for _ in range(5):
        assert rig.has(backend, range(300)) == rig.get(backend, range(300)) == 7
        assert rig.get(backend, range(8, 300)) == 292


@needs_redis
def test_what_is_there_is_not_sent_again(backend, rig):
    rig.put(backend, range(3))
    assert rig.put(backend, range(5)) == 5
    counted = backend.counters()
    assert (counted["stored"], counted["present"]) == (5, 3)


@needs_redis
@pytest.mark.parametrize(
    "value",
    [b"", b"x", b"x" * 1127, b"x" * 1128, b"x" * 1129, b"x" * 11280],
    ids=["empty", "1", "short", "foreign", "long", "10x"],
)
def test_a_damaged_object_is_a_miss_and_is_removed(server, backend, rig, value):
    rig.put(backend, range(3))
    server.ask("SET", name(rig, 1), value)
    assert rig.get(backend, range(3)) == 1
    assert server.ask("EXISTS", name(rig, 1)) == b":0\r\n"
    assert backend.counters()["corrupt"] == 1
    assert rig.put(backend, range(3)) == 3
    assert rig.get(backend, range(3)) == 3


@needs_redis
def test_a_value_of_another_type_is_a_miss(server, backend, rig):
    server.ask("LPUSH", name(rig, 0), "x")
    server.ask("LPUSH", name(rig, 1), "x")
    assert rig.has(backend, [0]) == rig.get(backend, [0]) == 0
    assert rig.put(backend, [0, 1]) == 2
    assert rig.get(backend, [0, 1]) == 2


@needs_redis
def test_a_misdirected_object_is_a_miss(server, backend, rig):
    rig.put(backend, [0, 1])
    server.ask("RENAME", name(rig, 0), name(rig, 1))
    assert rig.get(backend, [1]) == 0


@needs_redis
def test_no_corrupt_object_is_served(server, backend, rig):
    """2,000 drawn damages: flipped, cut, lengthened, exchanged."""
    random = Random(1)
    pairs = zip(rig.keys(range(4)), rig.blocks(range(4)), strict=True)
    good = [seal(key, rig.layout, block) + bytes(block) for key, block in pairs]
    with socket.create_connection(("127.0.0.1", server.port)) as link:
        for _ in range(2000):
            rig.put(backend, range(4))
            place = random.randrange(4)
            flipped = bytearray(good[place])
            flipped[random.randrange(1128)] ^= random.randint(1, 255)
            cut, longer = good[place][: random.randrange(1128)], good[place] + random.randbytes(random.randint(1, 9))
            value = random.choice([bytes(flipped), cut, longer, good[place - 1]])
            set_name = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n" % (len(name(rig, place)), name(rig, place).encode())
            link.sendall(set_name + b"$%d\r\n%s\r\n" % (len(value), value))
            assert link.recv(5) == b"+OK\r\n"
            assert rig.get(backend, range(4)) == place
    assert backend.counters()["corrupt"] == 2000


@needs_redis
def test_a_full_server_is_said_to_be_full(tmp_path, rig):
    server = RedisServer(tmp_path, "--maxmemory", "2mb", "--maxmemory-policy", "noeviction")
    try:
        backend = open_backend(f"redis://127.0.0.1:{server.port}", rig.layout)
        with pytest.raises(StorageFailed) as failed:
            rig.put(backend, range(10_000))
        assert failed.value.reason == "full"
        assert rig.has(backend, range(failed.value.done)) == failed.value.done, "what was counted is there"
        assert rig.get(backend, range(3)) == 3
    finally:
        server.stop()


@needs_redis
def test_a_server_that_comes_back_is_used_again(tmp_path, rig):
    server = RedisServer(tmp_path)
    backend = open_backend(f"redis://127.0.0.1:{server.port}", rig.layout)
    assert rig.put(backend, range(3)) == 3
    server.stop()
    with pytest.raises(StorageFailed) as failed:
        rig.put(backend, range(3))
    assert failed.value.reason == "unreachable"
    server.start()
    try:
        assert rig.get(backend, range(3)) == 0, "an idle connection that broke is no failure"
        assert rig.put(backend, range(3)) == rig.get(backend, range(3)) == 3
    finally:
        server.stop()


@needs_redis
def test_a_frozen_server_costs_no_more_than_the_deadline(tmp_path, rig):
    server = RedisServer(tmp_path)
    backend = open_backend(f"redis://127.0.0.1:{server.port}", rig.layout)
    rig.put(backend, range(3))
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        for call in (backend.get, backend.put):
            with pytest.raises(StorageFailed) as failed:
                call(rig.keys(range(3)), [memoryview(bytearray(1000))] * 3, Deadline.after(0.1))
            assert failed.value.reason == "timeout"
        with pytest.raises(StorageFailed):
            backend.contains_prefix(rig.keys(range(3)), Deadline.after(0.1))
        os.kill(server.process.pid, signal.SIGCONT)
        assert rig.get(backend, range(3)) == 3
    finally:
        server.stop()


@needs_redis
def test_a_password_is_sent_and_never_shown(tmp_path, rig):
    server = RedisServer(tmp_path, "--requirepass", "s3cret")
    try:
        place = f"127.0.0.1:{server.port}/1"
        assert rig.put(open_backend(f"redis://:s3cret@{place}", rig.layout), [0]) == 1
        (tmp_path / "password").write_text("s3cret\n")
        assert rig.get(open_backend(f"redis://{place}?password_file={tmp_path}/password", rig.layout), [0]) == 1
        for url in (f"redis://{place}", f"redis://:wr0ng@{place}"):
            with pytest.raises(StorageFailed) as failed:
                rig.get(open_backend(url, rig.layout), [0])
            assert failed.value.reason == "denied"
            assert "wr0ng" not in str(failed.value)
    finally:
        server.stop()


@needs_redis
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(tmp_path, rig):
    made = ["-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *made],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    port, files = free_port(), ("--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem", "--tls-ca-cert-file", "cert.pem")
    server = RedisServer(tmp_path, "--tls-port", str(port), "--tls-auth-clients", "no", *files)
    try:
        backend = open_backend(f"rediss://localhost:{port}?ca_file={tmp_path}/cert.pem", rig.layout)
        assert rig.put(backend, range(20)) == rig.has(backend, range(20)) == rig.get(backend, range(20)) == 20
        with pytest.raises(StorageFailed) as failed:
            rig.get(open_backend(f"rediss://localhost:{port}", rig.layout), [0])
        assert failed.value.reason == "unreachable"
        assert "certificate" in str(failed.value)
    finally:
        server.stop()


@needs_redis
def test_objects_expire_where_that_is_asked_for(server, rig):
    server.ask("FLUSHALL")
    rig.put(open_backend(f"redis://127.0.0.1:{server.port}?ttl_hours=2", rig.layout), [0])
    assert 7000 < int(server.ask("TTL", name(rig, 0))[1:]) <= 7200


@needs_redis
def test_threads_share_a_backend(backend, rig):
    errors = []

    def work(seed):
        try:
            for turn in range(30):
                first = (seed * 17 + turn * 5) % 100
                assert rig.put(backend, range(first, first + 6)) == 6
                assert rig.get(backend, range(first, first + 6)) == 6
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


# Servers that are none


@contextmanager
def impostor(*replies: bytes, keep_open=True):
    """Accepts connections and sends these bytes, whatever it is asked."""
    listener = socket.create_server(("127.0.0.1", 0))
    links = []

    def serve():
        for reply in replies:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            link.recv(65536)
            link.sendall(reply)
            links.append(link)
            if not keep_open:
                link.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.close()
    for link in links:
        link.close()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "protocol"),
        (b"-ERR unknown command\r\n", "protocol"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "unreachable"),
        (b"-MOVED 3999 127.0.0.1:6381\r\n", "protocol"),
        (b"$1128\r\n", "timeout"),
        (b"$1128\r\n" + b"x" * 500, "timeout"),
        (b"$1128\r\n" + b"x" * 1130, "protocol"),
        (b"", "timeout"),
        (b"*", "timeout"),
        (b"x" * 10_000, "protocol"),
    ],
)
def test_an_impostor_is_found_out(rig, reply, reason):
    with impostor(reply) as port:
        backend = open_backend(f"redis://127.0.0.1:{port}", rig.layout)
        with pytest.raises(StorageFailed) as failed:
            backend.get(rig.keys([0]), [memoryview(bytearray(1000))], Deadline.after(0.3))
        assert failed.value.reason == reason
        assert not backend._idle, "what is still to come would be read as the answer to something else"


def test_more_answers_than_questions_are_found_out(rig):
    with impostor(b":1128\r\n:1128\r\n") as port:
        backend = open_backend(f"redis://127.0.0.1:{port}", rig.layout)
        with pytest.raises(StorageFailed) as failed:
            rig.has(backend, [0])
        assert failed.value.reason == "protocol"
        assert not backend._idle


def test_few_connections_are_kept_for_later(rig):
    backend = open_backend("redis://127.0.0.1:1", rig.layout)
    closed = []
    for number in range(IDLE_CONNECTIONS_MAX + 3):
        backend._release(SimpleNamespace(in_step=number != 1, close=lambda number=number: closed.append(number)))
    assert closed == [1, IDLE_CONNECTIONS_MAX + 1, IDLE_CONNECTIONS_MAX + 2]
    backend.close()
    assert len(closed) == IDLE_CONNECTIONS_MAX + 3


def test_a_connection_that_breaks_in_an_object_is_a_failure(rig):
    with impostor(b"$1128\r\n" + b"x" * 500, keep_open=False) as port:
        backend = open_backend(f"redis://127.0.0.1:{port}", rig.layout)
        with pytest.raises(StorageFailed) as failed:
            rig.get(backend, [0])
        assert failed.value.reason == "unreachable"


def test_nobody_there_is_found_out_at_the_first_call_and_not_before(rig):
    backend = open_backend(f"redis://127.0.0.1:{free_port()}", rig.layout)
    with pytest.raises(StorageFailed) as failed:
        backend.contains_prefix(rig.keys([0]), soon())
    assert failed.value.reason == "unreachable"
    with pytest.raises(StorageFailed) as failed:
        backend.contains_prefix(rig.keys([0]), Deadline.after(-1))
    assert failed.value.reason == "timeout"


def test_a_name_that_can_be_none_is_unreachable(rig):
    with pytest.raises(StorageFailed) as failed:
        open_backend(f"redis://{'x' * 70}.example", rig.layout).contains_prefix(rig.keys([0]), soon())
    assert failed.value.reason == "unreachable"


def test_the_password_of_an_address_is_not_shown():
    assert shown(ServeConfig(kv_storage="redis://me:s3cr@t@host:1/0"))["kv_storage"] == "redis://***@host:1/0"
    for url in ("", "file:/a@b", "redis://host:1", "mooncake://host"):
        assert without_password(url) == url


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis:", "write redis://host:6379/0"),
        ("redis://host/db", "write redis://host:6379/0"),
        ("redis://host:99999", "cannot be read"),
        ("redis://host?ttl=3", "no option ttl; options of redis: ttl_hours, password_file"),
        ("redis://host?password_file=/not/there", "password_file /not/there"),
        ("redis+unix:", "needs its path"),
    ],
)
def test_a_wrong_address_says_what_to_write(url, words):
    with pytest.raises(InvalidConfig) as wrong:
        open_backend(url, layout_of())
    assert words in str(wrong.value)
