"""What `baton up --on ray` asks Ray for, and its words when that does not fit. Ray itself: tests/chaos/test_on_ray.py."""

from __future__ import annotations

import pytest

from baton.cli.cluster_options import RayOptions
from baton.cli.on_ray.bundles import HEAD, Bundle, bundles_of, misfit, threads_for
from baton.cli.settings import Given
from baton.config.schema import all_settings
from baton.errors import InvalidConfig

ROLES = {"prefill-0": "prefill", "decode-0": "decode"}


def test_the_router_comes_first_and_every_instance_has_its_own():
    found = bundles_of(ROLES, threads=3, gpu=True)
    assert [str(one) for one in found] == [
        "router needs the head node",
        "prefill-0 needs 3 CPUs and 1 GPU",
        "decode-0 needs 3 CPUs and 1 GPU",
    ]
    assert bundles_of(ROLES, threads=3, gpu=False)[1].resources == {"CPU": 3.0}


@pytest.mark.parametrize(
    ("nodes", "instances", "threads"),
    [
        ([{"CPU": 2.0}, {"CPU": 2.0}], 2, 1),
        ([{"CPU": 16.0}, {"CPU": 16.0}], 2, 15),
        ([{"CPU": 64.0}, {"CPU": 8.0}], 2, 8),
        ([{"CPU": 1.0}], 4, 1),
        ([{"GPU": 8.0}], 1, 1),
        ([], 1, 1),
    ],
)
def test_default_threads(nodes, instances, threads):
    assert threads_for(nodes, instances) == threads


def test_the_one_that_does_not_fit_is_named():
    bundles = bundles_of(ROLES, threads=2, gpu=True)
    assert misfit(bundles, [{"CPU": 8.0, "GPU": 2.0, HEAD: 1.0}]) == ""
    assert (
        misfit(bundles, [{"CPU": 8.0, "GPU": 1.0, HEAD: 1.0}])
        == "decode-0 needs 2 CPUs and 1 GPU; the node with most has 6 CPUs and 0 GPUs free"
    )
    assert misfit(bundles[1:], []).endswith("has 0 CPUs and 0 GPUs free")


def test_apart_means_a_node_each():
    bundles = [Bundle(f"mixed-{number}", "mixed", {"CPU": 1.0}) for number in range(2)]
    assert misfit(bundles, [{"CPU": 8.0}]) == ""
    assert "mixed-1 needs 1 CPU" in misfit(bundles, [{"CPU": 8.0}], apart=True)
    assert misfit(bundles, [{"CPU": 8.0}, {"CPU": 1.0}], apart=True) == ""


def test_on_is_a_key_of_the_file_too(tmp_path):
    """YAML reads the bare word as true."""
    file = tmp_path / "up.yaml"
    file.write_text("on: ray\ncluster-name: chat\n")
    assert Given({"config": file}, all_settings(RayOptions)).read(RayOptions) == RayOptions(on="ray", cluster_name="chat")


@pytest.mark.parametrize(
    ("settings", "words"), [({"attach": True, "detach": True}, "exclude"), ({"cluster_name": "a/b"}, "without /")]
)
def test_options_that_make_no_sense(settings, words):
    with pytest.raises(InvalidConfig, match=words):
        RayOptions(**settings)
