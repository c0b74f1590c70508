"""The worker process: plans in, results out, one after the other, until the engine closes the channel.

Whatever goes wrong in here ends the process: the engine sees the end of the channel at once, and the core takes it from there.
"""

from __future__ import annotations

import contextlib
import sys

from baton.config import WorkerConfig
from baton.errors import EngineError
from baton.protocol.control import LoadProgress, Ping, Pong, StartFailed, WorkerHello
from baton.protocol.ids import WorkerEpoch
from baton.protocol.step import StepPlan
from baton.runtime.channel import BlockingChannel
from baton.runtime.children import begin_child, keep_what_is_here
from baton.runtime.process_table import CONTROL


class _Progress:
    """Tells the engine in steps of about a hundredth."""

    def __init__(self, channel: BlockingChannel) -> None:
        self._channel = channel
        self._told = -1

    def __call__(self, done: int, total: int) -> None:
        share = 100 * done // max(total, 1)
        if share != self._told:
            self._told = share
            self._channel.send(LoadProgress(done, total))


def serve(config: WorkerConfig, channel: BlockingChannel) -> None:
    from baton.worker.build import build_worker

    built = build_worker(config, progress=_Progress(channel))
    runner, model = built.runner, built.runner.config
    keep_what_is_here()
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
            digest_seconds=built.weights_digest.seconds if built.weights_digest.read_bytes else 0.0,
        )
    )
    while (message := channel.receive()) is not None:
        if type(message) is StepPlan:
            channel.send(runner.execute(message))
        elif type(message) is Ping:
            channel.send(Pong(message.number))


def main() -> None:
    config, sockets = begin_child(WorkerConfig)
    channel = BlockingChannel(sockets[CONTROL])
    try:
        serve(config, channel)
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(0)  # the engine is gone
    except EngineError as error:
        _last_words(channel, str(error))
        sys.exit(1)
    except Exception as error:
        _last_words(channel, f"{type(error).__name__}: {error}")
        raise


def _last_words(channel: BlockingChannel, why: str) -> None:
    with contextlib.suppress(OSError):
        channel.send(StartFailed(why))


if __name__ == "__main__":
    main()
