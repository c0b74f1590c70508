"""bench/compare.py: which of two checkouts takes longer."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from compare import ROOT, Comparison, compare, main, run
from compare import __doc__ as USAGE

PRINTS = [sys.executable, "-c", "import figure; print('ms:', figure.MS); print('ms:', 2 * figure.MS)"]
VALUE = r"ms: ([0-9.]+)"


@pytest.fixture
def checkouts(tmp_path) -> tuple[Path, Path]:
    """Two folders whose `src` has the same module with other numbers, 100 and 104."""
    folders = tmp_path / "old", tmp_path / "new"
    for folder, number in zip(folders, (100.0, 104.0), strict=True):
        (folder / "src").mkdir(parents=True)
        (folder / "src" / "figure.py").write_text(f"MS = {number}\n")
    return folders


def test_each_command_runs_with_the_sources_of_its_own_checkout(checkouts):
    assert [run(PRINTS, folder, VALUE) for folder in checkouts] == [[100.0, 200.0], [104.0, 208.0]]


def test_bytecode_is_kept_so_that_more_lines_do_not_count_as_slower(checkouts, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    run(PRINTS, checkouts[0], VALUE)
    assert list(checkouts[0].glob("src/__pycache__/figure.*.pyc"))


@pytest.mark.parametrize(("limit", "status"), [("3", 1), ("5", 0)])
def test_exit_status_1_beyond_the_limit(checkouts, capsys, limit, status):
    options = ["--pairs", "2", "--limit", limit, "--value", VALUE, "--", *PRINTS]
    assert main([*map(str, checkouts), *options]) == status
    printed = capsys.readouterr().out
    assert printed.count("+4.0 %   (") == 2
    assert ("SLOWER" in printed) == bool(status)


def test_the_median_of_the_ratios_decides_and_one_disturbed_pair_does_not():
    assert not Comparison("quiet", (1.0, 1.01, 3.0, 0.99, 1.02)).is_slower(3.0)
    assert Comparison("slow", (1.04, 1.05, 1.0, 1.06, 1.04)).is_slower(3.0)


def test_processor_time_covers_children(tmp_path):
    (tmp_path / "src").mkdir()
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    [seconds] = run([sys.executable, "-c", child], tmp_path, None)
    assert seconds >= 0.3


def test_a_command_that_fails_ends_the_comparison_with_its_output(checkouts):
    with pytest.raises(SystemExit, match="broken on purpose"):
        run([sys.executable, "-c", "raise SystemExit('broken on purpose')"], checkouts[0], None)


def test_runs_that_give_other_counts_of_numbers_cannot_be_compared():
    with pytest.raises(SystemExit, match="numbers"):
        compare("case", [([1.0], [1.0, 2.0])])


def test_a_name_that_is_neither_folder_nor_revision_is_refused():
    with pytest.raises(SystemExit, match="neither a folder nor a revision"):
        main(["no-such-revision", ".", "--", "true"])


def test_a_case_that_an_older_checkout_lacks_is_named_and_left_out(checkouts, capsys, monkeypatch):
    monkeypatch.setattr("compare.CASES", {"lately": "python bench/lately.py"})
    (checkouts[1] / "bench").mkdir()
    (checkouts[1] / "bench" / "lately.py").touch()
    assert main([*map(str, checkouts), "--pairs", "1"]) == 0
    assert capsys.readouterr().out == f"lately: not compared, {checkouts[0]} has no bench/lately.py\n"


COMMANDS = [line.split(" -- ")[1] for line in str(USAGE).splitlines() if " -- " in line]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_usage_text_have_the_options_that_it_names(command):
    """`bench/gpu.py --json` wants a file, and prints no JSON: the line for a GPU ended with an error."""
    if "gpu.py" in command:
        pytest.importorskip("triton")
    _, *words = shlex.split(command)
    ran = subprocess.run([sys.executable, *words, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("usage:")
