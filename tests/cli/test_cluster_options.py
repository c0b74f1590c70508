"""`baton up` and `baton router`: their options, what they divide, and what they refuse before anything is started."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli import local_cluster
from baton.cli import router as router_command
from baton.cli import serve as serve_command
from baton.cli import up as up_command
from baton.cli.cluster_options import _BY_OTHER_OPTIONS, PlacementOptions, RouterOptions, UpOptions
from baton.cli.main import app
from baton.cli.say import Failed
from baton.cli.settings import Given
from baton.config import RouterConfig, ServeConfig
from baton.config.router_process import RouterProcessConfig
from baton.config.schema import GROUPS, all_settings
from baton.errors import InvalidConfig
from baton.runtime.up import UpConfig
from baton.worker.platforms import visible


def read(**given):
    values = Given(given, up_command.settings())
    return values.read(UpOptions), values.read(PlacementOptions), values.read(ServeConfig)


def test_options_of_serve_apply_to_every_instance():
    options, _, serve = read(prefill=2, decode=1, slots=5, kv_blocks=77, threads=3)
    engines = local_cluster.engines_of(options, serve)
    assert {name: engine.role for name, engine in engines.items()} == {
        "prefill-0": "prefill",
        "prefill-1": "prefill",
        "decode-0": "decode",
    }
    for name, engine in engines.items():
        assert (engine.name, engine.worker.slots, engine.worker.blocks, engine.worker.threads) == (name, 5, 77, 3)


@pytest.mark.parametrize(
    ("instances", "cores", "expected"),
    [(2, 2, [1, 1]), (2, 5, [3, 2]), (3, 2, [1, 1, 1]), (1, 4, [4]), (3, 8, [3, 3, 2])],
)
def test_cores_are_divided(instances, cores, expected):
    names = [f"mixed-{number}" for number in range(instances)]
    assert list(local_cluster.shares_of_cores(names, cores).values()) == expected


def test_settings_of_placement_reach_the_router():
    _, placement, serve = read(decode=1, placement="load", handoff_tokens_min=7, migrations_max=1, queue_requests_max=9)
    config = placement.router(serve)
    assert (config.policy, config.handoff_tokens_min, config.migrations_max) == ("load", 7, 1)
    assert (config.queue_requests_max, config.order) == (9, "priority")


def test_nothing_of_the_router_is_out_of_reach():
    """Each of its fields is an option, or a key of --router-limits; and each key is in the document."""
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    _, plain, serve = read(decode=1)
    for each in fields(RouterConfig):
        if each.name in _BY_OTHER_OPTIONS:
            continue
        value = each.default * 1.5 if isinstance(each.default, float) else each.default + 1
        if each.name == "beat_seconds":
            value = each.default / 2
        _, placement, _ = read(decode=1, router_limits=f"{{{each.name}: {value}}}")
        assert placement.router(serve) == replace(plain.router(serve), **{each.name: value})
        default = f"{each.default:g}" if isinstance(each.default, float) else str(each.default)
        assert f"| `{each.name}` | {default} |" in page, each.name
    options = {"order": serve, "queue_requests_max": serve, "queue_tokens_max": serve, "policy": None}
    assert all(name in options or hasattr(plain, name) for name in _BY_OTHER_OPTIONS)


@pytest.mark.parametrize(("gpus", "mixed"), [(0, 2), (1, 1), (4, 4), (100, 64)])
def test_without_a_word_about_instances_there_is_one_per_gpu_or_two(gpus: int, mixed: int):
    options, _, _ = read()
    assert options.or_default(gpus) == UpOptions(mixed=mixed)
    asked, _, _ = read(prefill=1, decode=1)
    assert asked.or_default(gpus) is asked


def test_a_file_has_the_same_keys(tmp_path):
    file = tmp_path / "up.yaml"
    file.write_text("prefill: 1\ndecode: 2\nplacement: load\nslots: 4\n")
    options, placement, serve = read(config=file, decode=3)
    assert (options.prefill, options.decode, placement.placement, serve.max_num_seqs) == (1, 3, "load", 4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prefill": 1}, "--decode is 0, and so is mixed"),
        ({"decode": 65}, "--decode"),
        ({"decode": 1, "placement": "best"}, "--placement"),
        (
            {"decode": 1, "router_limits": "{laps_seconds: 3}"},
            "has no laps_seconds; did you mean lapse_seconds?",
        ),
        ({"decode": 1, "router_limits": "{policy: 3}"}, "--router-limits has no policy"),
        ({"decode": 1, "router_limits": "{lapse_seconds: 0.5}"}, "suspect_seconds must be less than lapse_seconds"),
        ({"decode": 1, "router_limits": "{instances_max: 1.5}"}, "instances_max is 1.5: it must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused(given, words):
    with pytest.raises(Failed, match=words):
        read(**given)


def test_memory_that_one_instance_would_measure_is_refused_for_several():
    options, _, serve = read(prefill=1, decode=1, memory_utilization=0.5)
    with pytest.raises(Failed, match="--kv-memory-gib"):
        local_cluster.require_divisible(options, serve)
    options, _, serve = read(mixed=1, memory_utilization=0.5)
    local_cluster.require_divisible(options, serve)


def test_on_a_gpu_instances_divide_a_share_that_was_given(monkeypatch):
    options, _, serve = read(prefill=1, decode=1, memory_utilization=0.8, device="cuda")
    local_cluster.require_divisible(options, serve)
    monkeypatch.setattr(visible, "visible_gpus", lambda: 1)
    workers = [engine.worker for engine in local_cluster.engines_of(options, serve).values()]
    assert [(one.memory_utilization, one.device_sharers) for one in workers] == [(0.8, 2), (0.8, 2)]


@pytest.mark.parametrize(
    ("counts", "gpus", "expected"),
    [
        ({"prefill": 1, "decode": 1}, 1, {"prefill-0": (0, 2, 0), "decode-0": (0, 2, 1)}),
        ({"prefill": 1, "decode": 1}, 2, {"prefill-0": (0, 1, 0), "decode-0": (1, 1, 0)}),
        ({"mixed": 3}, 2, {"mixed-0": (0, 2, 0), "mixed-1": (1, 1, 0), "mixed-2": (0, 2, 1)}),
        ({"mixed": 2}, 8, {"mixed-0": (0, 1, 0), "mixed-1": (1, 1, 0)}),
        ({"mixed": 2}, 0, {"mixed-0": (0, 1, 0), "mixed-1": (0, 1, 0)}),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_instances_are_spread_over_the_gpus(monkeypatch, device, counts, gpus, expected):
    """Found by a review: all of them took 90 % of GPU 0."""
    monkeypatch.setattr(visible, "visible_gpus", lambda: gpus)
    options, _, serve = read(device=device, **counts)
    engines = local_cluster.engines_of(options, serve)
    workers = {name: engine.worker for name, engine in engines.items()}
    assert {
        name: (worker.device_index, worker.device_sharers, worker.device_place) for name, worker in workers.items()
    } == expected
    assert all(engine.cache().worker.device_index == engine.worker.device_index for engine in engines.values())
    assert "mixed-1" not in expected or f"mixed-1 {expected['mixed-1'][0]}" in local_cluster.gpus_text(engines)


def test_instances_of_several_ranks_get_as_many_gpus_each(monkeypatch):
    monkeypatch.setattr(visible, "visible_gpus", lambda: 5)
    options, _, serve = read(device="cuda", mixed=2, tensor_parallel_size=2)
    engines = local_cluster.engines_of(options, serve)
    found = {name: [replace(engine.worker, rank=rank).gpu_index for rank in (0, 1)] for name, engine in engines.items()}
    assert found == {"mixed-0": [0, 1], "mixed-1": [2, 3]}
    assert local_cluster.gpus_text(engines) == "mixed-0 0-1, mixed-1 2-3"


@pytest.mark.parametrize(
    ("gpus", "ranks", "instances", "words"),
    [
        (1, 2, 1, "--tensor-parallel-size 2: 1 GPU is visible, and each rank needs one"),
        (3, 8, 1, "--tensor-parallel-size 8: 3 GPUs are visible"),
        (4, 4, 1, "GPU 2 cannot read the memory of GPU 3 .no peer access.: choose GPUs"),
        (4, 2, 2, "GPU 2 cannot read the memory of GPU 3"),
    ],
)
def test_gpus_that_cannot_compute_together_are_refused_before_anything_is_loaded(monkeypatch, gpus, ranks, instances, words):
    monkeypatch.setattr(visible, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(visible.cuda_driver, "can_read_peer", lambda one, other: {one, other} != {2, 3})
    _, _, serve = read(device="cuda", tensor_parallel_size=ranks)
    with pytest.raises(Failed, match=words):
        local_cluster.require_gpus(serve, instances)
    local_cluster.require_gpus(replace(serve, device="cpu"), instances)
    local_cluster.require_gpus(replace(serve, tensor_parallel_size=1), instances)


def test_gpus_that_no_instance_uses_need_no_peer_access(monkeypatch):
    """Found by an audit: one instance on GPUs 0 and 1 was refused, as GPU 2 cannot read the memory of GPU 3."""
    monkeypatch.setattr(visible, "visible_gpus", lambda: 4)
    monkeypatch.setattr(visible.cuda_driver, "can_read_peer", lambda one, other: {one, other} != {2, 3})
    local_cluster.require_gpus(read(device="cuda", tensor_parallel_size=2)[2])


@pytest.mark.parametrize(
    ("gpus", "ranks", "instances", "words"),
    [
        (2, 2, 2, "2 instances with 2 ranks each need 4 GPUs, and 2 are visible: give fewer .CUDA"),
        (5, 2, 3, "3 instances with 2 ranks each need 6 GPUs, and 5 are visible"),
        (1, 1, 2, "2 instances with 1 rank each need 2 GPUs, and 1 is visible: give fewer, or `baton up --mixed 2`"),
    ],
)
def test_instances_with_gpus_of_their_own_do_not_share_them(monkeypatch, gpus, ranks, instances, words):
    """They shared them without a word."""
    monkeypatch.setattr(visible, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(visible.cuda_driver, "can_read_peer", lambda one, other: True)
    _, _, serve = read(device="cuda", tensor_parallel_size=ranks)
    serve = replace(serve, data_parallel_size=instances)
    with pytest.raises(Failed, match=words):
        serve_command.require_gpus(serve)
    serve_command.require_gpus(replace(serve, device="cpu"))
    monkeypatch.setattr(visible, "visible_gpus", lambda: instances * ranks)
    serve_command.require_gpus(serve)


def test_data_parallel_serve_is_up_with_mixed_instances(monkeypatch):
    started = []
    monkeypatch.setattr(
        local_cluster, "run_cluster", lambda *given, command, **_: started.append((list(given[2]), command)) or True
    )
    _, _, serve = read(device="cpu")
    assert serve_command.run_instances(replace(serve, data_parallel_size=3), quiet=True, until_stdin_ends=False)
    assert started == [(["mixed-0", "mixed-1", "mixed-2"], "serve")], "its lines begin with the command that was typed"
    with pytest.raises(InvalidConfig, match="data_parallel_size is 2: an instance of a cluster is one instance"):
        replace(serve, data_parallel_size=2, router=("tcp://a:1",), cluster_secret="file")


def test_on_a_cpu_no_driver_is_asked(monkeypatch):
    monkeypatch.setattr(visible, "visible_gpus", lambda: pytest.fail("it was asked"))
    options, _, serve = read(mixed=2, device="cpu")
    assert {engine.worker.device_index for engine in local_cluster.engines_of(options, serve).values()} == {0}
    file = replace(serve, device="auto", model=__file__)  # as a GGUF is
    assert {engine.worker.device_sharers for engine in local_cluster.engines_of(options, file).values()} == {1}


@pytest.mark.parametrize("owner", [UpOptions, PlacementOptions, RouterOptions])
def test_every_option_is_explained(owner):
    settings = {setting.name: setting for setting in all_settings(owner)}
    assert set(settings) == {field.name for field in fields(owner)}
    for setting in settings.values():
        assert setting.help
        assert setting.group in GROUPS


def test_a_router_takes_nothing_that_is_about_an_engine():
    names = {setting.name for setting in router_command.settings()}
    assert {"model", "port", "api_key", "cluster_port", "cluster_secret", "placement", "queue_requests_max"} <= names
    assert not names & {"kv_blocks", "max_num_seqs", "threads", "quantization", "kv_storage", "role", "router", "routers"}


def test_a_router_without_a_secret_says_how_to_make_one():
    ran = CliRunner().invoke(app, ["router", "--port", "0"])
    assert ran.exit_code == 1
    assert "--cluster-secret FILE is missing" in ran.output
    assert "head -c 32 /dev/urandom" in ran.output


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    file = tmp_path / "secret"
    file.write_text("x" * 40)
    file.chmod(0o644)
    ran = CliRunner().invoke(app, ["router", "--cluster-secret", str(file)])
    assert ran.exit_code == 1
    assert "chmod 600" in ran.output


def test_a_router_asks_for_no_weights(tmp_path, monkeypatch):
    """It reads the tokenizer and the chat template: a hub id costs it megabytes, not gigabytes."""
    secret, asked = tmp_path / "secret", []
    secret.touch(0o600)
    secret.write_text("0" * 64)

    def resolve(name: str, revision: str, *, weights: bool = True, **_: object) -> Path:
        asked.append((name, weights))
        raise Failed("so far")

    monkeypatch.setattr(router_command, "resolve_model", resolve)
    CliRunner().invoke(app, ["router", "own/tiny", "--cluster-secret", str(secret), "--port", "0", "--cluster-port", "0"])
    assert asked == [("own/tiny", False)]


def test_the_cluster_port_is_not_that_of_the_api(tmp_path):
    with pytest.raises(Failed, match="port of the API"):
        router_command.checked_cluster_port(RouterOptions(cluster_port=8000), ServeConfig(port=8000))


def test_times_of_a_hand_off_that_contradict_each_other_are_refused_at_the_start():
    options, placement, serve = read(prefill=1, decode=1)
    engines = local_cluster.engines_of(options, serve)
    router = replace(placement.router(serve), handing_seconds_max=6.0)
    process = RouterProcessConfig(serve=serve, router=router, listen="tcp://127.0.0.1:0", cluster_secret="/nowhere")
    with pytest.raises(InvalidConfig, match=r"7 s.*handing_seconds_max"):
        UpConfig(router=process, engines=engines)
    UpConfig(router=replace(process, router=placement.router(serve)), engines=engines)


@pytest.mark.parametrize("policy", ["two_choices", "round_robin"])
def test_a_policy_that_is_gone_is_refused_with_those_that_are_left(policy):
    with pytest.raises(InvalidConfig, match="it must be one of prefix, load"):
        PlacementOptions(placement=policy)
