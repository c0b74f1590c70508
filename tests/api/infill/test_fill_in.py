"""Fill in the middle and truncation, with a scripted engine."""

from __future__ import annotations

import json
from dataclasses import replace

import ollama
import openai
import pytest
from api_fakes import CONTEXT, Script, says, serving
from jinja2 import Environment

from baton.text.fill_in import SNIPPET, FillIn, fill_in_tokens, plain
from baton.text.tokenizer import Tokenizer

MARKS = {"pre": 11, "suf": 12, "mid": 13, "pad": 14, "rep": 3, "sep": 5}


@pytest.fixture(scope="module")
def coder(text):
    """The same tokenizer, in a file that names tokens for it."""
    tokenizer = Tokenizer(replace(text.tokenizer._parts, fill_in_ids=MARKS))
    with serving(replace(text, tokenizer=tokenizer)) as server:
        yield server


@pytest.fixture(autouse=True)
def fresh(coder):
    coder.engine.requests.clear()
    coder.engine.script = Script()


def test_suffix_of_completions(coder, text):
    with openai.OpenAI(base_url=coder.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        coder.engine.script = Script(reply=says(text, "a + b"))
        answer = client.completions.create(model="smol", prompt="def f(a, b):\n    return ", suffix="\n\nprint(f(1, 2))\n")
    assert answer.choices[0].text == "a + b"
    request = coder.engine.requests[0]
    before, after = (plain(text.tokenizer, part) for part in ("def f(a, b):\n    return ", "\n\nprint(f(1, 2))\n"))
    assert request.prompt == (11, *before, 12, *after, 13)
    assert {14, 3, 5} <= set(request.sampling.stop_token_ids)


def test_suffix_of_ollama(coder, text):
    coder.engine.script = Script(reply=says(text, "x"))
    answer = ollama.Client(host=coder.url, timeout=20).generate("smol", "before ", suffix=" after")
    assert answer.response == "x"
    assert coder.engine.requests[0].prompt[0] == 11
    refused = ollama.Client(host=coder.url, timeout=20)
    with pytest.raises(ollama.ResponseError, match="suffix is not used with system"):
        refused.generate("smol", "before", suffix="after", system="x")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("preemptions", [0, 3])
def test_the_last_part_of_an_infill_counts_preemptions(coder, http, preemptions, streamed):
    coder.engine.script = Script(preemptions=preemptions)
    body = {"input_prefix": "a", "input_suffix": "b", "n_predict": 2, "stream": streamed}
    answer = http.post(coder.url + "/infill", json=body)
    assert answer.status_code == 200, answer.text
    last = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: ")) if streamed else answer.json()
    assert last.get("baton_preemptions") == (preemptions or None)
    assert "draft_n" not in last["timings"]


def test_the_timings_of_an_infill_count_drafts(coder, http):
    coder.engine.script = Script(drafted_tokens=7, accepted_tokens=5)
    timings = http.post(coder.url + "/infill", json={"input_prefix": "a", "input_suffix": "b", "n_predict": 2}).json()[
        "timings"
    ]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (7, 5)


def test_clients_of_ollama_learn_that_a_model_fills_in_the_middle(coder, text):
    """Continue looks for .Suffix in the template (core/llm/llms/Ollama.ts). The template renders as before."""
    shown = ollama.Client(host=coder.url, timeout=20).show("smol")
    assert "insert" in shown.capabilities
    assert ".Suffix" in shown.template
    chat = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True}
    [before, after] = [Environment().from_string(each).render(chat) for each in (text.chat_template.sources[0], shown.template)]
    assert before == after


def test_marks_in_a_text_are_plain_characters(coder, http):
    body = {"model": "smol", "prompt": "<repo_name> a", "suffix": "<file_sep><repo_name>"}
    assert http.post(coder.url + "/v1/completions", json=body).status_code == 200
    assert not {3, 5} & set(coder.engine.requests[0].prompt)


def test_infill(coder, http, text):
    coder.engine.script = Script(reply=says(text, "a + b"), cached_tokens=2)
    extra = [{"filename": "one.py", "text": "x = 1\n"}]
    body = {"input_prefix": "return ", "input_suffix": "\n", "input_extra": extra, "prompt": "(", "n_predict": 9, "top_k": 3}
    answer = http.post(coder.url + "/infill", json={**body, "cache_prompt": True, "samplers": ["top_k"]})
    ids = [plain(text.tokenizer, part) for part in ("myproject\n", "one.py\nx = 1\n", "filename\n", "return ", "\n", "(")]
    assert coder.engine.requests[0].prompt == (3, *ids[0], 5, *ids[1], 5, *ids[2], 11, *ids[3], 12, *ids[4], 13, *ids[5])
    found = answer.json()
    assert (found["content"], found["stop"], found["stop_type"], found["truncated"]) == ("a + b", True, "eos", False)
    assert found["tokens_evaluated"] == len(coder.engine.requests[0].prompt)
    assert found["timings"]["prompt_n"] == found["tokens_evaluated"] - 2
    assert "x-baton-ignored" not in answer.headers


def test_infill_streams_and_chooses_fields(coder, http, text):
    coder.engine.script = Script(reply=says(text, "a + b"))
    body = {"input_prefix": "return ", "input_suffix": ""}
    events = http.post(coder.url + "/infill", json={**body, "stream": True}).text.split("\n\n")
    parts = [json.loads(line.removeprefix("data: ")) for line in events if line]
    assert "".join(part["content"] for part in parts) == "a + b"
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    chosen = http.post(coder.url + "/infill", json={**body, "response_fields": ["content", "timings/prompt_n"]}).json()
    assert set(chosen) == {"content", "timings/prompt_n"}


def test_infill_computes_the_prompt_alone(coder, http):
    answer = http.post(coder.url + "/infill", json={"input_prefix": "a", "input_suffix": "b", "n_predict": 0}).json()
    assert (answer["content"], coder.engine.requests[0].sampling.max_tokens) == ("", 1)


def test_infill_keeps_what_is_near_the_gap(coder, http, text):
    before, after = "".join(f"{n} " for n in range(600)), "".join(f" {n}" for n in range(600))
    extra = [{"filename": "x", "text": "word " * 300}]
    body = {"input_prefix": before, "input_suffix": after, "input_extra": extra, "n_predict": 12}
    assert http.post(coder.url + "/infill", json=body).json()["truncated"]
    prompt = list(coder.engine.requests[0].prompt)
    assert len(prompt) == CONTEXT - 12
    gap, begin, end = prompt.index(12), prompt.index(11), prompt.index(13)
    assert before.endswith(text.tokenizer.decode(prompt[begin + 1 : gap]))
    assert after.startswith(text.tokenizer.decode(prompt[gap + 1 : end]))
    assert end - gap - 1 == (CONTEXT - 12 - 3) // 4


@pytest.mark.parametrize("path", ["/infill", "/v1/completions", "/api/generate"])
def test_a_model_without_the_tokens_refuses(server, http, path):
    fields = {"input_prefix": "x", "input_suffix": "y"} if path == "/infill" else {"prompt": "x", "suffix": "y"}
    answer = http.post(server.url + path, json={"model": "smol", **fields})
    assert answer.status_code == 400
    assert "has no tokens to fill in the middle" in str(answer.json()["error"])
    assert not server.engine.requests


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), FillIn(0, 1, 2)),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), FillIn(0, 1, 2)),
        (("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"), FillIn(0, 1, 2)),
        (("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"), FillIn(0, 1, 2)),
        (("[PREFIX]", "[SUFFIX]"), FillIn(0, 1, None)),
        (("<|fim_prefix|>", "<|fim_suffix|>"), None),
    ],
)
def test_families_by_their_marks(pieces, expected):
    class Vocabulary:
        def __init__(self) -> None:
            self.fill_in_ids: dict[str, int] = {}

        def id_of(self, piece: str) -> int | None:
            return pieces.index(piece) if piece in pieces else None

    assert fill_in_tokens(Vocabulary()) == expected
    if expected is not None:
        middle = [8, 1, 9] if expected.middle is None else []
        assert expected.ids([8], [9]) == ([1, 9, 0, 8] if middle else [0, 8, 1, 9, 2])


def test_files_without_a_mark_are_snippets(text):
    from baton.text.fill_in import files_before

    ids, kept = files_before(text.tokenizer, FillIn(11, 12, 13), [("a.py", "x")], 100)
    assert (text.tokenizer.decode(ids), kept) == (SNIPPET + "x", 1)


def test_of_many_files_only_those_that_fit_are_tokenised(text):
    """The last ones are kept. A list of empty files costs no more than the room for them."""
    from baton.text.fill_in import files_before

    tokenised = []

    class Counting:
        def encode(self, part, **options):
            tokenised.append(part)
            return text.tokenizer.encode(part, **options)

    ids, kept = files_before(Counting(), FillIn(11, 12, 13, file=15), [(f"{n}.py", "") for n in range(10_000)], 64)
    assert 0 < kept <= 64
    assert len(ids) <= 64
    assert len(tokenised) <= kept + 2
    assert "9999.py" in text.tokenizer.decode(ids)


LONG = [20 + n % 200 for n in range(600)]


@pytest.mark.parametrize(("asked", "kept"), [(10, 10), (-1, CONTEXT - 16), (5000, CONTEXT - 1)])
def test_a_prompt_is_cut_to_its_last_tokens(server, http, asked, kept):
    """vLLM's truncate_prompt_tokens."""
    body = {"model": "smol", "prompt": LONG, "truncate_prompt_tokens": asked, "max_tokens": 1 if asked == 5000 else 16}
    assert http.post(server.url + "/v1/completions", json=body).status_code == 200
    assert list(server.engine.requests[0].prompt) == LONG[-kept:]


def test_texts_and_chats_are_cut(server, http, text):
    words = "word " * 700
    assert http.post(server.url + "/v1/completions", json={"prompt": words, "truncate_prompt_tokens": 7}).status_code == 200
    ids = text.tokenizer.encode(words)
    assert list(server.engine.requests[-1].prompt) == ids[-7:]
    chat = {"messages": [{"role": "user", "content": words}], "truncate_prompt_tokens": 20, "max_tokens": 3}
    assert http.post(server.url + "/v1/chat/completions", json=chat).status_code == 200
    assert len(server.engine.requests[-1].prompt) == 20
    for wrong in (0, -2, "x", True):
        refused = http.post(server.url + "/v1/completions", json={"prompt": "x", "truncate_prompt_tokens": wrong})
        assert refused.status_code == 400


def test_inputs_of_embeddings_are_cut_to_their_first_tokens(server, http):
    body = {"model": "smol", "input": [LONG, LONG[:3]], "truncate_prompt_tokens": 9}
    assert http.post(server.url + "/v1/embeddings", json=body).status_code == 200
    assert [list(request.prompt) for request in server.engine.requests] == [LONG[:9], LONG[:3]]


def test_ollama_cuts_unless_it_is_told_not_to(server):
    client = ollama.Client(host=server.url, timeout=20)
    client.embed("smol", "word " * 700)
    assert len(server.engine.requests[-1].prompt) == CONTEXT - 1
    with pytest.raises(ollama.ResponseError, match="context"):
        client.embed("smol", "word " * 700, truncate=False)


def test_what_the_tokenizer_puts_around_a_text_stays(text, http):
    tokenizer = Tokenizer(replace(text.tokenizer._parts, prefix_ids=(1,), suffix_ids=(2,)))
    with serving(replace(text, tokenizer=tokenizer)) as server:
        http.post(server.url + "/v1/embeddings", json={"input": "a b c d e f g h", "truncate_prompt_tokens": 5})
        prompt = server.engine.requests[0].prompt
        assert (len(prompt), prompt[0], prompt[-1]) == (5, 1, 2)
        assert list(prompt[1:4]) == plain(tokenizer, "a b c d e f g h")[:3]
