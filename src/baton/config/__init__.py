"""Configuration: frozen, one class per owner, a sentence per field, checked once when it is created.

serve.py     ServeConfig       every option of `baton serve`; the front's own settings
engine.py    EngineConfig      the engine process; WorkerConfig, CacheConfig: its children; TiersConfig: tiers of KV blocks
instance.py  InstanceConfig    the core; KVConfig, SchedulerConfig, QueueConfig, TierConfig and CircuitConfig are its parts
router.py    RouterConfig      a router; router_process.py RouterProcessConfig: its process
credentials.py                 files with which members of a cluster prove themselves
wire.py      WireConfig        bounds of connections between routers, instances and their KV pools
parts.py                       builds those classes from the options
*Options                       fields that ServeConfig and an owner share: each setting is declared once
values.py                      allowed values; a number's range is at its field (`Annotated[int, Range(...)]`)
"""

from baton.config.credentials import CredentialOptions
from baton.config.engine import CacheConfig, EngineConfig, TiersConfig, WorkerConfig
from baton.config.instance import CircuitConfig, InstanceConfig, KVConfig, QueueConfig, SchedulerConfig, TierConfig
from baton.config.router import HandoffOptions, PlacementPolicy, RouterConfig
from baton.config.serve import FrontOptions, ServeConfig, lowered_context, shown, without_password
from baton.config.values import (
    ANY_NAME,
    API_KEY_CHARACTERS_MAX,
    DRAFT,
    DRAFTS_MAX,
    NODE_NAME_CHARACTERS_MAX,
    Device,
    GenerationConfig,
    KVCacheType,
    LoadFormat,
    LogFormat,
    LogLevel,
    PoolAccess,
    Quantization,
    Role,
    TransferDigest,
    draft_model_of,
    is_api_key,
)
from baton.config.wire import WireConfig, wire_config

__all__ = [
    "ANY_NAME",
    "API_KEY_CHARACTERS_MAX",
    "DRAFT",
    "DRAFTS_MAX",
    "NODE_NAME_CHARACTERS_MAX",
    "CacheConfig",
    "CircuitConfig",
    "CredentialOptions",
    "Device",
    "EngineConfig",
    "FrontOptions",
    "GenerationConfig",
    "HandoffOptions",
    "InstanceConfig",
    "KVCacheType",
    "KVConfig",
    "LoadFormat",
    "LogFormat",
    "LogLevel",
    "PlacementPolicy",
    "PoolAccess",
    "Quantization",
    "QueueConfig",
    "Role",
    "RouterConfig",
    "SchedulerConfig",
    "ServeConfig",
    "TierConfig",
    "TiersConfig",
    "TransferDigest",
    "WireConfig",
    "WorkerConfig",
    "draft_model_of",
    "is_api_key",
    "lowered_context",
    "shown",
    "wire_config",
    "without_password",
]
