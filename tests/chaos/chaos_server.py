"""A real server of five processes for a test: started, watched through /proc, and certainly gone in the end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from baton.llm.keywords import serve_settings

T = TypeVar("T")

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "src"
ROLES = {
    "chaos_serve": "supervisor",
    "baton.runtime.front": "front",
    "baton.text.template_child": "templates",
    "chaos_engine": "engine",
    "chaos_worker": "worker",
    "baton.runtime.cache": "cache",
}
USUAL = {"threads": 1, "kv_blocks": 256, "block_size": 4, "slots": 8, "drain_seconds_max": 20.0}
"""Settings of every server and instance, where a test gives no others."""
ON_DEVICE: dict[str, Any] = {}
"""Where they compute, beside USUAL. tests/gpu/test_servers_on_gpu.py runs the same tests with other values here."""
PATIENCE_SECONDS = float(os.environ.get("BATON_PATIENCE_SECONDS", "90"))
"""For anything that must come to pass. Long, because nothing is asserted about time: only that it happens."""


def python_path(*folders: Path | None) -> str:
    """Where the children of a test find our sources, `folders`, and the packages of whoever started the test."""
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return os.pathsep.join([str(SOURCES), *(str(folder) for folder in folders if folder is not None), *inherited])


def until(question: Callable[[], T | None], what: str, seconds: float = PATIENCE_SECONDS) -> T:
    """Asks until the answer is true."""
    deadline = time.monotonic() + seconds
    while not (answer := question()):
        if time.monotonic() > deadline:
            raise AssertionError(f"in vain: {what}")
        time.sleep(0.01)
    return answer


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


class Process:
    """A pid that is not taken for its successor's."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.born = self._stat()[19]

    def _stat(self) -> list[str]:
        """After the name, which may hold anything: state, ppid, ... (man proc, from field 3)."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()

    @property
    def alive(self) -> bool:
        """A zombie is not; its parent's duty to wait for it is looked at elsewhere."""
        try:
            stat = self._stat()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat[19] == self.born and stat[0] not in "ZX"

    @property
    def cpu_seconds(self) -> float:
        stat = self._stat()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    @property
    def rss_mib(self) -> float:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    @property
    def peak_mib(self) -> float:
        """The most it ever had."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def send(self, number: int) -> None:
        if self.alive:
            os.kill(self.pid, number)


def children(pid: int) -> list[int]:
    """Of all its threads."""
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (thread / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def role_of(pid: int) -> str | None:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return ROLES.get(words[words.index("-m") + 1]) if "-m" in words[:-1] else None


class Server:
    """`with Server(model, folder, ...) as server`. Settings are ServeConfig's; `orders` are chaos_worker's."""

    def __init__(
        self,
        model: Path | str,
        scratch: Path,
        *,
        orders: dict[str, Any] | None = None,
        packages: Path | None = None,
        **settings: Any,
    ) -> None:
        """`packages`: a folder in which something is installed, beside what all servers have."""
        self.port = settings.pop("port", None) or free_port()
        config = {**USUAL, **ON_DEVICE, **settings}
        config |= {"served_model_name": ["tiny"], "port": self.port}
        scratch.mkdir(parents=True, exist_ok=True)
        self._out, self._err = scratch / "stdout", scratch / "stderr"
        tiers = bool(config.get("kv_host_gib") or config.get("kv_storage"))
        self.roles = [role for role in ROLES.values() if role != "cache" or tiers]
        self.seen: dict[str, Process] = {}
        "Every process that was ever asked for, by role; replaced workers under worker-PID."
        environment = {**os.environ, "PYTHONPATH": python_path(HERE, packages), "BATON_CHAOS": json.dumps(orders or {})}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            command = [sys.executable, "-m", "chaos_serve", json.dumps(fields_of_serve(model, config))]
            self.popen = subprocess.Popen(command, stdout=out, stderr=err, env=environment)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._remember()
        if self.popen.poll() is None:
            for number in (signal.SIGTERM, signal.SIGTERM):  # twice: without waiting for what runs
                self.popen.send_signal(number)
                time.sleep(0.05)
            try:
                self.popen.wait(30)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait(30)
        try:
            self.require_all_gone()
        except AssertionError:
            for process in self.seen.values():
                process.send(signal.SIGKILL)
            if kind is None:
                raise
        finally:
            if kind is not None:
                print(self.output, self.errors, sep="\n")

    # Processes

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def errors(self) -> str:
        return self._err.read_text(errors="replace")

    def _found(self) -> dict[str, int]:
        found = {"supervisor": self.popen.pid}
        family = (("supervisor", ("front", "engine")), ("front", ("templates",)), ("engine", ("worker", "cache")))
        for parent, expected in family:
            for pid in children(found[parent]) if parent in found else ():
                role = role_of(pid)  # between fork and exec a child looks like its parent
                if role in expected:
                    found[role] = pid
        return found

    def _remember(self) -> dict[str, int]:
        found = self._found()
        for role, pid in found.items():
            if role in self.seen and self.seen[role].pid == pid:
                continue
            try:
                process = Process(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
            if role in self.seen:
                self.seen[f"{role}-{self.seen[role].pid}"] = self.seen[role]
            self.seen[role] = process
        return found

    def process(self, role: str) -> Process:
        """The living one, waited for."""
        until(lambda: role in self._remember() and self.seen[role].alive, f"there is a {role}")
        return self.seen[role]

    def wait_ready(self) -> Server:
        def ready() -> bool:
            assert self.popen.poll() is None, f"the server ended:\n{self.output}\n{self.errors}"
            return "READY" in self.output

        try:
            until(ready, "the server is ready")
            for role in self.roles:
                self.process(role)
        except BaseException:
            self.__exit__(*sys.exc_info())  # no `with` has begun that would end it
            raise
        return self

    def wait_ended(self) -> int:
        self._remember()
        return until(lambda: [self.popen.poll()] if self.popen.poll() is not None else None, "the supervisor ends")[0]

    def require_all_gone(self) -> None:
        """No orphan, no listener, nothing in shared memory."""
        for role, process in self.seen.items():
            until(lambda process=process: not process.alive, f"the {role} is gone", 30.0)
        until(
            lambda: not listens(self.port), "nobody listens any more", 30.0
        )  # threads of a killed process end after its first one
        assert not [name for name in os.listdir("/dev/shm") if "baton" in name]

    # HTTP

    def ask(self, path: str, body: Any = None, **options: Any) -> Reply:
        return asyncio.run(ask(self.port, path, body, **options))

    def metrics(self) -> dict[str, float]:
        return parse_metrics(self.ask("/metrics").content.decode())

    def wait_idle(self) -> dict[str, float]:
        """Until nobody holds anything."""

        def idle() -> dict[str, float] | None:
            numbers = self.metrics()
            return None if any(numbers[name] for name in HELD) else numbers

        return until(idle, f"nothing is held any more: {self.metrics()}")


def fields_of_serve(model: Path | str, settings: dict[str, Any]) -> dict[str, Any]:
    """Of ServeConfig. Who knows older names of settings is imported here, once, and not by each server."""
    return {"model": str(model), **serve_settings(settings)}


HELD = (
    "baton:requests_running",
    "baton:requests_waiting",
    "baton:requests_preempted",
    'baton:kv_blocks{state="held"}',
    "baton:slots_taken",
    "baton:engine_requests_open",
    "baton:steps_in_flight",
    "baton:http_requests_open",
)


def parse_metrics(text: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


class Reply:
    def __init__(self, status: int, content: bytes) -> None:
        self.status = status
        self.content = content

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def events(self) -> list[Any]:
        found = re.findall(rb"^data: (.*)$", self.content, re.MULTILINE)
        return [json.loads(entry) for entry in found if entry != b"[DONE]"]

    @property
    def complete(self) -> bool:
        return self.content.endswith(b"data: [DONE]\n\n")

    @property
    def tokens(self) -> dict[int, list[int]]:
        """Token ids by choice, of a whole answer or of a stream."""
        tokens: dict[int, list[int]] = {}
        for part in self.events or [self.json]:
            for choice in part.get("choices", ()):
                tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
        return tokens

    @property
    def logprobs(self) -> dict[int, list[float]]:
        """Log-probabilities by choice, of completions that were asked for them. JSON keeps every bit of a float."""
        found: dict[int, list[float]] = {}
        for part in self.events or [self.json]:
            for choice in part.get("choices", ()):
                if choice.get("logprobs"):
                    found.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
        return found


def request_bytes(path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "host: localhost", "connection: close"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(content)}"]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def ask(
    port: int,
    path: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    on_bytes: Callable[[bytes], None] = lambda data: None,
    seconds: float = PATIENCE_SECONDS,
    host: str = "127.0.0.1",
) -> Reply:
    """One request on a connection of its own. `on_bytes` sees a stream as it comes."""
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(request_bytes(path, body, headers))
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            pieces: list[bytes] = []
            chunked = b"transfer-encoding: chunked" in head.lower()
            while chunk := await (_chunk(reader) if chunked else reader.read(1 << 16)):
                pieces.append(chunk)
                on_bytes(chunk)
            return Reply(status, b"".join(pieces))
        finally:
            writer.close()


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readuntil(b"\r\n"))[:-2], 16)
    return (await reader.readexactly(size + 2))[:-2]
