"""Hand-off of a prefilled prompt: messages between router, prefill and decode instance. The router passes everything on; the
two instances share nothing but memory, which decode reads (docs/internals/handoff.md).

    router   Reserve ---> decode     blocks for the request are reserved there, now or when there is room, or it is refused
    decode   Reserved --> router
    router   Prefill ---> prefill    computes the prompt, samples one token, keeps the blocks
    prefill  Offer -----> router     computed blocks, chunk by chunk
    router   PeerOffer -> decode     which pulls those blocks into its own
    decode   Release ---> router ...> prefill     all is copied: were the blocks kept all the time?
    prefill  Released --> router ...> decode      only now decode trusts its copy
    decode   Adopted ---> router     it continues from there, or computes the prompt itself
    router   Forget ----> both       that attempt has ended, whatever its state

Every message names request and attempt. A message of another attempt than the present one changes nothing.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from baton.protocol.ids import BlockId, PoolIncarnation, RequestId
from baton.protocol.numbers import Natural, Seconds
from baton.protocol.request import Count, GenerateRequest, TokenId


class Reserve(Struct, frozen=True, array_like=True):
    """Reserve all blocks that this request needs to begin, for `lease_seconds`. A repeated message renews the lease. The answer
    is Reserved or RefusedRequest, within `wait_seconds`."""

    request: GenerateRequest
    "The request as the client sent it. Its prompt is computed at another instance; it continues here."
    lease_seconds: Seconds
    wait_seconds: Seconds = 0.0
    "Seconds that the request may wait for room, in the order of priority. 0: without room it is refused at once."


class Reserved(Struct, frozen=True, array_like=True):
    request: RequestId
    attempt: Count
    cached_tokens: Natural
    "Number of leading tokens whose KV is cached here. They are not pulled."
    waited_seconds: Seconds = 0.0
    "Seconds that the reservation waited for room: no part of the cost of a hand-off."


class Prefill(Struct, frozen=True, array_like=True):
    """Compute the request's tokens and sample one token. Unless that ends it, its blocks are offered and kept."""

    request: GenerateRequest
    "The request with one sequence, and one token more than was delivered."
    keep_seconds: Seconds
    "Seconds that the blocks stay after the whole prompt is computed."


class Offer(Struct, frozen=True, array_like=True):
    """Computed blocks, which stay unchanged until Forget, Released or the end of their lease."""

    request: RequestId
    attempt: Count
    pool: PoolIncarnation
    place: Natural
    "Place of the first offered block in the sequence's table."
    blocks: tuple[Annotated[BlockId, Meta(ge=0, le=2**31 - 1)], ...]
    tokens: Natural
    "Number of tokens computed so far, from the beginning of the sequence."
    last: bool = False
    "Whether the whole prompt is computed; the last block may be partly filled."
    cached_tokens: Natural = 0
    "Cached, host and storage tokens, as in Ended; last offer only."
    host_tokens: Natural = 0
    storage_tokens: Natural = 0


class PeerOffer(Struct, frozen=True, array_like=True):
    """An offer that the router sends on to the decode instance."""

    offer: Offer
    peers: tuple[str, ...]
    "Addresses of the messenger that serves the pool, for each rank (InstanceHello.peers)."
    outputs: tuple[TokenId, ...] = ()
    "Tokens that the leader's client has by now; last offer only."


class Release(Struct, frozen=True, array_like=True):
    """The copy is complete: the blocks are not needed any longer. The answer says whether they were kept unchanged until
    now."""

    request: RequestId
    attempt: Count


class Released(Struct, frozen=True, array_like=True):
    request: RequestId
    attempt: Count
    kept: bool
    "Whether the blocks were kept. False: the lease had lapsed, and the copy may have other content."


class Adopted(Struct, frozen=True, array_like=True):
    """The decode instance continues the request by itself from now on."""

    request: RequestId
    attempt: Count
    tokens: Natural
    "Number of tokens pulled or cached here, and trusted. The rest is computed."
    fault: str = ""
    "Reason why blocks could not be copied, as text for the log. Empty: they could, or no copy was tried."


class Forget(Struct, frozen=True, array_like=True):
    """Ends this attempt, and lower ones, without an Ended. An unknown request is ignored."""

    request: RequestId
    attempt: Count


def request_of(message: object) -> GenerateRequest | None:
    """The request that this message assigns to an instance."""
    if isinstance(message, Reserve | Prefill):
        return message.request
    return message if isinstance(message, GenerateRequest) else None
