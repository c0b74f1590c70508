"""`baton up --on ray` and `baton down` where things go wrong, with a stand-in for Ray: names that are taken meanwhile, Ctrl-C
while Ray looks for room, no Ray, a wrong address."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.cli.on_ray.bundles import HEAD
from baton.cli.on_ray.driver import RayJob, start
from baton.cli.on_ray.ray_api import RayCluster
from baton.cli.say import Failed

JOB = RayJob({"mixed-0": "mixed"}, {}, {}, "pack", gpu=False, threads=1, start_seconds=1.0)


class Actor:
    """What `ray.get_actor` returns: its calls are answered at once."""

    def __init__(self, ray: FakeRay, name: str) -> None:
        self.name = name
        self.call = SimpleNamespace(remote=lambda method, *arguments: ray.call(name, method))


class FakeRay(ModuleType):
    """The part of Ray that ray_api.py uses. A detached group and an actor are those of their owner, a driver."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.owner = "a"
        self.groups: dict[str, str] = {}
        self.actors: dict[str, str] = {}
        self.unready: dict[str, str] = {}
        self.while_waiting: Any = lambda: None
        self.exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))
        self.util = SimpleNamespace(list_named_actors=self._listed)
        self.refusal: Exception | None = None

    def init(self, **_: Any) -> None:
        if self.refusal is not None:
            raise self.refusal

    def shutdown(self) -> None: ...

    def _listed(self, all_namespaces: bool) -> list[dict[str, str]]:
        return [{"namespace": "baton", "name": name} for name in self.actors]

    def get_actor(self, name: str, namespace: str) -> Actor:
        if name not in self.actors:
            raise ValueError(f"Failed to look up actor with name '{name}'")
        return Actor(self, name)

    def call(self, name: str, method: str) -> str:
        if method == "wait_ready":
            return self.unready.get(name, "")
        return {"url": "http://router:8000", "stop": "ended"}[method]

    def get(self, answer: str, timeout: float) -> str:
        return answer

    def kill(self, actor: Actor, no_restart: bool) -> None:
        del self.actors[actor.name]

    def remote(self, made: type) -> Any:
        def options(name: str, **_: Any) -> Any:
            def create(*_: Any) -> None:
                if name in self.actors:
                    raise ValueError(f"Actor with name '{name}' already exists in the namespace baton")
                self.actors[name] = self.owner

            return SimpleNamespace(remote=create)

        return SimpleNamespace(options=options)

    # ray.util.placement_group

    def placement_group(self, bundles: list[Any], name: str, **_: Any) -> Any:
        if name in self.groups:
            raise ValueError(f"Failed to create placement group: name '{name}' already exists")
        self.groups[name] = self.owner

        def wait(timeout_seconds: float) -> bool:
            self.while_waiting()
            return True

        return SimpleNamespace(name=name, wait=wait)

    def get_placement_group(self, name: str) -> Any:
        if name not in self.groups:
            raise ValueError("there is no such group")
        return SimpleNamespace(name=name)

    def remove_placement_group(self, group: Any) -> None:
        self.groups.pop(group.name, None)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    groups = ModuleType("ray.util.placement_group")
    groups.__dict__.update(
        {name: getattr(fake, name) for name in ("placement_group", "get_placement_group", "remove_placement_group")}
    )
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda *_, **more: None  # type: ignore[attr-defined]
    state = ModuleType("ray._private.state")
    state.available_resources_per_node = lambda: {"head": {"CPU": 4.0, HEAD: 1.0}}  # type: ignore[attr-defined]
    modules = {"ray": fake, "ray.util": ModuleType("ray.util"), "ray._private": ModuleType("ray._private")}
    more = {"ray.util.placement_group": groups, "ray.util.scheduling_strategies": strategies, "ray._private.state": state}
    for name, module in {**modules, **more}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def cluster() -> RayCluster:
    return RayCluster("auto", "chat", insecure=True)


def started(ray: FakeRay) -> str:
    return start(cluster(), JOB, lambda line: None)


def test_a_cluster_starts_and_is_ready(ray):
    assert started(ray) == "http://router:8000"
    assert sorted(ray.actors) == ["chat/mixed-0", "chat/router"]


def test_a_name_that_is_taken_while_ray_looks_for_room_ends_nothing_of_the_other(ray):
    """The other command's keepers stay, and what this one has reserved is free again."""

    def other_starts() -> None:
        ray.actors.update({"chat/router": "b", "chat/mixed-0": "b"})

    ray.while_waiting = other_starts
    with pytest.raises(Failed, match="Ray has a cluster chat already"):
        started(ray)
    assert ray.actors == {"chat/router": "b", "chat/mixed-0": "b"}
    assert ray.groups == {}


def test_a_name_that_is_taken_at_the_last_moment_ends_only_own_keepers(ray, monkeypatch):
    keepers = RayCluster.keepers
    looks: list[int] = []

    def late(self: RayCluster) -> list[str]:
        found = keepers(self)
        looks.append(1)
        if len(looks) == 2:
            ray.actors["chat/mixed-0"] = "b"
        return found

    monkeypatch.setattr(RayCluster, "keepers", late)
    with pytest.raises(Failed, match="Ray does not start mixed-0: Actor with name"):
        started(ray)
    assert ray.actors == {"chat/mixed-0": "b"}
    assert ray.groups == {}


def test_two_reservations_of_one_name_are_a_plain_word(ray):
    ray.groups["baton/chat"] = "b"
    with pytest.raises(Failed, match=r"already exists.*`baton down --on ray --cluster-name chat` releases"):
        started(ray)
    assert ray.groups == {"baton/chat": "b"}


def test_ctrl_c_while_ray_looks_for_room_leaves_nothing_reserved(ray):
    def interrupt() -> None:
        assert ray.groups
        raise KeyboardInterrupt

    ray.while_waiting = interrupt
    with pytest.raises(KeyboardInterrupt):
        started(ray)
    assert ray.groups == {}
    assert ray.actors == {}


def test_a_failed_start_leaves_nothing(ray):
    ray.unready["chat/mixed-0"] = "mixed-0 exited with code 2"
    with pytest.raises(Failed, match=r"mixed-0 was not ready within 1 s: mixed-0 exited with code 2; its log: `ray logs`"):
        started(ray)
    assert ray.actors == {}
    assert ray.groups == {}


def test_down_releases_what_a_killed_start_has_reserved(ray):
    ray.groups["baton/chat"] = "b"
    done = CliRunner().invoke(app, ["down", "--cluster-name", "chat", "--ray-insecure"])
    assert (done.exit_code, ray.groups) == (0, {})
    assert "what it had reserved is free again" in done.output
    done = CliRunner().invoke(app, ["down", "--cluster-name", "chat", "--ray-insecure"])
    assert done.exit_code == 1
    assert "Ray has no cluster chat" in done.output


# Bad input


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Failed, match=r"pip install 'baton-serve\[ray\]' here and on every node"):
        cluster()


@pytest.mark.parametrize("mode", ["", "disabled"])
def test_ray_without_authentication_is_refused(ray, monkeypatch, mode):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(Failed, match="--ray-insecure"):
        RayCluster("auto", "chat", insecure=False)


@pytest.mark.parametrize(
    "error",
    [ConnectionError("Could not find any running Ray instance.\nmore"), ValueError("bad address"), RuntimeError("version")],
)
def test_a_wrong_address_is_named_with_rays_first_line(ray, error):
    ray.refusal = error
    first = str(error).splitlines()[0]
    with pytest.raises(Failed, match=f"--ray-address head:1: {first}; start Ray with `ray start --head`"):
        RayCluster("head:1", "chat", insecure=True)
