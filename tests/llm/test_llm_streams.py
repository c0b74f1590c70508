"""`LLM`: stop strings, streams, vLLM's names, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from chaos_model import make_model

from baton.errors import CallerError, InvalidConfig
from baton.llm import LLM, Chunk, SamplingParams, StructuredOutputsParams
from baton.llm.outputs import Output, SequenceText
from baton.llm.sampling import wire_params
from baton.protocol.request import SamplingParams as WireParams
from baton.text.stops import StopAutomaton

SIZES = {"threads": 1, "kv_blocks": 60, "block_size": 4, "slots": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SIZES) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm: LLM):
    yield
    llm.instance.check()
    assert not llm.instance.board.groups
    assert not llm._call.answers
    assert not llm._in_use.locked()


def drawn(**more) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "temperature": 1.0, "seed": 7, "ignore_eos": True, **more})


def whole_text(llm: LLM, **more) -> str:
    return llm.generate("abc", drawn(**more))[0].outputs[0].text


def a_stop(text: str) -> str:
    """Three characters of the middle, as they come there for the first time."""
    return next(text[place : place + 3] for place in range(8, len(text) - 3) if text.find(text[place : place + 3]) == place)


def test_a_stop_string_ends_the_answer_and_is_not_in_it(llm: LLM):
    text = whole_text(llm)
    stop = a_stop(text)
    (answer,) = llm.generate("abc", drawn(stop=stop))
    (output,) = answer.outputs
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) < 40
    assert answer.finished
    assert stop in llm.tokenizer.decode(output.token_ids), "tokens to the one that completed it"


def test_a_stop_string_may_be_shown(llm: LLM):
    text = whole_text(llm)
    stop = a_stop(text)
    (output,) = llm.generate("abc", drawn(stop=["never there", stop], include_stop_str_in_output=True))[0].outputs
    assert output.text == text[: text.index(stop)] + stop


def test_stop_strings_of_one_output_leave_the_others_alone(llm: LLM):
    free = [output.text for output in llm.generate("abc", drawn(n=3))[0].outputs]
    stop = a_stop(free[1])
    stopped = llm.generate("abc", drawn(n=3, stop=stop, logprobs=0))[0].outputs
    for text, output in zip(free, stopped, strict=True):
        assert output.text == text.partition(stop)[0]
        assert output.finish_reason == ("stop" if stop in text else "length")
        assert len(output.logprobs) == len(output.token_ids)


def test_log_probabilities_end_where_a_stop_string_does(llm: LLM):
    (output,) = llm.generate("abc", drawn(stop=a_stop(whole_text(llm)), logprobs=0))[0].outputs
    assert len(output.logprobs) == len(output.token_ids) < 40
    assert [row.token for row in output.logprobs] == output.token_ids


def test_no_stop_string_ends_an_answer_before_min_tokens(llm: LLM):
    text = whole_text(llm)
    assert whole_text(llm, stop=a_stop(text), min_tokens=40) == text


def test_the_token_after_min_tokens_may_complete_a_stop_string(llm: LLM):
    ids = llm.tokenizer.encode("abc", add_special_tokens=False)
    for least, stopped in ((len(ids) - 1, True), (len(ids), False)):
        asked = SamplingParams(stop=llm.tokenizer.decode(ids[-1:]), min_tokens=least)
        text = SequenceText(llm.tokenizer, asked, StopAutomaton(asked.stops), Output(0))
        for token in ids:
            text.feed(token, ends=False)
        assert text.stopped is stopped


def test_a_named_stop_token_ends_besides_the_model_s_own_and_has_no_text(llm: LLM):
    (free,) = llm.generate("abc", drawn())[0].outputs
    place = next(place for place in range(5, 30) if free.token_ids.index(free.token_ids[place]) == place)
    (output,) = llm.generate("abc", drawn(stop_token_ids=[free.token_ids[place]]))[0].outputs
    assert output.token_ids == free.token_ids[: place + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", free.token_ids[place])
    assert output.text == llm.tokenizer.decode(free.token_ids[:place])


@pytest.mark.parametrize(("stop", "why"), [("", "empty"), (["a"] * 17, "at most 16"), ([5], "must be a string")])
def test_stop_strings_that_make_no_sense_are_refused(llm: LLM, stop, why: str):
    with pytest.raises(CallerError, match=why):
        llm.generate(["a", "b"], drawn(stop=stop))


def joined(chunks: list[Chunk]) -> dict[tuple[int, int], tuple[str, list[int], str]]:
    found: dict[tuple[int, int], tuple[str, list[int], str]] = {}
    for chunk in chunks:
        text, tokens, finish = found.get((chunk.prompt_index, chunk.index), ("", [], ""))
        assert not finish, "nothing comes after the end"
        found[chunk.prompt_index, chunk.index] = (text + chunk.text, tokens + chunk.token_ids, chunk.finish_reason)
    return found


def test_a_stream_brings_what_a_whole_answer_has(llm: LLM):
    stop = a_stop(whole_text(llm))
    prompts, sampling = ["abc", "defgh", "i"], drawn(n=2, stop=stop, logprobs=1)
    answers = llm.generate(prompts, sampling)
    chunks = list(llm.stream(prompts, sampling))
    assert joined(chunks) == {
        (place, output.index): (output.text, output.token_ids, output.finish_reason)
        for place, answer in enumerate(answers)
        for output in answer.outputs
    }
    assert len(chunks) > 20, "as they come, and not at the end"
    assert sum(len(chunk.logprobs) for chunk in chunks) == sum(len(chunk.token_ids) for chunk in chunks)
    assert stop in {chunk.stop_reason for chunk in chunks if chunk.finish_reason == "stop"}


def test_a_chat_is_streamed_too(llm: LLM):
    chat = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat(chat, drawn())
    assert "".join(chunk.text for chunk in llm.stream_chat(chat, drawn())) == answer.outputs[0].text


@pytest.mark.parametrize("leave", ["close", "with", "forget"])
def test_a_stream_that_is_left_early_ends_its_requests(llm: LLM, leave: str):
    expected = whole_text(llm)
    stream = llm.stream(["abc", "def"], drawn())
    next(stream)
    with pytest.raises(CallerError, match="read a stream to its end or close it"):
        llm.generate("x", drawn())
    if leave == "close":
        stream.close()
        assert list(stream) == []
    elif leave == "with":
        with stream:
            next(stream)
    else:
        del stream
    assert whole_text(llm) == expected


def test_bad_arguments_of_a_stream_are_refused_before_it_is_read(llm: LLM):
    with pytest.raises(CallerError, match="fit the context"):
        llm.stream("", drawn())


def test_a_failure_inside_a_stream_leaves_the_model_as_new(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    expected = whole_text(llm)
    stream = llm.stream("abc", drawn())
    next(stream)
    with monkeypatch.context() as patched:
        patched.setattr(llm._runner, "finish", lambda in_flight: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            list(stream)
    assert whole_text(llm) == expected


def test_prompts_in_vllm_s_forms(llm: LLM):
    text = whole_text(llm)
    ids = llm.get_tokenizer().encode("abc")
    for prompts in ({"prompt": "abc"}, [{"prompt_token_ids": ids}], ["abc"], ids):
        assert llm.generate(prompts=prompts, sampling_params=drawn())[0].outputs[0].text == text
    with pytest.raises(CallerError, match="prompt or prompt_token_ids"):
        llm.generate({"text": "abc"})


def test_sampling_parameters_in_vllm_s_forms(llm: LLM):
    free = set(llm.generate("abc", drawn())[0].outputs[0].token_ids)
    liked = next(token for token in range(20, 60) if token not in free)
    (output,) = llm.generate("abc", drawn(logit_bias={liked: 100.0}, top_k=0, max_tokens=4))[0].outputs
    assert output.token_ids == [liked] * 4
    word = llm.tokenizer.decode([liked])
    (output,) = llm.generate("abc", drawn(logit_bias={liked: 100.0}, bad_words=[word], max_tokens=4))[0].outputs
    assert liked not in output.token_ids


def test_what_the_engine_is_told_of_them(llm: LLM):
    def told(**given) -> WireParams:
        return wire_params(SamplingParams(**given), {"temperature": 0.6, "top_k": 40}, 5, llm.tokenizer)

    ends = tuple(llm.tokenizer.eos_ids)
    assert (told().temperature, told().top_k, told().seed, told().stop_token_ids) == (0.6, 40, 5, ends)
    assert (told(temperature=0.1).temperature, told(top_k=0).top_k) == (0.1, -1)
    assert (told(seed=3).seed, told(seed=-1).seed) == (3, 5)
    assert told(ignore_eos=True, stop_token_ids=[9]).stop_token_ids == (9,)
    words = {tuple(ids) for ids in llm.tokenizer.encode_words(["ab", " ab"])}
    assert set(told(bad_words=["ab"]).bad_words) == words
    digits = told(ignore_eos=True, stop_token_ids=[9], structured_outputs=StructuredOutputsParams(regex="[0-9]+"))
    assert digits.stop_token_ids == (*ends, 9), "what it demands ends, and the end is a token"
    assert (digits.grammar.ends, digits.grammar.ends_late) == (ends, True)


def test_settings_under_vllm_s_names(folder: Path):
    with LLM(
        str(folder), threads=1, num_gpu_blocks_override=60, block_size=4, max_num_seqs=3, max_model_len=100,
        trust_remote_code=True, tensor_parallel_size=1, enable_prefix_caching=False, quantization=None,
    ) as one:  # fmt: skip
        config = one.config
        assert (config.kv_blocks, config.max_num_seqs, config.max_model_len, config.enable_prefix_caching) == (
            60,
            3,
            100,
            False,
        )


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_num_seq": 3}, "max_num_seq is no setting of LLM; did you mean max_num_seqs?"),
        ({"slots": 3, "max_num_seqs": 3}, "max_num_seqs is given twice"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, and LLM computes in one process"),
        ({"data_parallel_size": 2}, "data_parallel_size is 2, and LLM computes in one process"),
        ({"enable_lora": True}, "enable_lora is no setting here: LoRA adapters are not supported yet"),
        ({"swap_space": 4}, "--kv-host-gib"),
        ({"enable_loras": True}, "enable_loras is no setting of LLM$"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(settings: dict[str, int], why: str):
    with pytest.raises(InvalidConfig, match=why.replace("?", r"\?")):
        LLM("no-such-model", **settings)


def test_with_a_seed_the_same_calls_draw_the_same_tokens(folder: Path):
    made = []
    for seed in (5, 5, 6):
        with LLM(str(folder), seed=seed, **SIZES) as one:
            made.append([one.generate("abc", drawn(seed=None))[0].outputs[0].token_ids for _ in range(2)])
    assert made[0] == made[1] != made[2]
    assert made[0][0] != made[0][1]


def test_a_closed_llm_says_so(folder: Path):
    with LLM(str(folder), **SIZES) as one:
        one.generate("abc", drawn(max_tokens=2))
    one.close()
    for call in (one.generate, one.stream):
        with pytest.raises(CallerError, match="closed"):
            call("abc")


@pytest.mark.parametrize("leaves", ["by itself", "by an exception"])
def test_the_end_of_with_ends_a_stream_that_is_open(folder: Path, leaves: str):
    """It was refused as a second call: the model stayed, and the exception of the block was lost."""
    with pytest.raises(KeyError) if leaves == "by an exception" else nullcontext(), LLM(str(folder), **SIZES) as one:
        stream = one.stream("abc", drawn())
        next(stream)
        if leaves == "by an exception":
            raise KeyError
    assert list(stream) == []
    with pytest.raises(CallerError, match="closed"):
        one.generate("abc")


def test_two_models_in_one_process(llm: LLM, folder: Path):
    alone = whole_text(llm)
    with LLM(str(folder), **SIZES) as other, llm.stream("abc", drawn()) as one:
        first = next(one).text
        assert whole_text(other) == alone
        assert first + "".join(chunk.text for chunk in one) == alone


def test_vectors(llm: LLM):
    texts = ["abc", "defg", "abc"]
    mean, last = llm.embed(texts, use_tqdm=False), llm.embed(texts, pooling="last")
    assert [each.prompt for each in mean] == texts
    for made in (mean, last):
        assert made[0].outputs.embedding == made[2].outputs.embedding != made[1].outputs.embedding
        assert all(sum(x * x for x in each.outputs.embedding) == pytest.approx(1, abs=1e-3) for each in made)
    assert mean[0].outputs != last[0].outputs


def test_what_vllm_s_callers_say_besides(llm: LLM):
    text = whole_text(llm)
    assert llm.generate(["abc"], drawn(), use_tqdm=True)[0].outputs[0].text == text
    chat = [{"role": "user", "content": "abc"}]
    assert llm.chat(chat, drawn(), use_tqdm=False)[0].outputs[0].text == llm.chat([chat], drawn())[0].outputs[0].text
    drawings = {tuple(llm.generate("abc", drawn(seed=-1))[0].outputs[0].token_ids) for _ in range(3)}
    assert len(drawings) > 1, "-1 is no seed"


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda llm: llm.generate(None), "prompts must be .* not NoneType"),
        (lambda llm: llm.chat("abc"), "messages must be .* not str"),
        (lambda llm: llm.chat(["abc"]), "messages must be a list"),
        (
            lambda llm: llm.chat([{"role": "user", "content": "a"}], chat_template="x"),
            "chat has no option chat_template: there",
        ),
        (lambda llm: llm.generate("abc", drawn(min_tokens=9, max_tokens=4)), "min_tokens is 9, and max_tokens 4"),
    ],
)
def test_what_is_wrong_is_said(llm: LLM, call, why: str):
    with pytest.raises(CallerError, match=why):
        call(llm)
