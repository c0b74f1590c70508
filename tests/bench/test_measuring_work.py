"""Every engine gets the same ids, and no engine gets the same ids twice."""

import json

import quality
from measuring.client import request_bytes
from measuring.work import IDS, QUICK, Sizes, alike, batch, batch_lengths, prompt


def test_ids_depend_on_the_place_alone():
    assert prompt(64, 0, "decode", 0) == prompt(64, 0, "decode", 0)
    others = [prompt(64, *place) for place in ((0, "decode", 1), (1, "decode", 0), (0, "prefill", 0))]
    assert prompt(64, 0, "decode", 0) not in others
    assert set(prompt(500, "x")) <= set(IDS)


def test_lengths_are_those_of_every_round():
    assert [len(each) for each in batch(32, 0)] == [len(each) for each in batch(32, 1)] == batch_lengths(32)
    assert batch(32, 0) != batch(32, 1)
    assert all(64 <= length <= 256 for length in batch_lengths(200))
    assert [len(each) for each in alike(3, 5, "x")] == [5, 5, 5]


def test_the_growth_fits_what_drivers_have_room_for():
    from measuring.engines import DRIVER_SEQUENCES, DRIVER_TOKENS

    for sizes in (Sizes(), QUICK):
        count, length = max(sizes.growth_running), max(sizes.growth_prompts)
        assert count <= DRIVER_SEQUENCES
        assert length + sizes.growth_output + count * length // 512 <= DRIVER_TOKENS
        assert max(batch_lengths(sizes.requests)) + sizes.output <= DRIVER_TOKENS


def test_a_request_is_whole():
    head, body = request_bytes(80, "model", [1, 2], 5).split(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body) | {"prompt": [1, 2], "max_tokens": 5, "stream": True} == json.loads(body)


# The text of bench/quality.py


def test_windows_lie_evenly_and_never_overlap():
    windows = quality.evenly(range(1000), 100, 4)
    assert [window[0] for window in windows] == [0, 200, 500, 700]
    assert all(window == list(range(window[0], window[0] + 100)) for window in windows)
    assert len(quality.evenly(range(250), 100, 4)) == 2


def test_three_quarters_come_from_the_reference():
    assert quality.shares(16, 2) == [12, 4]
    assert quality.shares(16, 1) == [16]
    assert "yield" in quality.texts()[0]


def test_quality_is_a_difference_of_pairs():
    exact = [-1.0, -2.0, -3.0]
    same = quality.Quality.of("none", exact, exact, 0.0)
    assert (same.difference, same.error) == (0.0, 0.0)
    worse = quality.Quality.of("int8", [each - 0.01 for each in exact], exact, 0.005)
    assert 0.0100 < worse.difference < 0.0102
    assert worse.error < 1e-9
    assert not worse.met
    assert worse.cells()[-1] == "**missed**"
    assert quality.Quality.of("int4", [each - 0.01 for each in exact], exact, 0.05).met
