"""An instance on the GPU that is killed in mid-stream: engine, worker and pool are gone."""

from test_engine_loss import test_every_open_answer_goes_on_with_another_engine  # noqa: F401
