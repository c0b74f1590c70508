"""Prometheus metrics under our own names (`baton:`), and under the `vllm:` names that dashboards and routers read.

A value is counted once; the scrape adds the second name, so tokens cost no more. Labels are closed sets (reasons,
modes): no prompt, output, key, salt or request id is ever a label.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from baton.observe.token_histogram import TokenHistogram
from baton.protocol.control import STEP_TOKEN_BUCKETS, STEP_TOKEN_SUM
from baton.protocol.control import InstanceStats as EngineStats
from baton.protocol.instance import Build
from baton.protocol.output import Ended
from baton.protocol.request import FinishReason, GenerateRequest

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

# Our name -> vLLM's, without prefix, as families: a counter's samples end in _total.
ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "kv_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "preemptions": ("num_preemptions",),
    "prefix_cache_queried_tokens": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "prefix_cache_hit_tokens": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "prompt_tokens": ("prompt_tokens",),
    "prompt_tokens_cached": ("prompt_tokens_cached",),
    "output_tokens": ("generation_tokens",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "request_time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "request_seconds": ("e2e_request_latency_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_output_tokens": ("request_generation_tokens",),
    "request_max_tokens": ("request_params_max_tokens",),
    "request_n": ("request_params_n",),
    "request_queue_seconds": ("request_queue_time_seconds",),
    "request_prefill_seconds": ("request_prefill_time_seconds",),
    "request_decode_seconds": ("request_decode_time_seconds",),
    "request_inference_seconds": ("request_inference_time_seconds",),
    "step_tokens": ("iteration_tokens_total",),
    "draft_rows": ("spec_decode_num_drafts",),
    "draft_tokens": ("spec_decode_num_draft_tokens",),
    "draft_tokens_accepted": ("spec_decode_num_accepted_tokens",),
    "draft_tokens_accepted_by_place": ("spec_decode_num_accepted_tokens_per_pos",),
    "sequences_ended": ("request_success",),
}
_WAYS: Final = (
    ("device_to_host", "stored"),
    ("host_to_device", "loaded"),
    ("host_to_storage", "put"),
    ("storage_to_host", "fetched"),
)
_NOT_MOVED: Final = ("lost_stores", "skipped_stores", "skipped_puts", "put_failures", "voided_loads")
_CIRCUIT_STATES: Final = ("closed", "half_open", "open")
# Our label -> vLLM's.
_LABEL_ALIASES: Final = {"reason": "finished_reason", "place": "position"}


class Metrics:
    """Metrics of one app: the front records events, Prometheus reads them."""

    def __init__(self, *, model_name: str, engine_stats: Callable[[], EngineStats], engine: Collector | None = None) -> None:
        """`engine`: replaces the collector of `engine_stats`."""
        own = self._own = CollectorRegistry(auto_describe=False)
        self._prompt_tokens = Counter("baton:prompt_tokens", "Prompt tokens of ended requests.", registry=own)
        self._cached_tokens = Counter(
            "baton:prompt_tokens_cached", "Prompt tokens of ended requests that were found in a cache.", registry=own
        )
        self._cached_by_tier = Counter(
            "baton:prompt_tokens_cached_by_tier", "Cached prompt tokens, by the tier that had them.", ["tier"], registry=own
        )
        self._output_tokens = Counter("baton:output_tokens", "Output tokens of ended sequences.", registry=own)
        self._ended = Counter("baton:sequences_ended", "Ended sequences, by reason.", ["reason"], registry=own)
        self._refused = Counter("baton:requests_refused", "Requests answered with an error, by code.", ["code"], registry=own)
        self._broken = Counter(
            "baton:answers_broken",
            "Answers that broke off: the client disconnected or was slow, or the engine failed.",
            ["how"],
            registry=own,
        )
        self._http = Counter("baton:http_responses", "HTTP responses, by route and status.", ["route", "status"], registry=own)
        self._open = Gauge("baton:http_requests_open", "Open HTTP requests.", registry=own)
        self._ttft = _histogram(
            own, "baton:time_to_first_token_seconds", "Seconds from the HTTP request to the first token.", _SLOW
        )
        self._itl = _histogram(own, "baton:inter_token_seconds", "Seconds between two tokens of a sequence.", _FAST)
        self.later_tokens = self._itl.observe
        """Record that `count` tokens arrived within `seconds` of the previous one: (seconds, count). Called per step, so bound
        without a wrapper."""
        self._tpot = _histogram(
            own,
            "baton:request_time_per_output_token_seconds",
            "Mean seconds per output token of a sequence, without the first token.",
            _FAST,
        )
        self._e2e = _histogram(own, "baton:request_seconds", "Seconds from the HTTP request to its end.", _SLOW)
        self._request_prompt = _histogram(own, "baton:request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self._request_output = _histogram(own, "baton:request_output_tokens", "Output tokens per sequence.", _TOKENS)
        self._request_max = _histogram(
            own, "baton:request_max_tokens", "max_tokens per request, after the server's limit.", _TOKENS
        )
        self._request_n = _histogram(own, "baton:request_n", "Sequences per request (n).", (1, 2, 5, 10, 20))
        self._add_times(own)
        # All labels exist from the start: rates are right from the first event, and no request looks one up.
        self._ended_by = {reason: self._ended.labels(reason.value) for reason in FinishReason}
        self._cached_in = {tier: self._cached_by_tier.labels(tier) for tier in ("device", "host", "storage")}
        own.register(EngineCollector(engine_stats) if engine is None else engine)
        self._published = CollectorRegistry(auto_describe=False)
        self._published.register(_WithAliases(own, {"model_name": model_name, "engine": "0"}))

    def _add_times(self, own: CollectorRegistry) -> None:
        """Metrics of the phases of a request, and of this process's delays."""
        self._queue = _histogram(
            own, "baton:request_queue_seconds", "Seconds that a request waits in queues until it is admitted.", _SLOW
        )
        self._prefill = _histogram(
            own, "baton:request_prefill_seconds", "Seconds from a request's admission to its first token.", _SLOW
        )
        self._decode = _histogram(
            own, "baton:request_decode_seconds", "Seconds from a request's first token to its last.", _SLOW
        )
        self._inference = _histogram(
            own, "baton:request_inference_seconds", "Seconds of a request's prefill and decode.", _SLOW
        )
        self._lag = Gauge(
            "baton:loop_lag_seconds", "Longest delay of the event loop in the last 10 seconds.", ["process"], registry=own
        )
        self._build = Gauge(
            "baton:build_info", "1, with the version and commit as labels.", ["version", "commit"], registry=own
        )

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def request_begun(self, queue_seconds: float, prefill_seconds: float) -> None:
        self._queue.observe(queue_seconds)
        self._prefill.observe(prefill_seconds)

    def request_decoded(self, decode_seconds: float, prefill_seconds: float) -> None:
        self._decode.observe(decode_seconds)
        self._inference.observe(prefill_seconds + decode_seconds)

    def about_process(
        self, name: str, lag_seconds: Callable[[], float], build: Build, hangs: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Add the build and the loop delay of this process; `name` is front or router. `hangs`: of the children of its parent,
        read at the scrape."""
        self._own.register(_HangCollector(hangs))
        self._lag.labels(name).set_function(lag_seconds)
        self._build.labels(build.version, build.commit).set(1)

    def time_per_output_token(self, seconds: float) -> None:
        self._tpot.observe(seconds)

    def sequence_ended(self, ended: Ended) -> None:
        self._ended_by[ended.reason].inc()
        self._output_tokens.inc(ended.output_tokens)
        self._request_output.observe(ended.output_tokens)
        if ended.index == 0:  # the n sequences of a request share one prompt
            self._prompt_tokens.inc(ended.prompt_tokens)
            self._cached_tokens.inc(ended.cached_tokens)
            self._cached_in["device"].inc(ended.cached_tokens - ended.host_tokens - ended.storage_tokens)
            self._cached_in["host"].inc(ended.host_tokens)
            self._cached_in["storage"].inc(ended.storage_tokens)

    def request_ended(self, seconds: float, request: GenerateRequest) -> None:
        self._e2e.observe(seconds)
        self._request_prompt.observe(len(request.prompt))
        self._request_max.observe(request.sampling.max_tokens)
        self._request_n.observe(request.n)

    def request_refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def answer_broken(self, how: str) -> None:
        self._broken.labels(how).inc()

    def http_response(self, route: str, status: int) -> None:
        """Count a response. `route` is the pattern, never the path of a client's request."""
        self._http.labels(route, str(status)).inc()

    def requests_open(self, count: int) -> None:
        self._open.set(count)

    def exposition(self) -> bytes:
        return generate_latest(self._published)


def _histogram(registry: CollectorRegistry, name: str, text: str, buckets: Sequence[float]) -> TokenHistogram:
    made = TokenHistogram(name, text, buckets)
    registry.register(made)
    return made


def gauges(name: str, text: str, labels: str, values: Mapping[str, float]) -> Metric:
    """Labelled gauges. `labels` are names with slashes between them; so are the keys of `values`."""
    return _labelled(GaugeMetricFamily(f"baton:{name}", text, labels=labels.split("/")), labels, values)


def counters(name: str, text: str, labels: str, values: Mapping[str, float]) -> Metric:
    return _labelled(CounterMetricFamily(f"baton:{name}", text, labels=labels.split("/")), labels, values)


def _labelled(
    family: GaugeMetricFamily | CounterMetricFamily, labels: str, values: Mapping[str, float]
) -> GaugeMetricFamily | CounterMetricFamily:
    for key, value in values.items():
        family.add_metric(key.split("/", labels.count("/")), value)
    return family


class _HangCollector(Collector):
    def __init__(self, hangs: Mapping[str, int]) -> None:
        self._hangs = hangs

    def collect(self) -> Iterator[Metric]:
        text = "Processes that were killed because their event loop did not answer, by child of the supervisor."
        yield counters("child_hangs", text, "child", self._hangs)


class EngineCollector(Collector):
    """Metrics of the engine's own stats, which are read at the scrape."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        used = stats.blocks_held / stats.blocks_total if stats.blocks_total else 0.0
        yield GaugeMetricFamily("baton:requests_running", "Running sequences.", value=stats.running)
        yield GaugeMetricFamily(
            "baton:requests_waiting", "Waiting sequences, including preempted ones.", value=stats.waiting + stats.preempted
        )
        yield GaugeMetricFamily("baton:requests_preempted", "Preempted sequences that wait to continue.", value=stats.preempted)
        yield GaugeMetricFamily(
            "baton:slots_taken", "Slots in use, including dropped ones not yet acknowledged.", stats.slots_taken
        )
        yield GaugeMetricFamily(
            "baton:engine_requests_open", "Requests in the engine that have not ended.", value=stats.requests_open
        )
        yield GaugeMetricFamily(
            "baton:steps_in_flight", "Steps sent to the worker whose result is awaited.", value=stats.steps_in_flight
        )
        yield GaugeMetricFamily("baton:kv_usage_ratio", "Share of the KV blocks that requests hold, 0 to 1.", value=used)
        blocks = {"free": stats.blocks_free, "cached": stats.blocks_cached, "held": stats.blocks_held}
        yield gauges("kv_blocks", "KV blocks of the device pool, by state.", "state", blocks)
        yield from self._tiers(stats)
        yield from self._cluster(stats)
        yield from self._processes(stats)
        modes = {name: float(stats.mode == name) for name in ("serving", "draining", "paused", "asleep")}
        yield gauges("engine_mode", "1 for the engine's present mode, 0 for the others.", "mode", modes)
        yield from self._counters(stats)

    def _processes(self, stats: EngineStats) -> Iterator[Metric]:
        lag = {"engine": stats.loop_lag_microseconds * 1e-6, "cache": stats.cache_loop_lag_microseconds * 1e-6}
        yield gauges(
            "engine_loop_lag_seconds",
            "Longest delay of the event loop, of the engine and of the cache service.",
            "process",
            lag,
        )
        restarts = {"worker": stats.worker_losses, "cache": stats.cache_losses}
        yield counters("child_restarts", "Restarts of child processes, by child.", "child", restarts)
        if stats.step_tokens:
            names = (*map(str, STEP_TOKEN_BUCKETS), "+Inf")
            below = accumulate(stats.step_tokens.get(name, 0) for name in names)
            yield HistogramMetricFamily(
                "baton:step_tokens",
                "Tokens computed per step.",
                buckets=list(zip(names, below, strict=True)),
                sum_value=stats.step_tokens.get(STEP_TOKEN_SUM, 0),
            )

    def _cluster(self, stats: EngineStats) -> Iterator[Metric]:
        """Metrics of router sessions and hand-offs. Without routers there are none."""
        if not stats.router_sessions and not stats.routers:
            return
        yield GaugeMetricFamily("baton:instance_routers", "Open sessions with routers.", value=stats.routers)
        sessions, handoffs = stats.router_sessions, stats.handoffs
        yield counters("instance_sessions", "Sessions with routers, by event: begun, and each way to end.", "event", sessions)
        yield counters("instance_handoffs", "Hand-offs in which this instance took part, by result.", "what", handoffs)
        yield from self._transfers(stats)

    def _transfers(self, stats: EngineStats) -> Iterator[Metric]:
        """Copies of KV blocks between instances."""
        both, pulled = "transport/outcome", {name: value * 1e-6 for name, value in stats.pull_microseconds.items()}
        yield counters("kv_pulls", "Copies of KV blocks from other instances, by result.", both, stats.pulls)
        text = "Connections from instances that read this instance's KV blocks."
        yield counters("kv_readers", text, "transport/event", stats.readers)
        yield counters("kv_pull_bytes", "Bytes of KV blocks copied from other instances.", "transport", stats.pull_bytes)
        yield counters("kv_pull_seconds", "Seconds spent copying KV blocks from other instances.", "transport", pulled)

    def _tiers(self, stats: EngineStats) -> Iterator[Metric]:
        """Metrics of the lower KV tiers. Without lower tiers there are none."""
        if not stats.tiers:
            return
        yield GaugeMetricFamily("baton:requests_loading", "Sequences that wait for KV from a lower tier.", value=stats.loading)
        yield GaugeMetricFamily(
            "baton:kv_service_up", "1 if the cache service accepts copies, else 0.", value=float(stats.cache_service)
        )
        host = {"cached": stats.host_blocks_cached, "other": stats.host_blocks - stats.host_blocks_cached}
        yield gauges("kv_host_blocks", "KV blocks of the host tier, by state.", "state", host)
        tiers = Counts(stats.tiers)
        blocks, size = ({way: tiers[f"{name}{unit}"] for way, name in _WAYS} for unit in ("", "_bytes"))
        yield counters("kv_blocks_moved", "KV blocks copied between tiers.", "way", blocks)
        yield counters("kv_bytes_moved", "Bytes of KV blocks copied between tiers.", "way", size)
        missed = {name: tiers[name] for name in _NOT_MOVED}
        yield counters("kv_blocks_not_moved", "KV blocks not copied between tiers, by reason.", "why", missed)
        if stats.storage_circuit:
            present = {"read": stats.storage_circuit, "write": stats.storage_write_circuit}
            states = {f"{way}/{state}": float(present[way] == state) for way in present for state in _CIRCUIT_STATES}
            text = "1 for the present state of storage's read and write circuit."
            yield gauges("kv_circuit_state", text, "way/state", states)
            opened = {way: tiers[f"{way}_circuit_opened"] for way in present}
            yield counters(
                "kv_circuit_opened", "Times that the circuit opened, so storage was not used for a while.", "way", opened
            )
        yield counters("kv_storage", "Counters of the storage backend.", "what", stats.storage)

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            ("steps", "Completed steps.", stats.steps),
            ("preemptions", "Preemptions: sequences that lost their blocks to others.", stats.preemptions),
            (
                "prefix_cache_queried_tokens",
                "Prompt tokens looked up in the prefix cache at the first admission.",
                stats.prompt_tokens,
            ),
            ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache at the first admission.", stats.cached_tokens),
            ("engine_output_tokens", "Output tokens computed by the engine.", stats.output_tokens),
            ("folded_blocks", "KV blocks freed because an equal block was computed at the same time.", stats.folded_blocks),
            ("stale_rows", "Result rows dropped because their sequence had ended.", stats.stale_rows),
            ("stale_results", "Step results dropped: repeated, or from an earlier worker.", stats.stale_results),
            ("worker_losses", "Times the worker was lost.", stats.worker_losses),
            ("crash_ends", "Sequences ended because the worker was lost twice while computing them.", stats.crash_ends),
        ):
            yield CounterMetricFamily(f"baton:{name}", text, value=value)
        if stats.drafts:
            yield from _drafts(stats.drafts)
        yield counters("engine_ended", "Sequences ended by the engine, by reason.", "reason", stats.ended)
        yield counters("engine_refused", "Requests refused by the engine, by reason.", "reason", stats.refused)
        yield counters(
            "engine_held_back", "Steps in which the first waiting request did not fit, by reason.", "reason", stats.held_back
        )


def _drafts(counts: Mapping[str, int]) -> Iterator[Metric]:
    places = {name: count for name, count in counts.items() if name.isdigit()}
    for name, text, value in (
        ("draft_rows", "Rows with draft tokens in all steps.", counts.get("rows", 0)),
        ("draft_tokens", "Verified draft tokens.", counts.get("tokens", 0)),
        ("draft_tokens_accepted", "Accepted draft tokens.", sum(places.values())),
    ):
        yield CounterMetricFamily(f"baton:{name}", text, value=value)
    yield counters("draft_tokens_accepted_by_place", "Accepted draft tokens, by position in the draft.", "place", places)


class _WithAliases(Collector):
    def __init__(self, own: CollectorRegistry, labels: dict[str, str]) -> None:
        self._own = own
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for family in self._own.collect():
            # Creation times of counters double the page, and the start time metrics have them already.
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
            for alias in ALIASES.get(family.name.removeprefix("baton:"), ()):
                yield self._renamed(family, f"vllm:{alias}")

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = {_LABEL_ALIASES.get(key, key): value for key, value in sample.labels.items()}
            suffix = sample.name.removeprefix(family.name)
            renamed.samples.append(
                Sample(name + suffix, {**labels, **self._labels}, sample.value, sample.timestamp, sample.exemplar)
            )
        return renamed
