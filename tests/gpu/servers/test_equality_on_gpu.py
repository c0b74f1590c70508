"""Everything that disturbs a run at once, on the GPU; the oracle is one request at a time, on the GPU too."""

from pathlib import Path

from test_equality import (  # noqa: F401
    Told,
    check_handed_over,
    check_parked,
    expected,
    test_drafts_change_no_token,
    test_every_token_is_that_of_the_undisturbed_run,
)


def test_drafts_change_nothing_of_an_answer_whose_blocks_were_parked(
    tiny: Path,
    tmp_path: Path,
    expected: list[dict[int, Told]],  # noqa: F811
):
    check_parked(tiny, tmp_path, expected)


def test_drafts_change_nothing_of_an_answer_that_was_handed_over(
    tiny: Path,
    tmp_path: Path,
    expected: list[dict[int, Told]],  # noqa: F811
):
    check_handed_over(tiny, tmp_path, expected)
