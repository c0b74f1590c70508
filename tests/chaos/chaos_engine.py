"""The engine with the disturbed worker."""

from baton.runtime.engine import Engine, main


class ChaosEngine(Engine):
    worker_module = "chaos_worker"


if __name__ == "__main__":
    main(ChaosEngine)
