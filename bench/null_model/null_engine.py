"""The engine process as it is, with the null worker."""

from baton.runtime.engine import Engine, main


class NullEngine(Engine):
    worker_module = "null_worker"


if __name__ == "__main__":
    main(NullEngine)
