"""`baton bench` on a tiny model: the keys of its JSON, complete answers, a page that fetches nothing."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from command_rig import baton, serving

from baton.cli import private_server
from baton.cli.bench import load
from baton.cli.bench.drafts import drafts_since, read_counts
from baton.cli.bench.measures import Record, meets, percentile, read_slo, summarize
from baton.cli.bench.workload import random_requests, read_span, shared_prefix_requests, trace_requests
from baton.cli.http_stream import ServerAddress
from baton.cli.say import Failed

KEYS = {
    "kind", "model", "requests", "completed", "failed", "short", "seconds", "input_tokens", "output_tokens",
    "cached_tokens", "requests_per_second", "output_tokens_per_second", "total_tokens_per_second", "ttft_ms", "tpot_ms",
    "itl_ms", "e2e_ms", "errors",
}  # fmt: skip
SMALL = ("--requests", "4", "--input", "5:9", "--output", "6")
SLO_KEYS = {"slo_ms", "slo_met", "goodput_requests_per_second"}


def answer(ran):
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_offline(tiny_model, tmp_path):
    page = tmp_path / "run.html"
    found = answer(baton("bench", "offline", tiny_model, *SMALL, "--json", "--slo", "ttft:100s,itl:100s", "--html", page))
    assert found.keys() >= KEYS | SLO_KEYS
    assert (found["requests"], found["completed"], found["output_tokens"], found["slo_met"]) == (4, 4, 24, 4)
    assert found["ttft_ms"].keys() == {"mean", "p50", "p90", "p99", "max"}
    assert found["ttft_ms"]["mean"] > 0
    text = page.read_text()
    assert text.count("<svg") == 4
    assert not re.search(r"(src|href)\s*=|@import|url\(|<script", text)


def test_latency(tiny_model):
    found = answer(baton("bench", "latency", tiny_model, "--input", "8", "--output", "5", "--rounds", "2", "--json"))
    assert found.keys() >= KEYS
    assert (found["requests"], found["output_tokens"], found["cached_tokens"]) == (2, 10, 0)


def test_serve_and_chat_on_one_server(tiny_model, tmp_path):
    with serving(tiny_model, "--kv-memory-gib", "0.05", "--served-model-name", "tiny") as server:
        at = ("--url", server.url)
        found = answer(baton("bench", "serve", *at, *SMALL, "--rate", "50", "--json"))
        assert found.keys() >= KEYS
        assert (found["completed"], found["failed"], found["short"], found["output_tokens"]) == (4, 0, 0, 24)
        shared = ("--workload", "shared-prefix", "--prefix", "64", "--groups", "1", "--concurrency", "1", "--ids", "40:90")
        assert answer(baton("bench", "serve", *at, *SMALL, *shared, "--json"))["cached_tokens"] >= 3 * 64
        trace = tmp_path / "trace.jsonl"
        rows = [{"timestamp": 100 * i, "input_length": 600, "output_length": 50, "hash_ids": [7, i]} for i in range(3)]
        trace.write_text("\n".join(map(json.dumps, rows)))
        replay = ("--workload", "trace", "--trace", trace, "--scale", "0.1", "--endpoint", "chat")
        found = answer(baton("bench", "serve", *at, *replay, "--json"))
        assert (found["completed"], found["output_tokens"]) == (3, 15)
        plain = baton("bench", "serve", *at, *SMALL)
        assert "4 of 4 complete" in plain.stdout
        failing = baton("bench", "serve", *at, "--requests", "2", "--input", "5000", "--output", "4", "--json")
        assert failing.returncode == 1
        assert json.loads(failing.stdout)["failed"] == 2
        talk = baton("chat", *at, "--max-tokens", "5", "--temperature", "0", stdin="Hello\n/reset\nHello\n/exit\nnever\n")
        assert talk.returncode == 0, talk.stderr
        assert talk.stderr.count("5 tokens") == 2
        first, second = talk.stdout.strip().split("\n", 1) if talk.stdout.count("\n") == 2 else ("", "")
        assert first == second


@pytest.mark.slow
def test_chat_starts_a_server_of_its_own(tiny_model):
    ran = baton("chat", tiny_model, "--max-tokens", "3", stdin="Hi\n")
    assert ran.returncode == 0, ran.stderr
    assert f"starting a server with {tiny_model} for this chat" in ran.stderr or "starting one with" in ran.stderr
    assert "3 tokens" in ran.stderr


def test_nobody_else_can_ask_the_server_of_a_chat(monkeypatch):
    """It listens on this machine, where others may have processes too."""
    seen = {}

    def start(config, said):
        seen.update(config)
        raise Failed("far enough")

    monkeypatch.setattr(private_server, "resolve_model", lambda name, command: "/models/one")
    monkeypatch.setattr(private_server, "_start", start)
    with pytest.raises(Failed), private_server.private_server("one"):
        pass
    assert seen["host"] == "127.0.0.1"
    (key,) = seen["api_key"]
    assert len(key) >= 32


def test_no_server_is_said(tmp_path):
    for command in (("bench", "serve"), ("chat",)):
        ran = baton(*command, "--url", "http://127.0.0.1:9")
        assert ran.returncode == 1
        assert "no server answers" in ran.stderr
        assert "baton serve" in ran.stderr


# Workloads


def test_workloads_are_the_same_for_a_seed():
    assert random_requests(3, (4, 9), (1, 5), seed=3) == random_requests(3, (4, 9), (1, 5), seed=3)
    assert random_requests(3, (4, 9), (1, 5), seed=3) != random_requests(3, (4, 9), (1, 5), seed=4)


def test_groups_share_their_prefix_and_nothing_else():
    asks = shared_prefix_requests(6, 2, 10, (5, 5), (1, 1), seed=0)
    assert len({ask.symbols[:10] for ask in asks}) == 2
    assert len({ask.symbols[10:] for ask in asks}) == 6


def test_equal_hash_ids_are_equal_blocks(tmp_path):
    file = tmp_path / "trace.jsonl"
    rows = [(1000, 1100, [1, 2, 3]), (3000, 1024, [1, 2]), (3500, 700, [1, 9])]
    file.write_text(
        "\n".join(json.dumps({"timestamp": t, "input_length": n, "output_length": 8, "hash_ids": h}) for t, n, h in rows)
    )
    first, second, third = trace_requests(file, None, 1.0, 2.0, seed=0)
    assert [ask.at_seconds for ask in (first, second, third)] == [0.0, 1.0, 1.25]
    assert [len(ask.symbols) for ask in (first, second, third)] == [1100, 1024, 700]
    assert first.symbols[:1024] == second.symbols
    assert third.symbols[:512] == first.symbols[:512]
    assert third.symbols[512:] != first.symbols[512:700]


@pytest.mark.parametrize("text", ["", "x", "5:3", "0", "-1:4"])
def test_spans_that_are_none(text):
    with pytest.raises(Failed, match="--input"):
        read_span(text, "--input")


# Measures


PIECE = b'{"choices": [{"text": "a", "finish_reason": null}]}'
END = b'{"choices": [{"text": "", "finish_reason": "length"}]}'


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([PIECE, END, b"[DONE]"], ""),
        ([PIECE, END], "the stream ended without [DONE]"),
        ([PIECE, b"[DONE]"], "the stream ended without a finish_reason"),
        ([END, b"[DONE]"], "the stream ended without tokens"),
        ([PIECE, b'{"error": {"message": "lost"}}', b"[DONE]"], "error in the stream: {'message': 'lost'}"),
    ],
)
def test_an_answer_counts_if_it_is_whole(monkeypatch, events, error):
    async def stream(*_):
        for event in events:
            yield event

    monkeypatch.setattr(load, "stream_events", stream)
    plan = load.LoadPlan(server=ServerAddress("http://nowhere"), model="m")
    record = asyncio.run(load.send(plan, random_requests(1, (1, 1), (1, 1), 0)[0], 0.0))
    assert record.error == error


@pytest.mark.parametrize(
    "delta", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}, {"content": "a"}]
)
def test_reasoning_and_calls_are_pieces_of_a_chat(monkeypatch, delta):
    async def stream(*_):
        for choice in ({"delta": {"role": "assistant", "content": ""}}, {"delta": delta}, {"delta": {"content": "b"}}):
            yield json.dumps({"choices": [choice]}).encode()
        yield b'{"choices": [{"delta": {}, "finish_reason": "stop"}]}'
        yield b"[DONE]"

    monkeypatch.setattr(load, "stream_events", stream)
    plan = load.LoadPlan(server=ServerAddress("http://nowhere"), model="m", endpoint="chat")
    record = asyncio.run(load.send(plan, random_requests(1, (1, 1), (1, 1), 0)[0], 0.0))
    assert (record.error, len(record.pieces)) == ("", 2)


def test_no_more_requests_are_open_than_shall_be(monkeypatch):
    open_now = most = 0

    async def send(plan, ask, begin):
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        open_now -= 1
        return Record(sent=0.0, asked_tokens=1)

    monkeypatch.setattr(load, "send", send)
    for bound, expected in ((3, 3), (None, 20)):
        most = 0
        plan = load.LoadPlan(server=ServerAddress("http://nowhere"), model="m", concurrency=bound)
        records, _ = asyncio.run(load.run_load(plan, random_requests(20, (1, 1), (1, 1), 0), lambda *_: None))
        assert (len(records), most) == (20, expected)


def test_measures_of_known_times():
    record = Record(sent=1.0, asked_tokens=3, pieces=[1.5, 1.6, 1.9], ended=2.0, input_tokens=10, output_tokens=3)
    failed = Record(sent=0.0, asked_tokens=3, error="gone")
    found = summarize([record, failed], 2.0, {"ttft": 0.6})
    assert (found["completed"], found["failed"], found["errors"]) == (1, 1, ["gone"])
    assert found["ttft_ms"]["mean"] == 500.0
    assert found["tpot_ms"]["p50"] == 200.0
    assert found["itl_ms"]["max"] == 300.0
    assert found["e2e_ms"]["p99"] == 1000.0
    assert found["total_tokens_per_second"] == 6.5
    assert (found["slo_met"], found["goodput_requests_per_second"]) == (1, 0.5)


def test_percentiles_lie_between_neighbours():
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([7.0], 0.99) == 7.0


def test_slo_is_read_and_kept():
    slo = read_slo("ttft:500, itl:50ms,e2e:2s")
    assert slo == {"ttft": 0.5, "itl": 0.05, "e2e": 2.0}
    record = Record(sent=0.0, asked_tokens=2, pieces=[0.4, 0.44], ended=0.5, output_tokens=2)
    assert meets(record, slo)
    assert not meets(record, {"ttft": 0.3})
    for wrong in ("ttft", "speed:5", "ttft:-1", "ttft:x"):
        with pytest.raises(Failed, match="--slo"):
            read_slo(wrong)


def test_acceptance_is_read_from_the_metrics_of_any_server():
    """Sums over engines. vLLM writes floats, and labels."""
    text = "# TYPE vllm:spec_decode_num_drafts counter\n" + "".join(
        f'vllm:spec_decode_{name}_total{{engine="{engine}"}} {value}\n'
        for name, value in (("num_drafts", 10.0), ("num_draft_tokens", 40.0), ("num_accepted_tokens", 1.5e1))
        for engine in (0, 1)
    )
    text += 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 99\n'
    assert read_counts(text) == (20, 80, 30)
    assert read_counts("vllm:request_success_total 3") is None
    assert drafts_since((10, 40, 20), (20, 80, 30)) == {
        "draft_tokens": 40, "accepted_draft_tokens": 10, "draft_acceptance_rate": 0.25, "acceptance_length": 2.0,
    }  # fmt: skip
    assert drafts_since(None, (1, 1, 1)) == drafts_since((1, 1, 1), (1, 1, 1)) == drafts_since((5, 5, 5), (1, 1, 1)) == {}
