"""Which measurements count, and what they say about the goals."""

import pytest

from measuring.figures import NotMeasured
from measuring.goals import GOALS, Results, figures_table, goals_table, growth_tables, limits_table

LIMITS = {"read_100_mib_gb_s_all": 46.08, "int8_gop_s_all": 1000.0}


def row(engine, case, number=0, foreign=0.0, attempt=0, **figures):
    return {"round": number, "case": case, "engine": engine, "try": attempt, "pressure": 0.0, "foreign": foreign, **figures}


def goal(words, found):
    return next(each for each in GOALS if each.words.startswith(words)).measure(found)


def test_the_least_disturbed_try_counts_whatever_its_result():
    tries = [(0.3, 500.0), (0.02, 100.0), (0.1, 300.0)]
    rows = [row("baton-int8", "decode", foreign=f, attempt=n, decode=v) for n, (f, v) in enumerate(tries)]
    assert Results(rows).median("baton-int8", "decode") == 100.0


def test_disturbed_rounds_count_only_where_there_are_no_others():
    quiet = row("baton-int8", "decode", 0, 0.01, decode=100.0)
    busy = [row("baton-int8", "decode", n, 0.5, decode=30.0 * n) for n in (1, 2)]
    assert Results([quiet, *busy]).median("baton-int8", "decode") == 100.0
    found = Results(busy)
    assert found.median("baton-int8", "decode") == 45.0
    assert found.disturbed("baton-int8", "decode")
    assert "~45.0" in figures_table(found)


def test_ratios_are_of_one_round():
    """A machine that halves its speed after the first round changes no ratio."""
    speeds = [1.0, 0.5, 0.5]
    rows = [row("baton-int8", "decode", n, decode=200.0 * s) for n, s in enumerate(speeds)]
    rows += [row("llamacpp-q8_0", "decode", n, decode=100.0 * s) for n, s in enumerate(speeds) if n != 1]
    found = Results(rows)
    assert found.ratio("baton-int8", "llamacpp-q8_0", "decode") == 2.0
    with pytest.raises(NotMeasured):
        found.ratio("baton-int8", "vllm-bfloat16", "decode")


def test_one_stream_is_compared_at_the_same_bits():
    rows = [row("baton-int4", "decode", decode=300.0), row("baton-int8", "decode", decode=150.0)]
    rows += [row(f"llamacpp-{q}", "decode", decode=v) for q, v in (("q4_0", 100.0), ("q4_1", 200.0), ("q8_0", 100.0))]
    rows += [row("vllm-bfloat16", "decode", decode=1000.0)]
    found = Results(rows)
    assert goal("one stream, 4-bit", found).value == 1.5
    assert goal("one stream, 4-bit", found).how == "baton-int4 / llamacpp-q4_1"
    assert goal("one stream, 8-bit", found).value == 1.5


def test_throughput_is_compared_with_the_best_of_all():
    rows = [row("baton-int4", "batch", batch=900.0), row("baton-int8", "batch", batch=1200.0)]
    rows += [row("llamacpp-q8_0", "batch", batch=200.0), row("vllm-bfloat16", "batch", batch=400.0)]
    assert goal("32 requests", Results(rows)).value == 3.0


def test_latency_is_compared_with_the_shortest():
    rows = [row("baton-int8", "http", http=10.0, http_ttft_ms=100.0)]
    rows += [
        row("llamacpp-q8_0", "http", http=9.0, http_ttft_ms=900.0),
        row("vllm-bfloat16", "http", http=1.0, http_ttft_ms=200.0),
    ]
    assert goal("HTTP, mean TTFT", Results(rows)).value == 0.5


def test_a_promise_is_the_worst_engines():
    rows = [row(f"baton-{q}", "neighbour", neighbour_decode=v) for q, v in (("int4", 0.4), ("int8", 0.7))]
    had = goal("beside a busy neighbour, one stream", Results(rows))
    assert (had.value, had.how) == (0.4, "baton-int4")


def test_growth():
    running = {"128": [(1, 5000.0), (2, 3000.0), (4, 3300.0), (8, 1000.0)]}
    context = [(256, 5256.0), (1024, 6024.0), (4096, 9096.0)]  # 1 µs a token of context
    rows = [row("baton-int8", "growth", growth_running=running, growth_context=context)]
    found = Results(rows, LIMITS, {"kv_bytes_a_token": {"baton-int8": 46080}})
    assert goal("cost of a token", found).value == pytest.approx(0.1)
    assert goal("cost against context: a straight", found).value == pytest.approx(1.0)
    assert goal("cost against context: slope", found).value == pytest.approx(1.0)
    assert "1000 ns a token, R² 1.000" in growth_tables(found)


def test_what_was_not_measured_is_said():
    lines = goals_table(Results([])).splitlines()
    assert len(lines) == len(GOALS) + 2
    assert all("not measured" in line for line in lines[2:])


def test_tables_say_met_and_missed():
    rows = [row("baton-int4", "decode", decode=150.0), row("llamacpp-q4_0", "decode", decode=100.0)]
    assert "| >= 1.5x | 1.5x | met |" in goals_table(Results(rows))
    rows[0] = row("baton-int4", "decode", decode=149.0)
    assert "| **missed** | baton-int4 / llamacpp-q4_0 |" in goals_table(Results(rows))


def test_limits_are_shares():
    facts = {"model": {"baton-int8": {"weight_bytes": 92_160_000.0, "layer_weights": 1e8, "weights": 1e8}}}
    rows = [row("baton-int8", "decode", decode=250.0), row("baton-int8", "prefill", prefill=2500.0)]
    text = limits_table(Results(rows, LIMITS, facts))
    assert "50 % of reads, 100 MiB" in text
    assert "50 % of int8 dot" in text
