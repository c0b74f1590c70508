"""Health, metrics and administration.

/live     this process runs its event loop. Restart it if this fails.
/health   the engine answers, and its worker makes progress: 503 after a second without progress, 200 during a long step.
/ready    healthy, and accepts requests (not draining, not paused, not about to end). Send traffic if this is 200. In an
          instance of a cluster: only while a session with a router is open.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from baton import __version__
from baton.api.admin_orders import Order
from baton.api.errors import ApiError, JsonResponse, bad
from baton.api.fields import Fields
from baton.api.front import Front, caller_of, front_of
from baton.api.http.json_body import parse_object, read_body
from baton.api.http.request_log import record_of
from baton.observe.metrics import CONTENT_TYPE

_PAUSE_SECONDS_MAX = 3600.0
"Seconds that a route waits for a pause without a limit. Then it answers 202, and the order continues."


_LOAD_SECONDS_MAX = 1800.0
"Seconds that a route waits for weights to load."


async def live(request: Request) -> Response:
    return JsonResponse({"status": "ok"})


async def health(request: Request) -> Response:
    await front_of(request).ping()
    return JsonResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    front = front_of(request)
    await front.ping()
    stats = front.engine.stats()
    if stats.mode != "serving":
        raise ApiError(503, f"the engine is {stats.mode}", code=stats.mode)
    if front.leaving:
        raise ApiError(503, "the server is shutting down", code="shutting_down")
    if front.config.routers and not stats.routers:
        why = f": {stats.router_refusal}" if stats.router_refusal else ""
        raise ApiError(503, f"no session with a router is open{why}", code="no_router")
    return JsonResponse({"status": "ok"})


async def version(request: Request) -> Response:
    return JsonResponse({"version": __version__})


async def metrics(request: Request) -> Response:
    front = front_of(request)
    front.metrics.requests_open(len(front.live))
    return Response(front.metrics.exposition(), headers={"content-type": CONTENT_TYPE})


async def config(request: Request) -> Response:
    front = front_of(request)
    model = front.model
    served = {
        "name": model.name,
        "aliases": list(model.aliases),
        "context_tokens": model.context_tokens,
        "head_width": model.head_width,
        "fingerprint": model.fingerprint,
        "sampling_defaults": dict(model.sampling_defaults),
    }
    return JsonResponse({"version": __version__, "model": served, **front.config.shown()})


async def abort(request: Request) -> Response:
    """Ends the caller's own request, by the id of its answer or by its X-Request-Id. Idempotent."""
    front = front_of(request)
    fields = await _fields(request, front)
    name = fields.name("request_id") or fields.name("id")
    record_of(request).ignored = fields.finish(front.config.unknown_fields)
    if not name:
        raise bad("give the request_id to abort", "request_id")
    return JsonResponse({"request_id": name, "aborted": front.live.abort(caller_of(request).tenant, name)})


async def pause(request: Request) -> Response:
    """Accepts no new requests, lets running ones finish for drain_seconds (null: without limit), then pauses."""
    front = front_of(request)
    fields = await _fields(request, front)
    drain = _drain_seconds(fields)
    record_of(request).ignored = fields.finish(front.config.unknown_fields)
    return await _run_order(front, "pause", _drain_wait(drain) + 30.0, front.engine.pause(drain))


def _drain_seconds(fields: Fields) -> float | None:
    return None if fields.raw("drain_seconds") is None else fields.number("drain_seconds", 0.0)


async def resume(request: Request) -> Response:
    front = front_of(request)
    return await _run_order(front, "resume", 30.0, front.engine.resume())


async def clear_cache(request: Request) -> Response:
    """Drops cached blocks that are not in use, on the named tiers, or on all but storage. vLLM calls this
    /reset_prefix_cache."""
    front = front_of(request)
    fields = await _fields(request, front)
    tiers = fields.raw("tiers")
    record_of(request).ignored = fields.finish(front.config.unknown_fields)
    wanted = ["device", "host"] if tiers is None else tiers
    if not isinstance(wanted, list) or not wanted or any(tier not in ("device", "host") for tier in wanted):
        raise bad('tiers must be a list of "device" and "host"; storage is cleared with baton kv remove', "tiers")
    order = await front.orders.run("clear", 30.0, front.engine.clear_cache(device="device" in wanted, host="host" in wanted))
    return JsonResponse({"cleared": wanted}) if order.state == "done" else _accepted(front, order)


async def sleep(request: Request) -> Response:
    """Pauses as /v1/pause does, then releases the memory of weights and KV cache."""
    front = front_of(request)
    fields = await _fields(request, front)
    drain = _drain_seconds(fields)
    record_of(request).ignored = fields.finish(front.config.unknown_fields)
    return await _run_order(front, "sleep", _drain_wait(drain) + 60.0, front.engine.sleep(drain))


async def wake(request: Request) -> Response:
    """Loads the weights again and accepts requests."""
    front = front_of(request)
    return await _run_order(front, "wake", _LOAD_SECONDS_MAX, front.engine.wake())


async def weights(request: Request) -> Response:
    """Serves other weights of the same vocabulary, from a path on this machine: pauses, loads them, resumes. Cached blocks of
    the old weights become useless on all tiers. If loading fails the old weights are served again: 400."""
    front = front_of(request)
    fields = await _fields(request, front)
    path, drain = fields.name("path"), _drain_seconds(fields)
    record_of(request).ignored = fields.finish(front.config.unknown_fields)
    if not path:
        raise bad("give the path of the weights", "path")
    order = await front.orders.run("weights", _LOAD_SECONDS_MAX + _drain_wait(drain), front.engine.load_weights(path, drain))
    if order.state != "done":
        return _accepted(front, order)
    return JsonResponse({"mode": front.engine.stats().mode, "fingerprint": front.model.fingerprint})


async def orders(request: Request) -> Response:
    """The last orders, newest first, with state and error."""
    return JsonResponse({"orders": front_of(request).orders.view()})


def _drain_wait(drain: float | None) -> float:
    return _PAUSE_SECONDS_MAX if drain is None else drain


async def _run_order(front: Front, kind: str, seconds: float, work: Coroutine[Any, Any, None]) -> Response:
    order = await front.orders.run(kind, seconds, work)
    if order.state != "done":
        return _accepted(front, order)
    return JsonResponse({"mode": front.engine.stats().mode})


def _accepted(front: Front, order: Order) -> Response:
    """The 202 answer: the order continues although the client stops waiting."""
    return JsonResponse({**order.view(), "mode": front.engine.stats().mode}, status_code=202)


async def _fields(request: Request, front: Front) -> Fields:
    """Fields of the body. An empty body counts as an empty object."""
    with front.budget.lease() as lease:
        body = await read_body(request, front.limits, lease)
    return Fields(parse_object(body or b"{}", front.limits), front.limits, front.model.head_width)
