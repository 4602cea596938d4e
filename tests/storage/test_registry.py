"""The registry on a real MLflow with a SQLite file: versions, aliases, copies, and what it refuses."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path

import pytest

from graft_dist.errors import RegistryError, RegistryUnavailableError
from storage.registry import (
    CHALLENGER,
    CHAMPION,
    CONTENT_TAG,
    PREVIOUS,
    Promotion,
    Registry,
    content_sha256,
    default_tracking_uri,
)


def make_folder(path: Path, text: str) -> Path:
    """Stands for a saved policy: the registry looks at names and bytes only."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "policy.json").write_text(text)
    (path / "scorer.safetensors").write_bytes(text.encode() * 3)
    return path


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def registry(uri: str, tmp_path: Path) -> Registry:
    return Registry(uri, tmp_path / "cache")


def test_a_version_lives_through_its_aliases(registry: Registry, tmp_path: Path) -> None:
    first = make_folder(tmp_path / "a", '{"v": 1}')
    second = make_folder(tmp_path / "b", '{"v": 2}')
    tags = {"graft.target_fingerprint": "t-1", "graft.data": "sequences@3+rounds@3"}
    assert registry.resolve("life", CHAMPION) is None
    assert registry.register(first, "life", {"mat": 2.5}, tags, description="the first") == 1
    assert registry.register(first, "life", {"mat": 9.0}) == 1  # the same content is not registered twice
    assert registry.promote("life", 1) == Promotion(1, None)
    assert registry.register(second, "life", {"mat": 2.75}) == 2
    assert registry.resolve("life", CHALLENGER) == registry.resolve("life", 2) == registry.resolve("life", "2") == 2
    newest, oldest = registry.versions("life")
    assert (newest.version, newest.aliases, newest.metrics, newest.slug) == (2, (CHALLENGER,), {"mat": 2.75}, "life")
    assert (oldest.version, oldest.aliases, oldest.metrics) == (1, (CHAMPION,), {"mat": 2.5})
    assert oldest.tags == {**tags, CONTENT_TAG: content_sha256(first)}
    assert registry.client.get_model_version("graft-life", "1").description == "the first"

    assert registry.promote("life", 2, expected_champion=1) == Promotion(2, 1)
    assert registry.promote("life", 2) == Promotion(2, 1)  # again: nothing changes
    with pytest.raises(RegistryError, match="compared with champion 1, and the champion is now 2"):
        registry.promote("life", 1, expected_champion=1)
    registry.tag("life", 2, {"graft.gate": "forced"})
    assert registry.rollback("life") == Promotion(1, None)
    assert [registry.resolve("life", alias) for alias in (CHAMPION, PREVIOUS)] == [1, None]
    newest = registry.versions("life")[0]
    assert newest.tags["graft.gate"] == "forced" and "graft.rolled_back_at" in newest.tags
    with pytest.raises(RegistryError, match="no previous champion"):
        registry.rollback("life")
    assert [registry.is_rolled_back("life", version) for version in (1, 2)] == [False, True]
    registry.client.set_registered_model_alias("graft-life", PREVIOUS, "1")  # as a rollback that was cut off leaves it
    assert registry.rollback("life") == Promotion(1, None)
    assert not registry.is_rolled_back("life", 1)
    registry.promote("life", 2)  # somebody has thought again
    assert not registry.is_rolled_back("life", 2)


def test_fetch_copies_once_and_mends_its_copy(registry: Registry, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy-of-mine", '{"v": 3}')
    version = registry.register(folder, "fetched", tags={"graft.target_spec": "org/tiny"})
    copy = registry.fetch("fetched", version)
    assert content_sha256(copy) == content_sha256(folder)
    (copy / "mark").touch()
    (copy / "mark").unlink()
    before = copy.stat().st_mtime_ns
    assert registry.fetch("fetched", version) == copy and copy.stat().st_mtime_ns == before
    (copy / "policy.json").write_text("{}")  # somebody's disk
    assert (registry.fetch("fetched", version) / "policy.json").read_text() == '{"v": 3}'
    for reference in (f"models:/graft-fetched/{version}", "models:/graft-fetched@challenger"):
        assert registry.fetch_reference(reference) == copy


def test_what_mlflow_refuses_is_not_taken_for_an_outage(registry: Registry, tmp_path: Path) -> None:
    """Whoever waits for the registry to come back would wait for good."""
    version = registry.register(make_folder(tmp_path / "policy", "{}"), "deleted")
    registry.client.delete_model_version("graft-deleted", str(version))
    for refused in (
        lambda: registry.tag("deleted", version, {"graft.gate": "kept"}),
        lambda: registry.log_report("deleted", version, tmp_path / "policy" / "policy.json"),
        lambda: registry.fetch("deleted", version),
    ):
        with pytest.raises(RegistryError) as refusal:
            refused()
        assert refusal.type is RegistryError


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("models:/graft-fetched@champion", "holds no graft-fetched 'champion'"),
        ("models:/graft-never@champion", "holds no graft-never 'champion'"),
        ("models:/other/1", "names no policy"),
        ("models:/graft-fetched", "names no policy"),
    ],
)
def test_references_that_lead_nowhere(registry: Registry, reference: str, sentence: str) -> None:
    with pytest.raises(RegistryError, match=sentence):
        registry.fetch_reference(reference)


def test_what_is_not_there(registry: Registry, tmp_path: Path) -> None:
    assert registry.versions("never") == []
    assert registry.resolve("never", 1) is None
    for refused in (lambda: registry.promote("never", 1), lambda: registry.fetch("never", 4)):
        with pytest.raises(RegistryError, match="holds no graft-never version"):
            refused()
    with pytest.raises(RegistryError, match="no previous champion"):
        registry.rollback("never")
    with pytest.raises(RegistryError, match="there is no policy in"):
        registry.register(tmp_path / "nothing", "never")


def test_a_registry_that_cannot_be_reached_is_said_at_once(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(
        RegistryUnavailableError, match=rf"http://127.0.0.1:{port} cannot be reached: Connection refused"
    ):
        Registry(f"http://127.0.0.1:{port}")
    with pytest.raises(RegistryError, match="is a folder; give a server"):
        Registry(str(tmp_path))
    with pytest.raises(RegistryError, match="names no file"):
        Registry("sqlite://")
    (tmp_path / "text.db").write_text("not a database, but long enough to be looked at as one" * 20)
    with pytest.raises(RegistryUnavailableError, match="cannot be reached"):
        Registry(f"sqlite:///{tmp_path / 'text.db'}")


def register_three(uri: str, folder: str, name: str) -> None:
    registry = Registry(uri)
    for number in range(3):
        registry.register(make_folder(Path(folder) / f"{name}-{number}", f"{name} {number}"), "crowd")


@pytest.mark.slow
def test_two_trainings_at_once_on_a_new_file(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'new' / 'mlflow.db'}"
    spawn = multiprocessing.get_context("spawn")
    crowd = [spawn.Process(target=register_three, args=(uri, str(tmp_path), name)) for name in ("a", "b")]
    for process in crowd:
        process.start()
    for process in crowd:
        process.join(300)
        assert process.exitcode == 0
    versions = Registry(uri).versions("crowd")
    assert [version.version for version in versions] == [6, 5, 4, 3, 2, 1]
    assert len({version.tags[CONTENT_TAG] for version in versions}) == 6
    assert sum(CHALLENGER in version.aliases for version in versions) == 1


def test_the_default_file_is_the_same_everywhere() -> None:
    uri = default_tracking_uri()
    assert uri.startswith("sqlite:////") and uri.endswith("/mlflow.db")
