"""The reciting target of the serving tests, for measurements of serving."""

from tests.serve.conftest import (
    reciting_config,
    reciting_drafter_folder,
    reciting_folder,
    reciting_target,
)

__all__ = ["reciting_config", "reciting_drafter_folder", "reciting_folder", "reciting_target"]
