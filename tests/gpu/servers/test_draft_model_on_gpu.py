"""A server on the GPU with a draft model beside its own: disturbed, asleep, with other weights, and with a measured pool."""

import signal
from pathlib import Path

import pytest
from chaos_model import make_model
from chaos_server import USUAL, Server, until
from test_equality import (  # noqa: F401
    Told,
    check_handed_over,
    check_parked,
    expected,
    test_a_draft_model_of_the_same_weights_is_right_in_every_life_of_the_worker,
)
from test_shared_gpu import LARGE
from test_sleeping_server import (  # noqa: F401
    GREEDY,
    accepted_drafts,
    post,
    test_a_draft_model_sleeps_and_drafts_for_other_weights,
    test_weights_with_another_vocabulary_than_the_draft_model_are_refused,
    tokens,
)

torch = pytest.importorskip("torch")
SHARE = 0.5


def test_drafts_change_nothing_of_an_answer_whose_blocks_were_parked(
    tiny: Path,
    tmp_path: Path,
    expected: list[dict[int, Told]],  # noqa: F811
):
    check_parked(tiny, tmp_path, expected, speculate=f"draft:{tiny}")


def test_drafts_change_nothing_of_an_answer_that_was_handed_over(
    tiny: Path,
    tmp_path: Path,
    expected: list[dict[int, Told]],  # noqa: F811
):
    check_handed_over(tiny, tmp_path, expected, speculate=f"draft:{tiny}")


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.timeout(300)
def test_both_models_and_pools_fit_into_the_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Much KV and few weights: the pools take all that they may, in every life of the worker. In bfloat16, because compiling
    kernels for float32 and heads of 128 takes minutes."""
    monkeypatch.delitem(USUAL, "kv_blocks")
    model = make_model(tmp_path / "model", max_position_embeddings=32768, **LARGE)
    settings = {
        "gpu_memory_utilization": SHARE, "block_size": 128, "slots": 64, "dtype": "bfloat16", "speculate": f"draft:{model}",
    }  # fmt: skip
    _, total = torch.cuda.mem_get_info()
    asleep = used_bytes()
    with Server(model, tmp_path / "server", orders={"all_drafts": True}, **settings).wait_ready() as server:

        def check() -> dict[str, object]:
            plan = server.ask("/config").json["plan"]
            assert plan["kv_blocks_by"] == "gpu_memory_utilization"
            assert plan["draft_kv_pool_gib"] == plan["kv_pool_gib"] > 20, "the same model twice"
            print(f"in use: {used_bytes() / 2**30:.2f} of {total / 2**30:.2f} GiB; {plan}")
            assert (SHARE - 0.03) * total < used_bytes() < SHARE * total + 2**28
            return plan

        plan, first = check(), tokens(server)
        server.process("worker").send(signal.SIGKILL)
        again = until(lambda: reply if (reply := server.ask("/v1/completions", GREEDY)).status == 200 else None, "a worker")
        assert again.tokens == first
        assert check()["kv_blocks"] == pytest.approx(plan["kv_blocks"], rel=0.01)
        assert post(server, "/v1/sleep", {"drain_seconds": 20})["mode"] == "asleep"
        until(lambda: used_bytes() < asleep + 2**30, "the memory of both pools is free")
        assert post(server, "/v1/wake")["mode"] == "serving"
        assert tokens(server) == first
        check()
        drafted, accepted = accepted_drafts(server)
        assert 0.5 * drafted < accepted, "right but for rounding"
