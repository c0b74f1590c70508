"""Sizes of steps that nobody gave are those of the device; what was given stays."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from baton.config import SchedulerConfig, ServeConfig, WorkerConfig
from baton.config.device_defaults import BY_DEVICE, CPU, GPU, OPTIONS, as_options, gpu_defaults, steps_for
from baton.worker.build import with_steps


def defaults_for(device, gib):
    return CPU if device == "cpu" else gpu_defaults(gib)


@pytest.mark.parametrize(
    ("device", "gib", "expected"),
    [
        ("cpu", 0.0, (64, 512, 128)),
        ("cpu", 500.0, (64, 512, 128)),
        ("cuda", 139.8, (256, 8192, 2048)),
        ("cuda", 40.0, (256, 8192, 2048)),
        ("cuda", 23.5, (128, 4096, 1024)),
        ("cuda", 7.8, (64, 2048, 512)),
        ("cuda", 0.0, (64, 2048, 512)),
    ],
)
def test_by_device_and_memory(device, gib, expected):
    sizes = steps_for(defaults_for(device, gib), BY_DEVICE, slots=1, tokens_per_step=1)
    assert (*sizes.values(),) == (*expected, 0.025)


def test_less_memory_never_means_larger_steps():
    rows = [row for _, row in GPU]
    for larger, smaller in pairwise(rows):
        assert larger.slots >= smaller.slots
        assert larger.tokens_per_step > smaller.tokens_per_step
    assert GPU[-1][0] == 0.0, "there is a row for every memory"


def test_what_was_given_stays_and_the_other_fits_it():
    gpu = gpu_defaults(80.0)
    assert steps_for(gpu, ["slots"], slots=64, tokens_per_step=100) == {"slots": 100}
    assert steps_for(gpu, ["tokens_per_step"], slots=9000, tokens_per_step=512) == {"tokens_per_step": 9000}
    assert steps_for(CPU, ["decode_gap_seconds"], slots=1, tokens_per_step=1) == {"decode_gap_seconds": 0.025}
    assert steps_for(gpu, [], slots=3, tokens_per_step=4) == {}


def test_settings_that_are_given_are_not_chosen():
    assert ServeConfig().by_device == BY_DEVICE
    given = ServeConfig(max_num_seqs=3, max_num_batched_tokens=4, prefill_tokens_beside_decodes=0, decode_gap_ms=0)
    assert given.by_device == ()
    scheduler = given.engine().instance.scheduler
    assert (scheduler.slots, scheduler.tokens_per_step) == (3, 4)
    assert (scheduler.prefill_tokens_beside_decodes, scheduler.decode_gap_seconds) == (None, None), "0: no bound"
    assert as_options({name: getattr(scheduler, name) for name in BY_DEVICE}) == dict(zip(OPTIONS, (3, 4, 0, 0), strict=True))


@pytest.mark.parametrize("given", [{}, {"max_num_seqs": 700}, {"max_num_batched_tokens": 16}])
@pytest.mark.parametrize(("device", "gib"), [("cpu", 4), ("cuda", 8), ("cuda", 140)])
def test_worker_and_scheduler_agree_whatever_is_given(given, device, gib):
    engine = ServeConfig(**given).engine()
    platform = SimpleNamespace(step_defaults=lambda sharers: defaults_for(device, gib / sharers))
    config, steps = with_steps(platform, WorkerConfig(**{**_fields(engine.worker), "device": device}))
    scheduler = SchedulerConfig(**{**_fields(engine.instance.scheduler), **steps})  # as the engine process does with the hello
    assert (config.slots, config.tokens_per_step) == (scheduler.slots, scheduler.tokens_per_step)
    assert config.by_device == ()
    if "max_num_seqs" in given:
        assert config.slots == 700 <= config.tokens_per_step
    if "max_num_batched_tokens" in given:
        assert (config.slots, config.tokens_per_step) == (16, 16)
    if not given:
        assert config.slots == defaults_for(device, gib).slots


def test_instances_on_one_gpu_share_its_memory():
    platform = SimpleNamespace(step_defaults=lambda sharers: gpu_defaults(48 / sharers))
    config, _ = with_steps(platform, WorkerConfig(device="cuda", device_sharers=2, by_device=BY_DEVICE))
    assert config.slots == 128


def _fields(config) -> dict:
    return {name: getattr(config, name) for name in type(config).__dataclass_fields__}
