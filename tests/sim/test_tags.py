"""The tag machine: its closed form against the slowest possible way to say the same."""

import hashlib
from zlib import crc32

from baton.protocol.request import FinishReason, GenerateRequest, SamplingParams
from baton.sim.scenario import VOCAB
from baton.sim.tags import Oracle, draw, first_tag, next_tag, tag_bytes


def naive(request, index):
    """Recomputes everything from the first token for each new one."""
    tokens, sampling = list(request.prompt), request.sampling
    while True:
        tag, context = first_tag(request.salt), b""
        for token in tokens:
            tag = next_tag(tag, token)
            context += tag_bytes(tag)
        token = draw(crc32(context), sampling.seed, index, len(tokens), VOCAB)
        tokens.append(token)
        outputs = tokens[len(request.prompt) :]
        if token in sampling.stop_token_ids and len(outputs) >= sampling.min_tokens:
            return outputs, FinishReason.STOP
        if len(outputs) == sampling.max_tokens:
            return outputs, FinishReason.LENGTH


def request(number):
    bits = hashlib.sha256(str(number).encode()).digest()
    sampling = SamplingParams(
        max_tokens=1 + bits[0] % 30, stop_token_ids=(bits[1] % VOCAB,), min_tokens=bits[2] % 2, seed=bits[3], temperature=1.0
    )
    return GenerateRequest(id=str(number), prompt=tuple(b % VOCAB for b in bits[: 1 + bits[4] % 20]), sampling=sampling, n=2)


def test_closed_form_equals_the_naive_run():
    for number in range(60):
        for index in range(2):
            oracle = Oracle(request(number), index, VOCAB)
            assert (oracle.complete(), oracle.reason) == naive(request(number), index)


def test_any_change_of_the_context_changes_what_follows():
    tags = [first_tag(b"")]
    for token in range(10):
        tags.append(next_tag(tags[-1], token))
    assert len(set(tags)) == len(tags)
    assert first_tag(b"a") != first_tag(b"b")
    swapped = b"".join(map(tag_bytes, [*tags[5:], *tags[:5]]))
    assert crc32(swapped) != crc32(b"".join(map(tag_bytes, tags)))


def test_every_token_of_the_vocabulary_is_drawn():
    drawn = {draw(crc32(str(n).encode()), n, 0, n, VOCAB) for n in range(400)}
    assert drawn == set(range(VOCAB))
