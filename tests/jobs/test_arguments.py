"""How a job ends: its exit code, and one line on stderr."""

from __future__ import annotations

import pytest

from graft_dist.errors import ConfigError
from jobs.arguments import run_job


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (ConfigError("--out is missing"), 2, "train: --out is missing\n"),
        (KeyboardInterrupt(), 130, "train: stopped; the same command goes on from the last checkpoint\n"),
    ],
)
def test_a_job_that_cannot_work_or_is_interrupted_ends_with_one_line(
    raised: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise raised

    assert run_job("train", "goes on from the last checkpoint", work) == code
    assert capsys.readouterr() == ("", line)


def test_other_exit_codes_are_the_jobs_own_and_our_bugs_are_not_hidden() -> None:
    assert run_job("collect", "goes on", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_job("collect", "goes on", lambda: 1 // 0)
