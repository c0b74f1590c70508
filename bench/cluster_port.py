"""What a message of an instance costs a router, by how the cluster port is protected: `python bench/cluster_port.py`.

    secret   frames sealed with the secret (HMAC), as without certificates
    TLS      the same frames inside TLS 1.3, certificates made with the openssl command

An instance, which is a process of its own, sends Emits over the loopback, one per turn of its loop, as an engine does after
each step; the router's end receives and decodes them and does nothing else. Rounds of both ways in turns. A figure is the
processor time of that end: other work on the machine is not counted, but blurs it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import process_time

from baton.addresses import Address
from baton.protocol.codec import Message
from baton.protocol.ids import RequestId
from baton.protocol.output import Emit
from baton.runtime.wire.link import dial, welcome
from baton.trust.keyring import Keyring
from transfer_security import credentials, make_files

UNREAD_BYTES_MAX = 1 << 16


def ways(folder: Path) -> dict[str, Keyring]:
    secret, tls = credentials(folder)
    return {"secret": secret} | ({} if tls is None else {"TLS": tls})


async def send(port: int, way: str, folder: Path, rows: int, frames: int) -> None:
    """The instance."""
    link = await dial(Address(host="127.0.0.1", port=port), ways(folder)[way])
    for position in range(frames):
        link.send(Emit([(RequestId(f"r{1234567 + row}"), 1, 0, position, 7919 * row % 150_000) for row in range(rows)], []))
        await asyncio.sleep(0)
        while link.backlog > UNREAD_BYTES_MAX:
            await asyncio.sleep(0.001)
    await link.finish()


async def receive(way: str, folder: Path, rows: int, frames: int) -> float:
    """The router. Returns its processor seconds from the first message to the last."""
    listener = socket.create_server(("127.0.0.1", 0))
    more = [str(listener.getsockname()[1]), way, str(folder), str(rows), str(frames)]
    child = subprocess.Popen([sys.executable, __file__, "--send", *more])
    listener.setblocking(False)
    sock, _ = await asyncio.get_running_loop().sock_accept(listener)
    link, times = await welcome(sock, ways(folder)[way]), list[float]()

    def count(message: Message) -> None:
        assert isinstance(message, Emit)
        times.append(process_time())

    await link.listen(count)
    listener.close()
    assert child.wait() == 0
    assert len(times) == frames
    return times[-1] - times[0]


def main() -> None:
    if sys.argv[1:2] == ["--send"]:
        port, way, folder, rows, frames = sys.argv[2:]
        asyncio.run(send(int(port), way, Path(folder), int(rows), int(frames)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="tokens per message")
    parser.add_argument("--frames", type=int, default=5000, help="messages per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as made:
        make_files(Path(made))
        for rows in options.rows:
            taken: dict[str, list[float]] = {way: [] for way in ways(Path(made))}
            for _ in range(options.rounds):
                for way, seconds in taken.items():
                    seconds.append(1e6 * asyncio.run(receive(way, Path(made), rows, options.frames)) / options.frames)
            found += [{"rows": rows, "way": way, "least": min(each), "median": median(each)} for way, each in taken.items()]
    if options.json:
        print(json.dumps({"load": os.getloadavg()[0], "figures": found}))
        return
    print(f"microseconds of the router's processor per message; load average {os.getloadavg()[0]:.1f}")
    for row in found:
        print(f"{row['rows']:>4} tokens, {row['way']:<7} least {row['least']:7.1f}, median {row['median']:7.1f}")


if __name__ == "__main__":
    main()
