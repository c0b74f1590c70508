"""The sampler's oracle: one row, plain Python and float64, written from the definitions."""

from __future__ import annotations

import math

from baton.protocol.request import SamplingParams

MASK = 0xFFFFFFFFFFFFFFFF


def naive_uniform(seed: int, index: int, position: int) -> float:
    def mixed(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    word = mixed((seed + golden) & MASK) ^ index
    word = mixed((word + golden) & MASK) ^ position
    return (mixed((word + golden) & MASK) >> 11) / 2**53


def naive_logits(logits: list[float], params: SamplingParams, prompt: list[int], outputs: list[int]) -> list[float]:
    changed = list(logits)
    for word in params.bad_words:
        rest, last = list(word[:-1]), word[-1]
        if last < len(changed) and (not rest or outputs[-len(rest) :] == rest):
            changed[last] = -math.inf
    if len(outputs) < params.min_tokens:
        for token in params.stop_token_ids:
            if token < len(changed):
                changed[token] = -math.inf
    for token, value in dict(params.logit_bias).items():
        if token < len(changed):
            changed[token] += value
    for token in range(len(changed)):
        if token in prompt or token in outputs:
            changed[token] *= 1 / params.repetition_penalty if changed[token] > 0 else params.repetition_penalty
        changed[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty * (token in outputs)
    return changed


def naive_kept(logits: list[float], params: SamplingParams) -> list[tuple[int, float]]:
    """Tokens that may be drawn, in the order of the running sum, with their weights."""
    best = max(logits)
    weights = [math.exp((x - best) / params.temperature) for x in logits]
    kept = list(enumerate(weights))
    if params.top_k <= 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return kept
    kept.sort(key=lambda pair: (-pair[1], pair[0]))
    kept = [pair for pair in kept if pair[1] >= params.min_p]
    if 0 < params.top_k < len(kept):
        kept = [pair for pair in kept if pair[1] >= kept[params.top_k - 1][1]]
    mass, before, passed = sum(weight for _, weight in kept), 0.0, []
    for token, weight in kept:
        if params.top_p < 1.0 and before >= params.top_p * mass and passed:
            break
        passed.append((token, weight))
        before += weight
    return passed


def naive_sample(
    logits: list[float], params: SamplingParams, index: int, prompt: list[int], outputs: list[int]
) -> tuple[int, float]:
    """The token, and how near the draw was to the edge between two: rounding may decide then."""
    changed = naive_logits(logits, params, prompt, outputs)
    if params.temperature == 0.0:
        return changed.index(max(changed)), 1.0
    kept = naive_kept(changed, params)
    target = naive_uniform(params.seed & MASK, index, len(outputs)) * sum(weight for _, weight in kept)
    total, edges = 0.0, [0.0]
    answer = None
    for token, weight in kept:
        total += weight
        edges.append(total)
        if answer is None and total > target:
            answer = token
    assert answer is not None
    return answer, min(abs(edge - target) for edge in edges[1:]) / total
