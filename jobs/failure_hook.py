"""The command that a schedule starts when a tick has come to nothing (`schedule.on_failure`), so that somebody hears.

What it does is its own business: one that fails, hangs or is not there is a line of the scheduler's, and no more.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

from jobs.schedule import ScheduledTarget
from jobs.schedule_state import Attempt

TIMEOUT_S = 30.0
"""The scheduler waits for the command, and ends it with all that it has started after so long."""


def tell(target: ScheduledTarget, attempt: Attempt, say: Callable[[str], None]) -> None:
    """Start the target's command, if it has one, with what happened in its environment. Raises nothing."""
    command = target.schedule.on_failure
    if command is None:
        return
    try:
        environment = os.environ | _facts(attempt)
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    except (OSError, ValueError) as error:  # ValueError: a null character
        say(f"{target.slug}: on_failure could not be started ({error})")
        return
    try:
        code = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        say(f"{target.slug}: on_failure was ended after {TIMEOUT_S:g} s")
    else:
        if code != 0:
            say(f"{target.slug}: on_failure ended with exit code {code}")


def _facts(attempt: Attempt) -> dict[str, str]:
    return {
        "GRAFT_TARGET": attempt.target,
        "GRAFT_TICK": f"{attempt.tick:%Y-%m-%dT%H:%MZ}",
        "GRAFT_OUTCOME": attempt.status.value,
        "GRAFT_SUBMISSION_ID": attempt.submission_id,
        "GRAFT_EXIT_CODE": "" if attempt.exit_code is None else str(attempt.exit_code),
        "GRAFT_DETAIL": attempt.detail,
    }
