"""What a learning run's folder remembers: which settings and which drafter, and whose rows are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from graft_dist.config import TargetConfig
from graft_dist.errors import ConfigError
from jobs.pinned_run import PinnedRun, config_settings
from storage import TrajectoryStore
from tests.storage.records import commit_replayable

SETTINGS = {"steps": 3}


def test_runs_alike_in_two_folders_keep_their_rows_apart(tmp_path: Path) -> None:
    commit_replayable(tmp_path / "store")
    snapshot = TrajectoryStore(tmp_path / "store").snapshot()
    runs = [PinnedRun.open(tmp_path / name, SETTINGS, str(tmp_path / "store")) for name in ("one", "two")]
    for run in runs:
        run.keep(snapshot, "d-1")
    pins = tmp_path / "store" / "_pins"
    assert len(list(pins.iterdir())) == 2
    runs[0].release()
    assert len(list(pins.iterdir())) == 1
    PinnedRun.open(tmp_path / "two", SETTINGS, str(tmp_path / "store")).release()
    assert list(pins.iterdir()) == []


def test_a_run_does_not_go_on_with_another_drafter(tmp_path: Path) -> None:
    commit_replayable(tmp_path / "store")
    snapshot = TrajectoryStore(tmp_path / "store").snapshot()
    PinnedRun.open(tmp_path / "run", SETTINGS, str(tmp_path / "store")).keep(snapshot, "d-1", "mlflow-1")
    again = PinnedRun.open(tmp_path / "run", SETTINGS, str(tmp_path / "store"))
    assert (again.is_new, again.run_id) == (False, "mlflow-1")
    assert again.versions == (snapshot.sequences_version, snapshot.rounds_version)
    with pytest.raises(ConfigError, match="holds a run with drafter d-1, and the configuration's is now d-2"):
        again.keep(snapshot, "d-2", "mlflow-1")
    again.keep(snapshot, "d-1", "mlflow-1")


@pytest.mark.parametrize(
    "change",
    [{"revision": "a"}, {"drafter_revision": "b"}, {"system_prompt": "Be brief."}, {"enable_thinking": True}],
)
def test_a_run_does_not_go_on_with_another_configuration(
    tmp_path: Path, tiny_config: TargetConfig, change: dict[str, object]
) -> None:
    commit_replayable(tmp_path / "store")
    store = str(tmp_path / "store")
    run = PinnedRun.open(tmp_path / "run", config_settings(tiny_config), store)
    run.keep(TrajectoryStore(store).snapshot(), "d-1")
    assert not PinnedRun.open(tmp_path / "run", config_settings(tiny_config), store).is_new
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        PinnedRun.open(tmp_path / "run", config_settings(tiny_config.model_copy(update=change)), store)
