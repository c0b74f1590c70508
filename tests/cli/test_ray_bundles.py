"""What `baton up --on ray` asks Ray for, and its words when that does not fit. Ray itself: tests/chaos/test_on_ray.py."""

from __future__ import annotations

import pytest
from command_rig import baton_here, said

from baton.cli.cluster_options import PlacementOptions, RayOptions, UpOptions
from baton.cli.key_files import with_key_files
from baton.cli.on_ray import command
from baton.cli.on_ray.bundles import HEAD, Bundle, bundles_of, misfit, threads_for
from baton.cli.on_ray.command import job_of
from baton.cli.say import Failed
from baton.cli.settings import Given
from baton.config import ServeConfig
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


def test_each_rank_of_an_instance_has_its_cpus_and_its_gpu():
    assert str(bundles_of(ROLES, threads=3, gpu=True, ranks=2)[1]) == "prefill-0 needs 6 CPUs and 2 GPUs"


def test_up_on_ray_takes_several_ranks(monkeypatch, tmp_path):
    """Found by an audit: the command refused what the bundles and the pages allow."""
    jobs = []
    monkeypatch.setattr(
        command,
        "up_on_ray",
        lambda ray, options, given, serve, quiet: jobs.append(job_of(ray, options, given, serve, gpus=4)),
    )
    ran = baton_here("up", str(tmp_path), "--on", "ray", "--tensor-parallel-size", "2", "--device", "cuda")
    assert ran.returncode == 0, said(ran)
    assert [(job.ranks, job.gpu, len(job.roles)) for job in jobs] == [(2, True, 2)]


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


def job(tmp_path, monkeypatch, **given):
    """The job of `baton up --on ray` with these options, given in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    own = Given(given, [*all_settings(ServeConfig), *all_settings(PlacementOptions)])
    return job_of(RayOptions(on="ray"), UpOptions(mixed=1), own, with_key_files(own.read(ServeConfig)), gpus=0)


def test_keys_are_read_by_the_driver_and_given_to_the_router_alone(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("secret-1\n")
    (tmp_path / "admins").write_text("secret-2\n")
    made = job(tmp_path, monkeypatch, api_key_file="keys", admin_api_key_file="admins")
    assert (made.router["api_key"], made.router["admin_api_key"]) == (["secret-1"], ["secret-2"])
    assert not [name for name in (*made.router, *made.serve) if name.endswith("key_file")]
    assert not {"api_key", "admin_api_key"} & set(made.serve)


def test_an_instance_serves_no_clients(tmp_path, monkeypatch):
    for name in ("server.pem", "template.jinja"):
        (tmp_path / name).touch()
    made = job(
        tmp_path, monkeypatch, ssl_certfile="server.pem", chat_template="template.jinja", root_path="/llm", max_num_seqs=8
    )
    assert made.serve == {"max_num_seqs": 8}
    assert made.router["ssl_certfile"] == str(tmp_path / "server.pem")
    assert made.router["chat_template"] == str(tmp_path / "template.jinja")


def test_paths_are_absolute_and_names_of_models_stay(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    made = job(tmp_path, monkeypatch, model="model", kv_storage="file:kv", speculate="draft:model")
    assert made.serve["model"] == made.router["model"] == str(tmp_path / "model")
    assert made.serve["kv_storage"] == f"file:{tmp_path / 'kv'}"
    assert made.serve["speculate"] == f"draft:{tmp_path / 'model'}"
    assert job(tmp_path, monkeypatch, model="Qwen/Qwen2.5-0.5B-Instruct").serve["model"] == "Qwen/Qwen2.5-0.5B-Instruct"


def test_clients_with_certificates_are_refused_in_words(tmp_path, monkeypatch):
    with pytest.raises(Failed, match="ssl-ca-certs"):
        job(tmp_path, monkeypatch, ssl_certfile="a.pem", ssl_ca_certs="b.pem")
