"""The manifests of deploy/kubernetes, held against what they name: there is no cluster here to try them with."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from exported import router_samples
from manifests import DEPLOY, OVERLAYS, folder_of, of_kind, options, rendered

from baton.addresses import RouterSource, parse_listening, parse_router
from baton.api.app import ROUTES
from baton.cli.key_files import with_key_files
from baton.config import ServeConfig
from baton.config.device_defaults import CPU
from baton.config.schema import all_settings
from baton.trust.secret import read_secrets

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def pods(overlay: str) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Labels, the pod, and its only container."""
    templates = [spec["template"] for spec in of_kind(overlay, "Deployment").values()]
    return [(each["metadata"]["labels"], each["spec"], *each["spec"]["containers"]) for each in templates]


@cache
def has_kustomize() -> bool:
    if shutil.which("kubectl") is None:
        return False
    ran = subprocess.run(["kubectl", "version", "--client", "-o", "json"], capture_output=True, check=False, timeout=60)
    return b"kustomizeVersion" in ran.stdout


@each_overlay
def test_kubectl_renders_the_same(overlay: str):
    """These tests render kustomizations by themselves (manifests.py)."""
    if not has_kustomize():
        pytest.skip("there is no kubectl of 1.24 or later, whose kustomize knows patches with a target")
    ran = subprocess.run(["kubectl", "kustomize", str(folder_of(overlay))], capture_output=True, check=True, timeout=60)

    def named(documents: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
        return {(each["kind"], each["metadata"]["name"]): each for each in documents}

    assert named(list(yaml.safe_load_all(ran.stdout))) == named(rendered(folder_of(overlay)))


VERSIONS = ("1.25", "1.37")
"""The oldest and the newest version whose schemas the package has."""


@each_overlay
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_follow_the_schemas_of_kubernetes(overlay: str, version: str):
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate (extra manifests)")
    for document in rendered(folder_of(overlay)):
        validator.validate(document, version, strict=True)


def test_a_misspelt_field_is_found():
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate (extra manifests)")
    (router,) = [each for each in rendered(folder_of("mixed")) if each["metadata"]["name"] == "baton-router"][:1]
    router["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["failureThreshhold"] = 3
    with pytest.raises(validator.ValidationError, match="failureThreshhold"):
        validator.validate(router, VERSIONS[0], strict=True)


@each_overlay
def test_every_flag_exists_and_settings_are_accepted(overlay: str):
    names = {setting.name for setting in all_settings()}
    for _, _, container in pods(overlay):
        given = {
            name: value for name, value in options(container["args"]).items() if name in names and value not in (None, [], ())
        }
        ServeConfig(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()} | unsecret(given)
        )


def unsecret(given: dict[str, Any]) -> dict[str, Any]:
    """`baton router` has a secret without a --router."""
    return {} if given.get("router") else {"cluster_secret": ""}


@each_overlay
def test_ports_are_listened_on_and_probes_ask_open_routes(overlay: str):
    open_paths = {route.path for route in ROUTES if route.right == "open"}
    for labels, _, container in pods(overlay):
        given, ports = options(container["args"]), {each["name"]: each["containerPort"] for each in container["ports"]}
        listened = {"http": given["port"]}
        if labels["role"] == "router":
            listened |= {"cluster": given["cluster_port"], "admin": given["admin_port"]}
            assert given["cluster_host"] == given["admin_host"] == "0.0.0.0"
        else:
            listened["transfer"] = parse_listening(given["transfer_address"]).port
        assert (ports, given["host"]) == (listened, "0.0.0.0")
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["path"] in open_paths
            assert container[probe]["httpGet"]["port"] == "http"
        assert container["livenessProbe"]["httpGet"]["path"] == container["startupProbe"]["httpGet"]["path"] == "/live"
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


@each_overlay
def test_instances_find_routers_that_are_not_ready(overlay: str):
    services = of_kind(overlay, "Service")
    (router,) = [container for labels, _, container in pods(overlay) if labels["role"] == "router"]
    for labels, _, container in pods(overlay):
        if labels["role"] == "router":
            continue
        given = options(container["args"])
        source = parse_router(given["router"][0])
        assert isinstance(source, RouterSource)
        assert source.name is not None
        service = services[source.name.host]
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
        assert service["ports"][0]["port"] == source.name.port == options(router["args"])["cluster_port"]
        assert service["selector"]["role"] == "router"
        assert given["role"] == labels["role"]


@each_overlay
def test_secrets_are_mounted_for_the_group_and_a_drain_has_its_time(overlay: str):
    for labels, pod, container in pods(overlay):
        given = options(container["args"])
        context = pod["securityContext"]
        assert context["runAsNonRoot"]
        assert context["fsGroup"] == context["runAsGroup"]
        drain = given.get("drain_seconds_max") or ServeConfig().drain_seconds_max
        assert pod["terminationGracePeriodSeconds"] >= drain + 15
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert mounts.keys() == volumes.keys()
        keys = [given["api_key_file"], given["admin_api_key_file"]] if labels["role"] == "router" else []
        for file in [given["cluster_secret"], *keys]:
            (name,) = [name for name, place in mounts.items() if Path(file).parent == Path(place)]
            assert volumes[name]["secret"]["defaultMode"] == 0o440


@each_overlay
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


def ports_open_to(policy: dict[str, Any]) -> dict[str, Any]:
    """By name of the port, the peers that may connect. None: all."""
    return {port["port"]: rule.get("from") for rule in policy["ingress"] for port in rule["ports"]}


@each_overlay
def test_routers_are_spread_over_nodes(overlay: str):
    """A preference: with one node both run there."""
    [(labels, pod)] = [(labels, pod) for labels, pod, _ in pods(overlay) if labels["role"] == "router"]
    [spread] = pod["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")


@each_overlay
def test_only_the_api_is_open_to_all(overlay: str):
    policies, ours = of_kind(overlay, "NetworkPolicy"), [{"podSelector": {"matchLabels": {"app": "baton"}}}]
    for labels, _, container in pods(overlay):
        assert labels["app"] == "baton"
        ports = {each["name"] for each in container["ports"]}
        if labels["role"] == "router":
            policy = policies["baton-router"]
            assert policy["podSelector"]["matchLabels"] == labels
            (monitoring,) = ports_open_to(policy)["admin"]
            assert ports_open_to(policy) == {"http": None, "cluster": ours, "admin": [monitoring]}
            assert monitoring.keys() == {"namespaceSelector"}
        else:
            policy = policies["baton-instances"]
            assert policy["podSelector"]["matchExpressions"] == [{"key": "role", "operator": "NotIn", "values": ["router"]}]
            (transfer,) = (each["containerPort"] for each in container["ports"] if each["name"] == "transfer")
            assert ports_open_to(policy) == {"transfer": ours, transfer + 1: ours}
            ((_, ranks),) = (rule["ports"] for rule in policy["ingress"])
            assert ranks["endPort"] == transfer + 7, "a port for each of eight ranks"
            ports.add(transfer + 1)
        assert policy["policyTypes"] == ["Ingress"]
        assert ports_open_to(policy).keys() <= ports


RULES = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text("utf-8"))["externalRules"]


def test_rules_of_the_adapter_name_metrics_and_labels_of_routers():
    samples = router_samples()
    for rule in RULES:
        name, query = rule["seriesQuery"], rule["metricsQuery"]
        assert rule["name"]["as"] == name.replace(":", "_")
        assert set(re.findall(r"baton:\w+", query)) == {name}
        assert set(re.findall(r"by \((\w+)\)", query)) <= samples[name]
        assert ("role" in samples[name]) == ("<<.LabelMatchers>>" in query), "an autoscaler selects a role"


@each_overlay
def test_autoscalers_read_metrics_that_the_adapter_has_and_own_the_number_of_replicas(overlay: str):
    scalers, deployments = of_kind(overlay, "HorizontalPodAutoscaler"), of_kind(overlay, "Deployment")
    assert bool(scalers) == overlay.endswith("-autoscaled")
    queries = {rule["name"]["as"]: rule["metricsQuery"] for rule in RULES}
    for scaler in scalers.values():
        deployment = deployments[scaler["scaleTargetRef"]["name"]]
        assert "replicas" not in deployment, "an apply would undo what the autoscaler has done"
        for metric in scaler["metrics"]:
            wanted = metric["external"]["metric"]
            labels = wanted.get("selector", {}).get("matchLabels", {})
            assert ("<<.LabelMatchers>>" in queries[wanted["name"]]) == bool(labels)
            assert not labels or labels["role"] == deployment["template"]["metadata"]["labels"]["role"]
            if wanted["name"] == "baton_requests_running":
                assert int(metric["external"]["target"]["averageValue"]) < CPU.slots, "it would never be reached"
    unscaled = {name for name, spec in deployments.items() if "replicas" not in spec}
    assert unscaled == {scaler["scaleTargetRef"]["name"] for scaler in scalers.values()}


@each_overlay
def test_instances_on_cpus_have_a_limit_of_cores(overlay: str):
    """Without one they would have as many threads as their node has cores, and disturb each other."""
    for labels, _, container in pods(overlay):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert requests["memory"] == limits["memory"]
        if labels["role"] != "router" and "nvidia.com/gpu" not in limits:
            assert requests["cpu"] == limits["cpu"]


def test_instances_of_the_gpu_overlay_have_a_gpu_each():
    (instance,) = [container for labels, _, container in pods("gpu") if labels["role"] != "router"]
    (router,) = [container for labels, _, container in pods("gpu") if labels["role"] == "router"]
    assert instance["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert options(instance["args"])["device"] == "cuda"
    assert options(instance["args"])["model"] == options(router["args"])["model"], "the router has its tokenizer"
    assert instance["image"] == "baton-gpu"
    image = (DEPLOY / "gpu.Dockerfile").read_text("utf-8")
    assert f"-t {instance['image']} " in image
    assert f"\nFROM {router['image']}\n" in image
    torch = re.search(r"torch==\S+", (DEPLOY.parent / "Makefile").read_text("utf-8"))
    assert torch is not None
    assert torch[0] in image, "the version that is tested"


# The page


def page_lines(section: str) -> list[str]:
    """Lines of the first block of commands below a heading of docs/deploy.md."""
    text = (DEPLOY.parent / "docs" / "deploy.md").read_text("utf-8").split(f"\n### {section}\n")[1]
    return re.sub(r"\s+# .*", "", text.split("```")[1], flags=re.M).strip().splitlines()


def test_secrets_of_the_page_are_those_that_the_manifests_mount(tmp_path: Path):
    make, *lines = page_lines("Kubernetes")
    subprocess.run(["sh", "-euc", make], cwd=tmp_path, check=True, timeout=60)
    assert read_secrets(tmp_path / "secret")
    assert with_key_files(ServeConfig(api_key_file=str(tmp_path / "keys"), admin_api_key_file=str(tmp_path / "admin")))
    created = {line.split()[4]: set(re.findall(r"--from-file=(\S+)", line)) for line in lines if " create secret " in line}
    (applied,) = [line.split()[-1] for line in lines if " apply " in line]
    overlay = (DEPLOY.parent / applied).name
    for _, pod, container in pods(overlay):
        mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        secrets = {each["name"]: each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
        for option in ("cluster_secret", "api_key_file", "admin_api_key_file"):
            if file := options(container["args"]).get(option):
                assert Path(file).name in created[secrets[mounted[str(Path(file).parent)]]]


def test_two_machines_by_hand_find_each_other():
    _, *lines = page_lines("Two machines by hand")
    router, *instances = [options(line.split()[1:]) for line in lines]
    for given in instances:
        assert given["router"] == [f"tcp://{router['cluster_host']}:{router['cluster_port'] or 8100}"]
        assert parse_listening(given["transfer_address"]).port == 8200
        assert given["cluster_secret"] == router["cluster_secret"]
        assert given["port"] != router["port"], "one of them runs beside the router"
    assert {given["role"] for given in instances} == {"prefill", "decode"}
