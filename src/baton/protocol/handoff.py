"""Hand-off of a prefilled prompt: what router, prefill and decode instance say to each other. The router passes everything on;
the two instances share nothing but memory, which decode reads (docs/internals/handoff.md).

    router   Expect ----> decode     room for the request is kept there, or it is refused at once
    decode   Expecting -> router
    router   Prefill ---> prefill    computes the prompt, samples one token, keeps the blocks
    prefill  Offer -----> router     so far it is computed: chunk by chunk
    router   PeerOffer -> decode     which pulls those blocks into its own
    decode   Release-> router ...> prefill     all is copied: was it there all the time?
    prefill  Released --> router ...> decode      only now decode trusts its copy
    decode   Adopted ---> router     it goes on from there, or computes the prompt itself
    router   Forget ----> both       that attempt is over, whatever it was

Every message names request and attempt. One of an attempt that is not the present one changes nothing.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from baton.protocol.ids import BlockId, PoolIncarnation, RequestId
from baton.protocol.numbers import Natural, Seconds
from baton.protocol.request import Count, GenerateRequest, TokenId


class Reserve(Struct, frozen=True, array_like=True):
    """Keep all blocks that this request needs to begin, for so long. Said again, it lasts so long from then on. The answer is
    Expecting or RefusedRequest, at once."""

    request: GenerateRequest
    "As the client wants it. Its prompt is computed elsewhere; it goes on here."
    lease_seconds: Seconds


class Reserved(Struct, frozen=True, array_like=True):
    request: RequestId
    attempt: Count
    cached_tokens: Natural
    "Leading tokens whose KV is here already. They are not pulled."


class Prefill(Struct, frozen=True, array_like=True):
    """Compute what the request has and sample one token. Where that does not end it, its blocks are offered and kept."""

    request: GenerateRequest
    "One sequence, and one token more than was delivered."
    keep_seconds: Seconds
    "How long the blocks stay when all is computed."


class Offer(Struct, frozen=True, array_like=True):
    """Blocks that are computed. They stay as they are until Forget, Released or the end of their lease."""

    request: RequestId
    attempt: Count
    pool: PoolIncarnation
    place: Natural
    "In the sequence's table, of the first block."
    blocks: tuple[Annotated[BlockId, Meta(ge=0, le=2**31 - 1)], ...]
    tokens: Natural
    "Computed up to here, from the beginning of the sequence."
    last: bool = False
    "All is computed; the last block may be partly filled."
    cached_tokens: Natural = 0
    "With the last: as in Ended."
    host_tokens: Natural = 0
    storage_tokens: Natural = 0


class PeerOffer(Struct, frozen=True, array_like=True):
    """An offer on its way to the decode instance."""

    offer: Offer
    peers: tuple[str, ...]
    "For each rank, the addresses of the messenger that lets the pool be read (NodeHello.peers)."
    outputs: tuple[TokenId, ...] = ()
    "With the last offer: what the leader's client has by now."


class Release(Struct, frozen=True, array_like=True):
    """Everything was copied. Have the blocks stayed as they were until now? They are not needed any longer."""

    request: RequestId
    attempt: Count


class Released(Struct, frozen=True, array_like=True):
    request: RequestId
    attempt: Count
    kept: bool
    "False: the lease had lapsed. The copy may be of something else."


class Adopted(Struct, frozen=True, array_like=True):
    """Decode goes on with the request by itself from now on."""

    request: RequestId
    attempt: Count
    tokens: Natural
    "Pulled or found here, and trusted. The rest it computes."
    fault: str = ""
    "Why blocks could not be copied, for people. Empty: they could, or nobody tried."


class Forget(Struct, frozen=True, array_like=True):
    """This attempt, and lower ones, are over here: no end is told of them. Unknown: nothing happens."""

    request: RequestId
    attempt: Count


def request_of(message: object) -> GenerateRequest | None:
    """What an instance is given to do by this message."""
    if isinstance(message, Reserve | Prefill):
        return message.request
    return message if isinstance(message, GenerateRequest) else None
