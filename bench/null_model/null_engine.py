"""The engine process as it is, with the null worker."""

from baton.runtime.engine.process import Engine, main
from baton.runtime.processes.process_table import ENGINE_CHILDREN, with_modules


class NullEngine(Engine):
    rows = with_modules(ENGINE_CHILDREN, worker="null_worker")


if __name__ == "__main__":
    main(NullEngine)
