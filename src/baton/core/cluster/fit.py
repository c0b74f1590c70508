"""Decides whether two instances may be in one cluster, and if not, names all parts in which they differ.

Instances of a cluster continue each other's requests and read each other's KV blocks, so everything that KV and tokens depend
on must be equal: the identity (worker/identity.py), and the shape of a block and of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from baton.protocol.instance import Build, InstanceHello

WORDS: Final = {
    "weights": "weights",
    "model": "model config",
    "quantization": "quantisation",
    "weight_types": "types of weights",
    "adapter": "adapter",
    "dtype": "data type of activations",
    "kernels": "kernels",
    "kv_dtype": "KV data type",
    "block_size": "block size",
    "layout": "KV layout",
    "tp_size": "tensor parallel size",
}
"""Parts of the identity, as named to users."""
FOLLOWS: Final = {
    "types of weights": {"quantisation"},
    "KV layout": {"KV data type", "block size", "model config", "tensor parallel size"},
}
"""Digest that differs with one of these parts: it is not named beside them."""


def disagreement(hello: InstanceHello, other: InstanceHello) -> str:
    """All parts in which the instances differ, in words. Empty: they fit."""
    differing = dict(_differences(hello, other))
    named = [
        f"{what} {mine} instead of {its}"
        for what, (mine, its) in differing.items()
        if not FOLLOWS.get(what, set()) & differing.keys()
    ]
    if not named:
        return ""
    text = f"{hello.name} does not fit {other.name}: {', '.join(named)}"
    return f"{text}; all instances of a cluster must agree{_builds(hello.build, other.build)}"


def _differences(hello: InstanceHello, other: InstanceHello) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each part that differs, by its name for users, with both values."""
    ready, theirs = hello.ready, other.ready
    if ready.identity != theirs.identity:
        yield from _identity_parts(hello, other)
    for what, mine, its in (
        ("block size", ready.block_size, theirs.block_size),
        ("vocabulary", ready.vocab_size, theirs.vocab_size),
        ("context of the model", ready.model_context_tokens, theirs.model_context_tokens),
        ("KV layout", hello.layout, other.layout),
    ):
        if mine != its:
            yield what, (_shown(mine), _shown(its))


def _identity_parts(hello: InstanceHello, other: InstanceHello) -> Iterator[tuple[str, tuple[str, str]]]:
    """The parts that both sides have sent and that differ. An instance of another version may send other parts: where none is
    comparable, the digests are named."""
    mine, its = hello.ready.identity_parts, other.ready.identity_parts
    found = [name for name in mine if name in its and mine[name] != its[name]]
    for name in found:
        yield WORDS.get(name, name), (mine[name], its[name])
    if not found:
        yield "identity", (_shown(hello.ready.identity), _shown(other.ready.identity))


def _shown(value: int | bytes) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else str(value)


def _builds(mine: Build, its: Build) -> str:
    """The builds, if they differ: an update is the usual cause."""
    if (mine.version, mine.commit) == (its.version, its.commit):
        return ""
    ours, theirs = (f"{build.version or 'unknown'} {build.commit}".strip() for build in (mine, its))
    return f" (its build is {ours}, the other's {theirs})"
