"""The manifests of deploy/kubernetes, held against what they name: there is no cluster here to try them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from baton.addresses import RouterSource, parse_listening, parse_router
from baton.api.app import ROUTES
from baton.cli.main import app
from baton.config import ServeConfig
from baton.config.schema import all_settings

PLACE = Path(__file__).parent.parent.parent / "deploy" / "kubernetes"
OVERLAYS = sorted(folder.name for folder in (PLACE / "overlays").iterdir())


def resources(folder: Path) -> list[dict[str, Any]]:
    found = []
    for name in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]:
        path = (folder / name).resolve()
        found += resources(path) if path.is_dir() else [each for each in yaml.safe_load_all(path.read_text()) if each]
    return found


def of_kind(overlay: str, kind: str) -> dict[str, dict[str, Any]]:
    found = [each for each in resources(PLACE / "overlays" / overlay) if each["kind"] == kind]
    assert len({each["metadata"]["name"] for each in found}) == len(found)
    return {each["metadata"]["name"]: each["spec"] for each in found}


def pods(overlay: str) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Labels, the pod, and its only container."""
    templates = [spec["template"] for spec in of_kind(overlay, "Deployment").values()]
    return [(each["metadata"]["labels"], each["spec"], *each["spec"]["containers"]) for each in templates]


def options(container: dict[str, Any]) -> dict[str, Any]:
    """What the command makes of the arguments; fails for a flag that it does not know."""
    command, *arguments = container["args"]
    return get_command(app).commands[command].make_context(command, list(arguments)).params  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_flag_exists_and_settings_are_accepted(overlay: str):
    names = {setting.name for setting in all_settings()}
    for _, _, container in pods(overlay):
        given = {name: value for name, value in options(container).items() if name in names and value not in (None, [], ())}
        ServeConfig(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()} | unsecret(given)
        )


def unsecret(given: dict[str, Any]) -> dict[str, Any]:
    """`baton router` has a secret without a --router."""
    return {} if given.get("router") else {"cluster_secret": ""}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_are_listened_on_and_probes_ask_open_routes(overlay: str):
    open_paths = {route.path for route in ROUTES if route.right == "open"}
    for labels, _, container in pods(overlay):
        given, ports = options(container), {each["name"]: each["containerPort"] for each in container["ports"]}
        listened = {"http": given["port"]}
        if labels["role"] == "router":
            listened["cluster"] = given["cluster_port"]
            assert given["cluster_host"] == "0.0.0.0"
        else:
            listened["transfer"] = parse_listening(given["transfer_address"]).port
        assert (ports, given["host"]) == (listened, "0.0.0.0")
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["path"] in open_paths
            assert container[probe]["httpGet"]["port"] == "http"
        assert container["livenessProbe"]["httpGet"]["path"] == container["startupProbe"]["httpGet"]["path"] == "/live"
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_instances_find_routers_that_are_not_ready(overlay: str):
    services = of_kind(overlay, "Service")
    (router,) = [container for labels, _, container in pods(overlay) if labels["role"] == "router"]
    for labels, _, container in pods(overlay):
        if labels["role"] == "router":
            continue
        given = options(container)
        source = parse_router(given["router"][0])
        assert isinstance(source, RouterSource)
        assert source.name is not None
        service = services[source.name.host]
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
        assert service["ports"][0]["port"] == source.name.port == options(router)["cluster_port"]
        assert service["selector"]["role"] == "router"
        assert given["role"] == labels["role"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_secrets_are_mounted_for_the_group_and_a_drain_has_its_time(overlay: str):
    for labels, pod, container in pods(overlay):
        given = options(container)
        context = pod["securityContext"]
        assert context["runAsNonRoot"]
        assert context["fsGroup"] == context["runAsGroup"]
        drain = given.get("drain_seconds_max") or ServeConfig().drain_seconds_max
        assert pod["terminationGracePeriodSeconds"] >= drain + 15
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert mounts.keys() == volumes.keys()
        files = [given["cluster_secret"], *([given["api_key_file"]] if labels["role"] == "router" else [])]
        for file in files:
            (name,) = [name for name, place in mounts.items() if Path(file).parent == Path(place)]
            assert volumes[name]["secret"]["defaultMode"] == 0o440


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_select_the_pods_they_mean(overlay: str):
    labels = [labels for labels, _, _ in pods(overlay)]
    selectors = [
        spec["selector"]["matchLabels"]
        for kind in ("Deployment", "PodDisruptionBudget")
        for spec in of_kind(overlay, kind).values()
    ]
    selectors += [spec["selector"] for spec in of_kind(overlay, "Service").values()]
    for selector in selectors:
        assert len([each for each in labels if selector.items() <= each.items()]) == 1
