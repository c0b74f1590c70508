"""Other weights for a sleeping instance: the next worker loads them; where it cannot, the one after it loads the old ones."""

from __future__ import annotations

from baton.core.events import LossCause
from baton.protocol.control import InstanceReady, WorkerHello


class WeightReload:
    """One order to load other weights, until it is answered."""

    def __init__(self, number: int, old: str, new: str) -> None:
        self.number = number
        self.old = old
        self.new = new
        self.failure = ""
        "Why the old ones are loaded again."
        self._starts = 0

    def worker_starts(self, reason: str, cause: LossCause) -> bool:
        """False: the worker with the new weights was lost, so this one is to have the old ones. The first one that was killed
        from outside says nothing about them; a second one may be the kernel's, for want of memory, which it may not tell."""
        self._starts += 1
        tries = 2 if cause == "killed" else 1
        if self._starts > tries and not self.failure:
            self.failure = reason if reason.startswith(f"{self.new}:") else f"{self.new}: {reason}"
        return not self.failure

    def does_not_fit(self, hello: WorkerHello, served: InstanceReady) -> bool:
        """The front has one tokenizer, and has promised a context."""
        if self.failure:
            return False
        if hello.vocab_size != served.vocab_size:
            self.failure = (
                f"{self.new}: its vocabulary has {hello.vocab_size} tokens, the one that is served {served.vocab_size}"
            )
        elif hello.context_tokens < served.context_tokens:
            self.failure = f"{self.new}: its context is {hello.context_tokens} tokens, and {served.context_tokens} are served"
        return bool(self.failure)
