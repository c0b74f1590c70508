"""Every metric, our name and vLLM's, is moved by what it is about. (A metric that nothing moves is a lie.)"""

from __future__ import annotations

import pytest
from api_fakes import Script, eventually, says, serving
from prometheus_client.parser import text_string_to_metric_families

from baton.api.config import ApiConfig
from baton.errors import Unavailable
from baton.observe.metrics import ALIASES
from baton.protocol.control import InstanceStats as EngineStats
from baton.protocol.instance import Build
from baton.protocol.output import Ended
from baton.protocol.request import FinishReason

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def counted(text):
    with serving(text, ApiConfig()) as server:
        yield server


def scrape(server, http) -> dict[str, float]:
    """Samples by name and labels; the two that are the same for all vllm: ones left out."""
    found = {}
    for family in text_string_to_metric_families(http.get(server.url + "/metrics").text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            name = sample.name + "".join(f"[{key}={value}]" for key, value in sorted(labels.items()))
            found[name] = sample.value
    return found


class Moves:
    def __init__(self, server, http) -> None:
        self.server, self.http = server, http

    def __enter__(self) -> Moves:
        self.before = scrape(self.server, self.http)
        return self

    def __exit__(self, *_: object) -> None:
        after = scrape(self.server, self.http)

        def settled() -> bool:
            """A response is counted after the client has its last byte: two scrapes in a row must agree on the others."""
            nonlocal after
            before, after = after, scrape(self.server, self.http)
            return responses(before) == responses(after)

        assert eventually(settled)
        self.by = {name: after[name] - self.before.get(name, 0.0) for name in after}


def responses(scraped: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in scraped.items() if "http_responses" in name and "/metrics" not in name}


def test_a_request_moves_what_it_should(counted, http, text):
    counted.engine.script = Script(reply=says(text, "one two three"), cached_tokens=1, delay_seconds=0.01)
    with Moves(counted, http) as moved:
        http.post(counted.url + TEXT, json={"prompt": "a b c", "n": 2, "max_tokens": 9})
    for name, by in {
        "baton:prompt_tokens_total": 3,
        "baton:prompt_tokens_cached_total": 1,
        "baton:output_tokens_total": 8,
        "baton:sequences_ended_total[reason=stop]": 2,
        "baton:time_to_first_token_seconds_count": 2,
        "baton:inter_token_seconds_count": 6,
        "baton:request_time_per_output_token_seconds_count": 2,
        "baton:request_seconds_count": 1,
        "baton:request_prompt_tokens_sum": 3,
        "baton:request_output_tokens_sum": 8,
        "baton:request_max_tokens_sum": 9,
        "baton:request_n_sum": 2,
        "baton:http_responses_total[route=/v1/completions][status=200]": 1,
        "vllm:prompt_tokens_total": 3,
        "vllm:prompt_tokens_cached_total": 1,
        "vllm:generation_tokens_total": 8,
        "vllm:request_success_total[finished_reason=stop]": 2,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 6,
        "vllm:time_per_output_token_seconds_count": 6,
        "vllm:request_time_per_output_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_prompt_tokens_sum": 3,
        "vllm:request_generation_tokens_sum": 8,
        "vllm:request_params_max_tokens_sum": 9,
        "vllm:request_params_n_sum": 2,
    }.items():
        assert moved.by[name] == by, name
    assert 0.03 < moved.by["baton:request_seconds_sum"] < 2
    assert 0.05 < moved.by["baton:inter_token_seconds_sum"] < 2
    between = moved.by["baton:inter_token_seconds_sum"] / 3  # of each sequence three tokens come after the first
    assert moved.by["baton:request_time_per_output_token_seconds_sum"] == pytest.approx(between)


@pytest.mark.parametrize("place", ["baton", "vllm"])
def test_the_time_of_a_request_is_queue_prefill_and_decode(counted, http, text, place):
    """What was not prefill, until the first token, was spent in queues; inference is prefill and decode. Once per request."""
    counted.engine.script = Script(reply=says(text, "one two three"), prefill_seconds=0.003, delay_seconds=0.01)
    with Moves(counted, http) as moved:
        http.post(counted.url + TEXT, json={"prompt": "a b c", "n": 2, "max_tokens": 9})
    names = {
        "baton": ["baton:request_queue_seconds", "baton:request_prefill_seconds", "baton:request_decode_seconds",
                  "baton:request_inference_seconds"],
        "vllm": ["vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
                 "vllm:request_inference_time_seconds"],
    }[place]  # fmt: skip
    assert [moved.by[f"{name}_count"] for name in names] == [1, 1, 1, 1]
    queue, prefill, decode, inference = (moved.by[f"{name}_sum"] for name in names)
    assert prefill == pytest.approx(0.003)
    assert queue >= 0.006, "the engine says its first token 0.01 s after it was asked"
    assert decode >= 0.03, "three more tokens"
    assert inference == pytest.approx(prefill + decode)


def test_the_build_and_the_lag_of_this_process(counted, http):
    counted.app.state.front.metrics.about_process("front", lambda: 0.25, Build("1.2", "c0ffee"))
    told = scrape(counted, http)
    assert told["baton:build_info[commit=c0ffee][version=1.2]"] == 1
    assert told["baton:loop_lag_seconds[process=front]"] == 0.25


def test_hangs_of_children_are_read_at_the_scrape(counted, http):
    hangs = {"engine": 0}
    counted.app.state.front.metrics.about_process("front", lambda: 0.0, Build(), hangs)
    assert scrape(counted, http)["baton:child_hangs_total[child=engine]"] == 0
    hangs["engine"] = 2
    assert scrape(counted, http)["baton:child_hangs_total[child=engine]"] == 2


def test_the_engines_processes_and_steps(counted, http):
    counted.engine.snapshot = EngineStats(
        worker_losses=2, cache_losses=1, loop_lag_microseconds=500, step_tokens={"1": 3, "+Inf": 1, "sum": 20_003}
    )
    told = scrape(counted, http)
    assert told["baton:child_restarts_total[child=worker]"] == 2
    assert told["baton:child_restarts_total[child=cache]"] == 1
    assert told["baton:engine_loop_lag_seconds[process=engine]"] == 0.0005
    assert told["baton:step_tokens_sum"] == told["vllm:iteration_tokens_total_sum"] == 20_003
    assert told["baton:step_tokens_count"] == told["vllm:iteration_tokens_total_count"] == 4
    assert told["vllm:iteration_tokens_total_bucket[le=1]"] == 3
    counted.engine.snapshot = EngineStats()


def test_tokens_that_come_together_are_all_counted(counted, http, text):
    counted.engine.script = Script(reply=says(text, "one two three four"), tokens_per_delta=2)
    with Moves(counted, http) as moved:
        http.post(counted.url + TEXT, json={"prompt": "x", "max_tokens": 9})
    assert moved.by["baton:inter_token_seconds_count"] == 3  # two in the first delta, which has none before it


@pytest.mark.parametrize(
    ("script", "fields", "reason"),
    [
        (Script(), {"max_tokens": 2, "ignore_eos": True}, "length"),
        (Script(delay_seconds=0.05), {"timeout": 0.12, "max_tokens": 90, "ignore_eos": True}, "timeout"),
        (Script(end_error_after=1), {}, "error"),
    ],
)
def test_ends_by_reason(counted, http, script, fields, reason):
    counted.engine.script = script
    with Moves(counted, http) as moved:
        http.post(counted.url + TEXT, json={"prompt": "x", **fields})
    assert moved.by[f"baton:sequences_ended_total[reason={reason}]"] == 1
    assert moved.by[f"vllm:request_success_total[finished_reason={reason}]"] == 1


def test_a_sequence_that_a_stop_string_ended_counts_too(counted, http, text):
    counted.engine.script = Script(reply=says(text, "one two three four"))
    with Moves(counted, http) as moved:
        http.post(counted.url + TEXT, json={"prompt": "x", "stop": " two"})
    assert moved.by["baton:sequences_ended_total[reason=stop]"] == 1
    assert moved.by["baton:prompt_tokens_total"] == 1
    assert moved.by["baton:output_tokens_total"] >= 2


def test_refused_and_broken(counted, http, text):
    counted.engine.script = Script(reply=says(text, "a b c d"), fail_after=2, error=Unavailable("gone"))
    with Moves(counted, http) as moved:
        http.post(counted.url + TEXT, json={"prompt": "x", "n": 99})
        http.post(counted.url + TEXT, json={"model": "other", "prompt": "x"})
        http.post(counted.url + TEXT, json={"prompt": "x", "stream": True})
        http.get(counted.url + "/no/such/route")
    assert moved.by["baton:requests_refused_total[code=400]"] == 1
    assert moved.by["baton:requests_refused_total[code=model_not_found]"] == 1
    broken = "baton:answers_broken_total[how=failed]"  # counted when all is cleaned up, after the client has its last byte
    assert eventually(lambda: scrape(counted, http).get(broken, 0) - moved.before.get(broken, 0) == 1)
    assert moved.by["baton:http_responses_total[route=(none)][status=404]"] == 1


def test_open_requests(counted, http):
    with counted.app.state.front.live.admitted(b"", ("x",)):
        assert scrape(counted, http)["baton:http_requests_open"] == 1
    assert scrape(counted, http)["baton:http_requests_open"] == 0


def test_engine_numbers(counted, http):
    counted.engine.snapshot = EngineStats()
    before = scrape(counted, http)
    counted.engine.snapshot = EngineStats(
        mode="draining", running=3, waiting=4, preempted=5, blocks_total=100, blocks_free=20, blocks_cached=30, blocks_held=50,
        steps=7, prompt_tokens=80, cached_tokens=40, output_tokens=9, preemptions=10, folded_blocks=11, stale_rows=12,
        stale_results=13, worker_losses=14, crash_ends=15, ended={"stop": 16}, refused={"queue_full": 17},
        held_back={"blocks": 18}, slots_taken=19, requests_open=20, steps_in_flight=2,
    )  # fmt: skip
    after = scrape(counted, http)
    for name, value in {
        "baton:requests_running": 3,
        "baton:requests_waiting": 9,
        "baton:requests_preempted": 5,
        "baton:slots_taken": 19,
        "baton:engine_requests_open": 20,
        "baton:steps_in_flight": 2,
        "baton:kv_usage_ratio": 0.5,
        "baton:kv_blocks[state=free]": 20,
        "baton:kv_blocks[state=cached]": 30,
        "baton:kv_blocks[state=held]": 50,
        "baton:engine_mode[mode=draining]": 1,
        "baton:steps_total": 7,
        "baton:preemptions_total": 10,
        "baton:prefix_cache_queried_tokens_total": 80,
        "baton:prefix_cache_hit_tokens_total": 40,
        "baton:engine_output_tokens_total": 9,
        "baton:folded_blocks_total": 11,
        "baton:stale_rows_total": 12,
        "baton:stale_results_total": 13,
        "baton:worker_losses_total": 14,
        "baton:crash_ends_total": 15,
        "baton:engine_ended_total[reason=stop]": 16,
        "baton:engine_refused_total[reason=queue_full]": 17,
        "baton:engine_held_back_total[reason=blocks]": 18,
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 9,
        "vllm:kv_cache_usage_perc": 0.5,
        "vllm:gpu_cache_usage_perc": 0.5,
        "vllm:num_preemptions_total": 10,
        "vllm:prefix_cache_queries_total": 80,
        "vllm:prefix_cache_hits_total": 40,
        "vllm:gpu_prefix_cache_queries_total": 80,
        "vllm:gpu_prefix_cache_hits_total": 40,
    }.items():
        assert after[name] == value, name
        assert before.get(name, 0) != value, name
    counted.engine.snapshot = EngineStats()


def test_drafts_are_counted_under_the_names_of_vllm(counted, http):
    counted.engine.snapshot = EngineStats()
    assert not [name for name in scrape(counted, http) if "draft" in name]
    counted.engine.snapshot = EngineStats(drafts={"rows": 5, "tokens": 12, "0": 4, "1": 3})
    after = scrape(counted, http)
    for name, value in {
        "vllm:spec_decode_num_drafts_total": 5,
        "vllm:spec_decode_num_draft_tokens_total": 12,
        "vllm:spec_decode_num_accepted_tokens_total": 7,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total[position=1]": 3,
        "baton:draft_tokens_total": 12,
    }.items():
        assert after[name] == value, name
    counted.engine.snapshot = EngineStats()


def test_numbers_of_lower_tiers_are_there_if_they_are(counted, http):
    counted.engine.snapshot = EngineStats()
    assert not [name for name in scrape(counted, http) if name.startswith(("baton:kv_blocks_moved", "baton:kv_circuit"))]
    counted.engine.snapshot = EngineStats(
        loading=2, cache_service=True, host_blocks=10, host_blocks_cached=4, storage_circuit="closed", storage={"hits": 6},
        tiers={"stored": 1, "loaded": 2, "put": 3, "fetched": 4, "lost_stores": 5, "put_bytes": 7, "write_circuit_opened": 8},
        storage_write_circuit="open", mode="asleep",
    )  # fmt: skip
    after = scrape(counted, http)
    for name, value in {
        "baton:requests_loading": 2,
        "baton:kv_service_up": 1,
        "baton:kv_host_blocks[state=cached]": 4,
        "baton:kv_host_blocks[state=other]": 6,
        "baton:kv_blocks_moved_total[way=device_to_host]": 1,
        "baton:kv_blocks_moved_total[way=host_to_device]": 2,
        "baton:kv_blocks_moved_total[way=host_to_storage]": 3,
        "baton:kv_blocks_moved_total[way=storage_to_host]": 4,
        "baton:kv_blocks_not_moved_total[why=lost_stores]": 5,
        "baton:kv_bytes_moved_total[way=host_to_storage]": 7,
        "baton:kv_circuit_state[state=open][way=write]": 1,
        "baton:kv_circuit_state[state=closed][way=read]": 1,
        "baton:kv_circuit_opened_total[way=write]": 8,
        "baton:engine_mode[mode=asleep]": 1,
        "baton:kv_storage_total[what=hits]": 6,
    }.items():
        assert after[name] == value, name
    counted.engine.snapshot = EngineStats()


@pytest.mark.parametrize(("host", "storage"), [(0, 0), (2, 0), (1, 3)])
def test_usage_says_which_tier_cached_tokens_came_from(counted, http, text, host, storage):
    counted.engine.script = Script(reply=says(text, "one"), cached_tokens=6, host_tokens=host, storage_tokens=storage)
    told = http.post(counted.url + TEXT, json={"prompt": "one two three"}).json()["usage"]["prompt_tokens_details"]
    by_tier = {"device": 6 - host - storage, "host": host, "storage": storage}
    assert told == {"cached_tokens": 6} | ({"cached_tokens_by_tier": by_tier} if host else {})


def test_cached_tokens_by_tier(counted, http):
    tiers = counted.app.state.front.metrics
    before = scrape(counted, http)
    tiers.sequence_ended(Ended("a", 0, FinishReason.STOP, 100, 60, 5, 0, host_tokens=20, storage_tokens=30))
    after = scrape(counted, http)
    for tier, tokens in (("device", 10), ("host", 20), ("storage", 30)):
        name = "baton:prompt_tokens_cached_by_tier_total" + f"[tier={tier}]"
        assert after[name] - before.get(name, 0) == tokens


def test_every_published_family_is_tested_here(counted, http):
    """Reads this file: a metric added without a test that moves it fails."""
    from pathlib import Path

    tested = Path(__file__).read_text()
    for family in text_string_to_metric_families(http.get(counted.url + "/metrics").text):
        assert f'"{family.name}' in tested, family.name
    assert all(f'"vllm:{alias}' in tested for aliases in ALIASES.values() for alias in aliases)


def test_aliases_carry_vllms_labels(counted, http):
    page = http.get(counted.url + "/metrics")
    assert 'vllm:num_requests_running{engine="0",model_name="smol"}' in page.text
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_no_prompt_text_anywhere(counted, http, caplog, text):
    secret = "zanzibar-pineapple"
    for script in (Script(reply=says(text, secret)), Script(fail_after=1), Script(end_error_after=1)):
        counted.engine.script = script
        body = {"prompt": secret, "user": secret, "cache_salt": secret}
        http.post(counted.url + TEXT, json=body, headers={"Idempotency-Key": secret + "x"})
        http.post(counted.url + TEXT, json={**body, "stream": True})
        http.post(counted.url + TEXT, json={**body, "stop": ["", secret]})
    http.get(counted.url + f"/{secret}")
    assert secret not in http.get(counted.url + "/metrics").text
    assert secret not in http.get(counted.url + "/config").text
    assert secret not in caplog.text
