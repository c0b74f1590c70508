"""The model as a router's clients see it: context, vocabulary and sampling defaults are those of the connected instances."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from baton.api.config import DEFAULTABLE, ServedModel
from baton.api.front import Front
from baton.config import ServeConfig
from baton.errors import InvalidConfig
from baton.protocol.control import InstanceReady
from baton.protocol.request import SamplingParams
from baton.runtime.front.process import served_model
from baton.runtime.router.instance_set import InstanceSet


def unservable(ready: InstanceReady) -> str:
    """The reason why a router cannot serve the model of this instance. Empty: it can. An instance of another build, or with a
    damaged model, may send values that no request could be read with."""
    defaults = known_defaults(ready)
    try:
        msgspec.convert(defaults, SamplingParams)
        ServedModel(name="it", context_tokens=ready.context_tokens, head_width=ready.vocab_size, sampling_defaults=defaults)
    except (InvalidConfig, msgspec.ValidationError) as error:
        return f"its model cannot be served: {error}"
    return ""


def known_defaults(ready: InstanceReady) -> dict[str, int | float]:
    """Sampling defaults without the names that only another version knows."""
    return {name: value for name, value in ready.sampling_defaults.items() if name in DEFAULTABLE}


def model_of(serve: ServeConfig, ready: InstanceReady) -> ServedModel:
    return served_model(serve, msgspec.structs.replace(ready, sampling_defaults=known_defaults(ready)))


def follow(front: Front, serve: ServeConfig, served: InstanceReady, instances: InstanceSet) -> InstanceReady:
    """Serve the model of the connected instances, which may be others than those that `served` is of, and return what is served
    now. While none is connected, or one of the earlier kind is, the model stays."""
    context, connected = instances.context_tokens, [instance.hello.ready for instance in instances.sessions]
    if context is None:
        return served
    if all(_facts(ready) != _facts(served) for ready in connected):
        served = connected[0]
        front.serve(replace(model_of(serve, served), context_tokens=context, created=front.model.created))
    elif context != front.model.context_tokens:
        front.serve(replace(front.model, context_tokens=context))
    return served


def _facts(ready: InstanceReady) -> tuple[Any, ...]:
    """Everything that clients see of the model, besides the context."""
    return (
        ready.identity,
        ready.identity_parts.get("weights", ""),
        ready.vocab_size,
        known_defaults(ready),
        ready.pooling,
        ready.scoring,
        ready.generates,
        ready.labels,
    )
