"""The argument lists of deploy/kubernetes as real processes: pods find each other by name, and each is replaced under load.
Clients get no error, and the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from chaos_namespaces import Namespaces, NoNamespaces
from chaos_pods import KEY, Pod, Pods
from chaos_server import Server, ask, parse_metrics, until
from manifests import OVERLAYS

PROMPT = "Pack my box with five dozen liquor jugs; how vexingly quick daft zebras jump! "
BODY = {"max_tokens": 150, "return_token_ids": True, "ignore_eos": True, "stream": True}
BODIES: list[dict[str, Any]] = [
    {**BODY, "prompt": PROMPT + str(number), "temperature": number % 2, "seed": number} for number in range(6)
]
CLIENTS = 3


@pytest.fixture(scope="module")
def undisturbed(alone: Server) -> list[Any]:
    return [alone.ask("/v1/completions", body).tokens for body in BODIES]


async def asked(pods: Pods, router: Pod, body: dict[str, Any]) -> dict[int, list[int]]:
    """Tokens of the answer of a router."""
    headers = {"authorization": f"Bearer {KEY}"}
    reply = await ask(pods.ports["http"], "/v1/completions", body, headers=headers, host=router.address)
    assert reply.status == 200, reply.content
    assert reply.complete, reply.content[-2000:]
    return reply.tokens


class Load:
    """Clients that ask a router of the Service without end, and compare."""

    def __init__(self, pods: Pods, undisturbed: list[Any]) -> None:
        self._pods, self._expected, self._numbers = pods, undisturbed, count()
        self.answered = 0

    async def client(self) -> None:
        while True:
            number = next(self._numbers)
            routers, which = self._pods.endpoints("baton"), number % len(BODIES)
            router = routers[number % len(routers)]
            assert await asked(self._pods, router, BODIES[which]) == self._expected[which]
            self.answered += 1

    async def more(self) -> None:
        """Returns after every client has had another answer."""
        wanted = self.answered + 2 * CLIENTS
        await asyncio.to_thread(until, lambda: self.answered >= wanted, "clients get answers", 300.0)


@contextlib.asynccontextmanager
async def under_load(pods: Pods, undisturbed: list[Any]) -> AsyncIterator[Load]:
    """An error of a client ends the block."""
    load = Load(pods, undisturbed)
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(load.client()) for _ in range(CLIENTS)]
        await load.more()
        yield load
        await load.more()
        for client in clients:
            client.cancel()


def require_clean(pods: Pods) -> None:
    for pod in pods.pods:
        log = pod.log.read_text(errors="replace")
        assert "Traceback" not in log, log
        assert "cannot be read" not in log, log


def require_copies_over_tcp(pods: Pods) -> None:
    (router, *_) = pods.of("baton-router")
    numbers = parse_metrics(pods.metrics(router))
    copied = [value for name, value in numbers.items() if name.startswith("baton:kv_pulls_total") and '"copied"' in name]
    assert sum(copied) > 0
    assert not [name for name in numbers if name.startswith("baton:kv_pulls_total") and 'transport="unix"' in name]


@pytest.mark.timeout(600)
def test_pods_of_an_overlay_serve_and_one_is_replaced_under_load(tiny: Path, tmp_path: Path):
    async def main(pods: Pods) -> None:
        undisturbed = [await asked(pods, pods.endpoints("baton")[0], body) for body in BODIES]
        async with under_load(pods, undisturbed) as load:
            (old,) = pods.of("baton-decode")
            await asyncio.to_thread(pods.replace, old)
            await load.more()

    with Pods("pd", tiny, tmp_path, replicas=1) as pods:
        pods.wait_ready()
        asyncio.run(main(pods))
        require_copies_over_tcp(pods)
        require_clean(pods)


each_overlay = pytest.mark.parametrize("overlay", [overlay for overlay in OVERLAYS if not overlay.endswith("-autoscaled")])
"""The others have the same pods."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@each_overlay
def test_every_pod_is_replaced_under_load(overlay: str, tiny: Path, tmp_path: Path, undisturbed: list[Any]):
    replace_every_pod(overlay, tiny, tmp_path, undisturbed)


def replace_every_pod(overlay: str, model: Path, folder: Path, undisturbed: list[Any], **changes: Any) -> None:
    async def main(pods: Pods) -> None:
        async with under_load(pods, undisturbed) as load:
            for pod in list(pods.pods):
                await asyncio.to_thread(pods.replace, pod)
                await load.more()

    with Pods(overlay, model, folder, **changes) as pods:
        pods.wait_ready()
        asyncio.run(main(pods))
        if overlay == "pd":
            require_copies_over_tcp(pods)
        require_clean(pods)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@each_overlay
def test_every_pod_in_a_network_of_its_own_is_replaced_under_load(
    overlay: str, tiny: Path, tmp_path: Path, undisturbed: list[Any]
):
    """Addresses and ports are the manifest's: an instance announces the address from which it reaches its router."""
    try:
        namespaces = Namespaces()
    except NoNamespaces as error:
        pytest.skip(str(error))
    with namespaces:
        replace_every_pod(overlay, tiny, tmp_path, undisturbed, namespaces=namespaces)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pods_of_two_ranks_hand_over_from_network_to_network(tiny: Path, tmp_path: Path):
    """Found by an audit: such pods did not start, because a rank had no port of its own."""
    try:
        namespaces = Namespaces()
    except NoNamespaces as error:
        pytest.skip(str(error))
    with Server(tiny, tmp_path / "alone", tensor_parallel_size=2, quantization="none").wait_ready() as server:
        expected = [server.ask("/v1/completions", body).tokens for body in BODIES]
    options = ["--tensor-parallel-size", "2", "--quantization", "none"]
    with namespaces:
        replace_every_pod("pd", tiny, tmp_path, expected, namespaces=namespaces, instances=options)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_streams_that_outlast_the_drain_of_their_instance_continue_elsewhere(
    tiny: Path, tmp_path: Path, undisturbed: list[Any]
):
    replace_every_pod("pd", tiny, tmp_path, undisturbed, instances=["--drain-seconds-max", "0.05"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@each_overlay
def test_all_deployments_are_updated_at_the_same_time(overlay: str, tiny: Path, tmp_path: Path, undisturbed: list[Any]):
    """As `kubectl apply` with a new image does it."""

    def update(deployment: str) -> None:
        for pod in pods.of(deployment):
            pods.replace(pod)

    async def main() -> None:
        async with under_load(pods, undisturbed):
            await asyncio.gather(*(asyncio.to_thread(update, deployment) for deployment in pods.deployments))

    with Pods(overlay, tiny, tmp_path) as pods:
        pods.wait_ready()
        asyncio.run(main())
        require_clean(pods)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@each_overlay
def test_containers_of_instances_are_killed_and_started_again(overlay: str, tiny: Path, tmp_path: Path, undisturbed: list[Any]):
    async def main(pods: Pods) -> None:
        async with under_load(pods, undisturbed) as load:
            for pod in pods.pods:
                if pod.deployment != "baton-router":
                    await asyncio.to_thread(pods.kill, pod)
                    await load.more()

    with Pods(overlay, tiny, tmp_path) as pods:
        pods.wait_ready()
        asyncio.run(main(pods))
