"""The tiny target of the jobs' tests, and the reciting one of the serving tests, for measurements of serving."""

from tests.jobs.conftest import tiny_config, tiny_drafter_folder
from tests.serve.conftest import (
    reciting_config,
    reciting_drafter_folder,
    reciting_folder,
    reciting_target,
)

__all__ = [
    "reciting_config",
    "reciting_drafter_folder",
    "reciting_folder",
    "reciting_target",
    "tiny_config",
    "tiny_drafter_folder",
]
