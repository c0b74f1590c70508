"""deploy/compose.yaml, Prometheus' settings and Grafana's board, held against what they name: there is no docker here."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from exported import router_samples
from manifests import DEPLOY, options

from baton.addresses import RouterSource, parse_listening, parse_router
from baton.cli.key_files import with_key_files
from baton.config import ServeConfig
from baton.trust.secret import read_secrets

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ("router", "prefill", "decode")
BOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "baton.json").read_text("utf-8"))


def mounts(service: str) -> dict[str, str]:
    """Source by place in the container."""
    return {place: source for source, place, *_ in (each.split(":") for each in SERVICES[service]["volumes"])}


def test_every_flag_exists_and_services_find_each_other():
    given = {name: options(SERVICES[name]["command"]) for name in OURS}
    router = given["router"]
    for name in ("prefill", "decode"):
        source = parse_router(given[name]["router"][0])
        assert isinstance(source, RouterSource)
        assert source.name is not None
        assert (source.name.host, source.name.port) == ("router", router["cluster_port"])
        assert given[name]["role"] == name
        assert parse_listening(given[name]["transfer_address"]).host == "0.0.0.0"
    for name in OURS:
        assert (given[name]["host"], given[name]["port"]) == ("0.0.0.0", ServeConfig().port), "which the health check asks"
        assert float(SERVICES[name]["stop_grace_period"].rstrip("s")) >= ServeConfig().drain_seconds_max + 15
    assert router["cluster_host"] == router["admin_host"] == "0.0.0.0"
    assert SERVICES["router"]["ports"] == [f"127.0.0.1:8000:{router['port']}"], "there is no API key"


def test_volumes_and_files_that_are_mounted_exist():
    for name in SERVICES:
        for source in mounts(name).values():
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], source
        needed = SERVICES[name].get("depends_on", [])
        assert set(needed) <= SERVICES.keys()
    for name in OURS:
        for option in ("cluster_secret", "admin_api_key_file"):
            path = options(SERVICES[name]["command"]).get(option)
            assert not path or str(Path(path).parent) in mounts(name)
        assert mounts(name)["/cache"] == "cache"


def test_keys_are_made_once_and_accepted(tmp_path: Path):
    (script,) = SERVICES["keys"]["command"]
    (tmp_path / "cluster").mkdir()
    (tmp_path / "admin").mkdir()
    script = script.replace("/keys", str(tmp_path)).replace("1000:1000", f"{os.geteuid()}:{os.getegid()}")
    assert "$" not in script, "compose would replace it"
    found = []
    for _ in range(2):
        subprocess.run([*SERVICES["keys"]["entrypoint"], script], check=True, timeout=60)
        keys = with_key_files(ServeConfig(admin_api_key_file=str(tmp_path / "admin" / "key"))).admin_api_key
        found.append((read_secrets(tmp_path / "cluster" / "secret").secrets[0].key, keys))
    assert found[0] == found[1]
    assert (tmp_path / "admin" / "key").stat().st_mode & 0o777 == 0o444, "Prometheus has another user"
    assert mounts("keys") == {"/keys/cluster": "cluster-secret", "/keys/admin": "admin-key"}


def test_prometheus_asks_the_admin_port_of_the_router_and_keeps_labels_of_instances():
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    router = options(SERVICES["router"]["command"])
    assert job["static_configs"] == [{"targets": [f"router:{router['admin_port']}"]}]
    assert job["authorization"]["credentials_file"] == router["admin_api_key_file"]
    assert str(Path(router["admin_api_key_file"]).parent) in mounts("prometheus")
    assert job["honor_labels"], "else `instance` of a router's samples is renamed"


def test_grafana_finds_its_board_and_prometheus():
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/baton.yaml").read_text("utf-8"))["providers"]
    assert mounts("grafana")[provider["options"]["path"]] == "./grafana/dashboards"
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text("utf-8"))["datasources"]
    assert source["url"] == "http://prometheus:9090"
    used = [part["datasource"] for panel in BOARD["panels"] for part in (panel, *panel["targets"])]
    assert {(each["type"], each["uid"]) for each in used} == {(source["type"], source["uid"])}


def test_metrics_and_labels_of_the_board_exist():
    samples = router_samples()
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            (name,) = re.findall(r"(?:baton|vllm):\w+", target["expr"])
            used = {label for labels in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in labels.split(", ")}
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert used <= samples[name], target["expr"]
            assert shown == used - {"le"}, target["legendFormat"]
            assert name.endswith(("_total", "_bucket")) == ("rate(" in target["expr"]), "a counter is shown as a rate"


def test_panels_do_not_overlap():
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
