"""The pods of an overlay of deploy/kubernetes as processes of this machine, each with an address of its own on loopback.

    with Pods("mixed", model, folder) as pods:
        pods.wait_ready()
        pods.replace(pods.of("baton-mixed")[0])     as a rolling update does it

Arguments are the manifest's, with the pod's address for 0.0.0.0, free ports, and folders of the test for its volumes; options
for a small model are added. With namespaces (chaos_namespaces.py) addresses and ports stay as they are. What a pod hides from
its processes, and the names of Services: pod/sitecustomize.py.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

from chaos_cluster import flags
from chaos_namespaces import Namespaces
from chaos_server import HERE, ON_DEVICE, Reply, ask, free_port, python_path, until

sys.path.append(str(HERE.parent / "cli"))

from manifests import of_kind

START_SECONDS = 300.0
KEY, ADMIN_KEY = "a-key", "an-admin-key"
SMALL = ("--threads", "1", "--kv-blocks", "300", "--block-size", "4", "--max-num-seqs", "8")


class Pod:
    popen: subprocess.Popen[bytes]
    address: str

    def __init__(self, deployment: str, number: int, folder: Path) -> None:
        self.deployment, self.number, self.name = deployment, number, f"{deployment}-{number}"
        self.folder = folder / self.name
        self.log = self.folder / "log"
        self.in_service = False
        "Ready when it was last looked at, and not on its way out: Services send to it."

    @property
    def running(self) -> bool:
        return self.popen.poll() is None


class Pods:
    def __init__(
        self,
        overlay: str,
        model: Path,
        folder: Path,
        *,
        replicas: int | None = None,
        namespaces: Namespaces | None = None,
        instances: Sequence[str] = (),
    ) -> None:
        """`replicas`: of every Deployment, in place of the manifest's number. `instances`: more of their options."""
        self.deployments, self.services = of_kind(overlay, "Deployment"), of_kind(overlay, "Service")
        self.pods: list[Pod] = []
        self._model, self._folder, self._numbers = model, folder, count(1)
        named = [each for spec in self.deployments.values() for each in container_of(spec)["ports"]]
        self.ports = {each["name"]: each["containerPort"] if namespaces else free_port() for each in named}
        self._free = {str(each["containerPort"]): str(self.ports[each["name"]]) for each in named}
        self._volumes = {"/etc/baton/cluster": folder / "cluster", "/etc/baton/keys": folder / "keys"}
        self._namespaces, self._options, self._lock = namespaces, [*SMALL, *flags(ON_DEVICE), *instances], Lock()
        self._write_secrets()
        for name, spec in self.deployments.items():
            for _ in range(replicas or spec.get("replicas", 1)):
                self.start(name)

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for _ in range(2):  # the second signal ends a drain
            for pod in self.pods:
                if pod.running:
                    pod.popen.terminate()
        for pod in self.pods:
            try:
                pod.popen.wait(60)
            except subprocess.TimeoutExpired:
                pod.popen.kill()
                pod.popen.wait(30)
        if kind is not None:
            print(*(f"{pod.name}\n{pod.log.read_text(errors='replace')[-3000:]}" for pod in self.pods), sep="\n")

    def _write_secrets(self) -> None:
        for path, content in {"cluster/secret": "0123456789abcdef" * 4, "keys/keys": KEY, "keys/admin": ADMIN_KEY}.items():
            file = self._folder / path
            file.parent.mkdir(exist_ok=True)
            file.touch(0o600)
            file.write_text(content)
        (self._folder / "names").mkdir()

    # Pods

    def of(self, deployment: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.deployment == deployment and pod.running]

    def start(self, deployment: str) -> Pod:
        pod = Pod(deployment, next(self._numbers), self._folder)
        pod.address = self._namespaces.add(pod.number) if self._namespaces else on_loopback(pod.number)
        (pod.folder / "tmp").mkdir(parents=True)
        self._run(pod)
        self.pods.append(pod)
        self.publish()
        return pod

    def _run(self, pod: Pod) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": python_path(HERE / "pod"),
            "BATON_POD_NAMES": str(self._folder / "names"),
            "HOSTNAME": pod.name,
            "TMPDIR": str(pod.folder / "tmp"),
        }
        within = self._namespaces.within(pod.number) if self._namespaces else []
        command = [*within, sys.executable, "-m", "baton.cli.main", *self._arguments(pod)]
        with pod.log.open("ab") as log:
            pod.popen = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)

    def _arguments(self, pod: Pod) -> list[str]:
        command, *given = container_of(self.deployments[pod.deployment])["args"]
        given = given if given[0].startswith("--") else given[1:]  # the model
        if not self._namespaces:
            given = [self._free.get(each, each).replace("0.0.0.0", pod.address) for each in given]
        for there, here in self._free.items():
            given = [each.removesuffix(f":{there}") + f":{here}" if each.endswith(f":{there}") else each for each in given]
        for there, folder in self._volumes.items():
            given = [str(folder / each.removeprefix(f"{there}/")) if each.startswith(there) else each for each in given]
        if "--device" in given:
            given[given.index("--device") + 1] = "cpu"
        more = ["--handoff", "always", "--handoff-tokens-min", "0"] if command == "router" else self._options
        return [command, str(self._model), *given, *more, "--served-model-name", "tiny"]

    def replace(self, pod: Pod) -> Pod:
        """As the Deployment's rolling update does it. The old pod must end by itself, without an error."""
        surge = self.deployments[pod.deployment]["strategy"]["rollingUpdate"]["maxSurge"]
        if not surge:
            self.stop(pod)
        new = self.start(pod.deployment)
        self.wait_ready(new)
        if surge:
            self.stop(pod)
        return new

    def stop(self, pod: Pod) -> None:
        pod.popen.terminate()
        until(lambda: not self.ready(pod), f"{pod.name} is red, or gone")
        pod.in_service = False  # Services notice later than the pod
        assert pod.popen.wait(START_SECONDS) == 0
        self.publish()

    def kill(self, pod: Pod) -> None:
        """Kill its container without a warning. The same pod, with its name and address, gets another one."""
        pod.popen.kill()
        pod.popen.wait(60)
        self._run(pod)
        self.wait_ready(pod)

    def wait_ready(self, *pods: Pod) -> None:
        for pod in pods or self.pods:
            until(lambda pod=pod: self.ready(pod), f"{pod.name} is ready", START_SECONDS)
            pod.in_service = True

    def ready(self, pod: Pod) -> bool:
        assert pod.running or pod.popen.returncode == 0, f"{pod.name} ended with {pod.popen.returncode}"
        try:
            return asyncio.run(ask(self.ports["http"], "/ready", host=pod.address)).status == 200
        except (OSError, EOFError):
            return False

    # Services

    def publish(self) -> None:
        """Writes the addresses of Services without an address of their own (headless ones)."""
        for name, spec in self.services.items():
            if spec.get("clusterIP") == "None":
                assert spec["publishNotReadyAddresses"]
                with self._lock:
                    lines = [pod.address for pod in self._selected(spec) if pod.running]
                    new = self._folder / f"{name}.new"
                    new.write_text("\n".join(lines))
                    new.replace(self._folder / "names" / name)

    def _selected(self, service: dict[str, Any]) -> list[Pod]:
        labels = {name: spec["template"]["metadata"]["labels"] for name, spec in self.deployments.items()}
        return [pod for pod in self.pods if service["selector"].items() <= labels[pod.deployment].items()]

    def endpoints(self, service: str) -> list[Pod]:
        """The pods to which the Service sends."""
        return [pod for pod in self._selected(self.services[service]) if pod.running and pod.in_service]

    def metrics(self, pod: Pod) -> str:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        reply: Reply = asyncio.run(ask(self.ports["admin"], "/metrics", host=pod.address, headers=headers))
        assert reply.status == 200, reply.content
        return reply.content.decode()


def container_of(deployment: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any]
    (container,) = deployment["template"]["spec"]["containers"]
    return container


def on_loopback(number: int) -> str:
    """An address of this machine that no other test has."""
    pid = os.getpid()
    return f"127.{128 + (pid >> 8) % 127}.{pid % 256}.{number}"
