"""The worker process: loads the model, sends its hello, then runs plans (step_loop.py) until the engine closes the channel.

Any error in here ends the process: the engine sees the end of the channel at once, and the core handles the loss.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from baton.config import WorkerConfig
from baton.errors import EngineError, ProtocolError
from baton.protocol.control import CollectiveShared, LoadProgress, ProgressShared, StartFailed, WorkerHello
from baton.protocol.ids import PoolIncarnation, WorkerEpoch
from baton.protocol.pool import PoolAttached, PoolReady, PoolSized, of_rank
from baton.protocol.progress import ProgressWord
from baton.runtime.processes.children import begin_child, freeze_gc_heap
from baton.runtime.processes.process_table import CONTROL, DESCRIPTORS
from baton.runtime.processes.rank_lock import one_rank_at_a_time
from baton.runtime.wire.channel import BlockingChannel
from baton.runtime.wire.descriptors import send_descriptor, wait_for_descriptor
from baton.runtime.worker.step_loop import StepLoop
from baton.worker.platforms.visible import use_only

if TYPE_CHECKING:  # numpy is imported with the model
    from baton.kvpool.base import Pool
    from baton.kvpool.layout import KVLayout
    from baton.worker.platforms.base import Platform


class _Progress:
    """Reports loading to the engine in steps of about a hundredth."""

    def __init__(self, channel: BlockingChannel) -> None:
        self._channel = channel
        self._reported = -1

    def __call__(self, done: int, total: int) -> None:
        share = 100 * done // max(total, 1)
        if share != self._reported:
            self._reported = share
            self._channel.send(LoadProgress(done, total))

    def announce(self, stage: str) -> None:
        """Report the begin of another stage of loading."""
        self._reported = -1
        self._channel.send(LoadProgress(0, 0, stage))


class WorkerPool:
    """Provides the worker's KV pool (core/startup.py): creates it, creates and announces it, or attaches to it."""

    def __init__(self, config: WorkerConfig, channel: BlockingChannel, link: socket.socket) -> None:
        self._config = config
        self._channel = channel
        self._link = link

    def __call__(self, platform: Platform, layout: KVLayout, blocks: int) -> Pool:
        if self._config.blocks is None:
            self._channel.send(PoolSized(blocks, layout.encode()))
        if self._config.pool == "attached":
            return self._attach(platform, layout, blocks)
        pool = self._create(platform, layout, blocks)
        if self._config.pool == "announced":
            send_descriptor(self._link, pool.announcement(), pool.fd)
        return pool

    def _create(self, platform: Platform, layout: KVLayout, blocks: int) -> Pool:
        if (base := self._config.pool_incarnation) == 0:
            return platform.create_pool(layout, blocks)
        with one_rank_at_a_time(self._config.rendezvous, self._config.start_seconds_max):
            return platform.create_pool(layout, blocks, of_rank(PoolIncarnation(base), self._config.rank))

    def _attach(self, platform: Platform, layout: KVLayout, blocks: int) -> Pool:
        ready, fd = wait_for_descriptor(self._link, self._config.start_seconds_max, "the KV pool")
        if type(ready) is not PoolReady or (ready.fingerprint, ready.blocks) != (layout.fingerprint(), blocks):
            raise ProtocolError(f"the KV pool that was handed over is not one of {blocks} blocks with {layout}")
        pool = platform.attach_pool(fd, ready)
        self._channel.send(PoolAttached(ready.incarnation))
        return pool


def serve(config: WorkerConfig, channel: BlockingChannel, link: socket.socket) -> None:
    """Load the model, send the hello, and run plans until the engine closes the channel."""
    from baton.worker.build import build_worker

    progress = ProgressWord.create()
    send_descriptor(link, ProgressShared(WorkerEpoch(config.epoch)), progress.fd)
    shared = shared_by_ranks(config, link) if config.ranks > 1 else None
    reported, pool = _Progress(channel), WorkerPool(config, channel, link)
    built = build_worker(config, reported, pool, announce=reported.announce, collective_fd=shared)
    runner, model = built.runner, built.runner.config
    runner.report_progress(progress)
    freeze_gc_heap()
    channel.send(
        WorkerHello(
            WorkerEpoch(config.epoch),
            runner.pool.blocks,
            config.block_size,
            model.vocab_size,
            built.context_tokens,
            built.identity,
            runner.pool.incarnation,
            model_context_tokens=model.context_tokens_max,
            sampling_defaults=built.sampling_defaults,
            block_bytes=runner.pool.layout.block_bytes,
            digest_seconds=built.weights_digest.seconds if built.weights_digest.read_bytes else 0.0,
            plan=built.pool_plan,
            layout=runner.pool.layout.fingerprint(),
            identity_parts=built.identity_parts,
            pooling=built.pooling,
            steps=built.steps,
            scoring=built.scoring,
            generates=built.generates,
            labels=built.labels,
            steps_ahead=runner.steps_ahead,
        )
    )
    StepLoop(runner, channel, progress, config.rank).run()


def shared_by_ranks(config: WorkerConfig, link: socket.socket) -> int:
    """The memory file of this epoch's set, and the directory of its rendezvous, which the first rank to come creates. Rank 0
    removes those of earlier epochs: no process of their sets is left."""
    if config.rendezvous:
        os.makedirs(config.rendezvous, mode=0o700, exist_ok=True)
    if config.rendezvous and config.rank == 0:
        for other in Path(config.rendezvous).parent.iterdir():
            if other.name.isdigit() and int(other.name) < config.epoch:
                shutil.rmtree(other, ignore_errors=True)
    message, fd = wait_for_descriptor(link, config.start_seconds_max, "the memory that ranks share")
    if type(message) is not CollectiveShared or (message.epoch, message.ranks) != (config.epoch, config.ranks):
        os.close(fd)
        raise ProtocolError(f"a {type(message).__name__} came first, and not the memory that {config.ranks} ranks share")
    return fd


def main() -> None:
    config, sockets = begin_child(WorkerConfig)
    use_only(config.gpu_index)
    channel = BlockingChannel(sockets[CONTROL])
    try:
        serve(config, channel, sockets[DESCRIPTORS])
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(0)  # the engine has ended
    except EngineError as error:
        _report_error(channel, str(error))
        sys.exit(1)
    except Exception as error:
        _report_error(channel, f"{type(error).__name__}: {error}")
        raise


def _report_error(channel: BlockingChannel, why: str) -> None:
    with contextlib.suppress(OSError):
        channel.send(StartFailed(why))
