"""Retraining with one planned accident: `retrain_driver.py POINT ARGUMENTS...` dies at failpoint POINT."""

from __future__ import annotations

import os
import signal
import sys

from jobs.retrain import main


def die_at(point: str) -> None:
    if point == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], die_at))
