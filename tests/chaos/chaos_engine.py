"""The engine with the disturbed worker."""

from baton.runtime.engine.process import Engine, main
from baton.runtime.processes.process_table import ENGINE_CHILDREN, with_modules


class ChaosEngine(Engine):
    rows = with_modules(ENGINE_CHILDREN, worker="chaos_worker")


if __name__ == "__main__":
    main(ChaosEngine)
