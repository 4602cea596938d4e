"""The registry of policies: MLflow's model registry, one registered model `graft-<target slug>` per target.

Aliases say what a version is to us: `champion` serves, `challenger` was trained last, `previous` was the champion
before. A version holds the policy's own folder (safetensors and JSON) inside an MLflow model; who decodes with it reads
that folder (`fetch`) and never unpickles anything. Trackers that live in a SQLite file are used by one process at a
time while they are created or written; a tracking server sorts that out by itself.

Owns names, aliases, tags and the local copies. What a policy is belongs to `graft_dist/policy_file.py`; whether one
deserves to be champion is decided elsewhere. Nothing here changes MLflow's settings of the whole process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import platformdirs

from graft_dist.errors import RegistryError, RegistryUnavailableError
from storage.registered_model import quiet, write_model

PREFIX = "graft-"
CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"

CONTENT_TAG = "graft.content_sha256"
"""Tag of a version: hash of its policy folder. The same content is registered once."""

SPEC_TAG = "graft.target_spec"
"""Tag of a version: the target's full name, for those who load the version with MLflow's own tools."""

METRIC_TAG = "graft.metric."
"""Tags of a version that are numbers."""

_ROLLED_BACK = "graft.rolled_back_at"
_POLICY_PATH = "artifacts/policy"  # of the policy's folder inside the MLflow model
_REACH_TIMEOUT_S = 5.0
_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # MLflow says the latter of a missing alias
# Asked again, MLflow will say the same. Not BAD_REQUEST: what its database meets is one, too.
_REFUSALS = (*_ABSENT, "RESOURCE_ALREADY_EXISTS")


@dataclass(frozen=True)
class PolicyVersion:
    """One registered version."""

    name: str  # of the registered model
    version: int
    aliases: tuple[str, ...]  # sorted
    created_at: datetime  # UTC
    metrics: Mapping[str, float]
    tags: Mapping[str, str]  # without the metrics
    run_id: str | None  # MLflow run that made it

    @property
    def slug(self) -> str:
        """Of the target."""
        return self.name.removeprefix(PREFIX)


@dataclass(frozen=True)
class Promotion:
    """Where the aliases stand after `promote` or `rollback`."""

    champion: int
    previous: int | None


def default_tracking_uri() -> str:
    """A SQLite file in the user's data folder: the same one from every working directory."""
    return f"sqlite:///{Path(platformdirs.user_data_dir('graft-dist')) / 'mlflow.db'}"


def model_name(slug: str) -> str:
    """The registered model of a target."""
    return PREFIX + slug


class Registry:
    """The registry behind one tracking URI.

    Raises `RegistryError`, in one sentence, when it cannot be reached, and from every method that it refuses.
    """

    def __init__(self, tracking_uri: str, cache_dir: Path | None = None) -> None:
        """`cache_dir` is where `fetch` keeps its copies: the user's cache folder by default."""
        # MLflow would report usage over the network; that is for its user to switch on.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        self.tracking_uri = tracking_uri
        self._cache = cache_dir or Path(platformdirs.user_cache_dir("graft-dist")) / "policies"
        self._database = _database_file(tracking_uri)
        with self.said("reached"):
            if self._database is None:
                _check_reachable(tracking_uri)
            else:
                self._database.parent.mkdir(parents=True, exist_ok=True)
            from mlflow.tracking import MlflowClient

            # Two processes that create the tables of one SQLite file at once leave it broken.
            with self._alone(), quiet("mlflow.store.db.utils"):
                self.client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
                self.client.search_experiments(max_results=1)

    # ---------------------------------------------------------------- writing

    def experiment(self, slug: str) -> str:
        """Return the id of the target's MLflow experiment, which is made if it is not there.

        With a SQLite file, its artifacts go into a folder beside that file and not into the working directory.
        """
        place = None if self._database is None else (self._database.parent / "mlartifacts" / model_name(slug)).as_uri()
        with self.writing():
            found = self.client.get_experiment_by_name(model_name(slug))
            if found is not None:
                return str(found.experiment_id)
            return str(self.client.create_experiment(model_name(slug), artifact_location=place))

    def register(
        self,
        folder: Path,
        slug: str,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        *,
        description: str = "",
        run_id: str | None = None,
    ) -> int:
        """Register the policy saved in `folder` as a new version with the alias challenger, and return its number.

        A folder whose content is registered already becomes the challenger again and gets no new version.

        Args:
            folder: as `GraftPolicy.save` wrote it.
            metrics: numbers that the version is judged by; kept as its tags.
            tags: fingerprints, data identity and the like.
            run_id: the MLflow run that trained it; without one a run is made that holds the metrics.
        """
        content = content_sha256(folder)
        name = model_name(slug)
        experiment = self.experiment(slug)
        with self.writing():
            version = self._registered(name, content)
            if version is None:
                numbers = {METRIC_TAG + key: repr(float(value)) for key, value in (metrics or {}).items()}
                version = self._add_version(
                    folder, name, experiment, {**(tags or {}), **numbers, CONTENT_TAG: content}, description, run_id
                )
            self.client.set_registered_model_alias(name, CHALLENGER, str(version))
        return version

    def tag(self, slug: str, version: int, tags: Mapping[str, str]) -> None:
        """Set tags of a version, such as why it was or was not promoted."""
        with self.writing():
            for key, value in tags.items():
                self.client.set_model_version_tag(model_name(slug), str(version), key, value)

    def log_report(self, slug: str, version: int, report: Path) -> None:
        """Keep a file beside what the version's MLflow run has logged, under `reports`."""
        with self.writing():
            self.client.log_artifact(self._known(model_name(slug), version).run_id, str(report), "reports")

    def promote(self, slug: str, version: int, *, expected_champion: int | None = -1) -> Promotion:
        """Make a version the champion; the champion until now becomes `previous`. Doing so twice changes nothing more.

        `expected_champion`: the champion (None: none) that the decision was based on; refused if it has changed since.
        -1 does not ask.
        """
        name = model_name(slug)
        with self.writing():
            found = self._known(name, version)
            aliases = self._aliases(name)
            champion = aliases.get(CHAMPION)
            if champion != version and expected_champion not in (-1, champion):
                raise RegistryError(
                    f"{name} version {version} was not promoted: it was compared with champion {expected_champion}, "
                    f"and the champion is now {champion}"
                )
            if champion == version:
                self._forget_rollback(found)
                return Promotion(version, aliases.get(PREVIOUS))
            if champion is not None:
                self.client.set_registered_model_alias(name, PREVIOUS, str(champion))
            self.client.set_registered_model_alias(name, CHAMPION, str(version))
            self._forget_rollback(found)
            return Promotion(version, champion)

    def rollback(self, slug: str) -> Promotion:
        """Make the previous champion the champion again; there is no previous one afterwards."""
        name = model_name(slug)
        with self.writing():
            aliases = self._aliases(name)
            previous, champion = aliases.get(PREVIOUS), aliases.get(CHAMPION)
            if previous is None:
                raise RegistryError(
                    f"{name} has no previous champion to go back to; promote the version that should serve"
                )
            if champion not in (None, previous):  # first: a rollback that is not known as one would be undone
                now = datetime.now(UTC).isoformat(timespec="seconds")
                self.client.set_model_version_tag(name, str(champion), _ROLLED_BACK, now)
            self.client.set_registered_model_alias(name, CHAMPION, str(previous))
            self.client.delete_registered_model_alias(name, PREVIOUS)
            return Promotion(previous, None)

    def _forget_rollback(self, version: Any) -> None:
        if _ROLLED_BACK in version.tags:
            self.client.delete_model_version_tag(version.name, str(version.version), _ROLLED_BACK)

    # ---------------------------------------------------------------- reading

    def is_rolled_back(self, slug: str, version: int) -> bool:
        """Whether somebody went back from this version to the champion before it, and nobody has promoted it since."""
        with self.said("read"):
            return _ROLLED_BACK in self._known(model_name(slug), version).tags

    def resolve(self, slug: str, alias_or_version: str | int) -> int | None:
        """Return the number of the version that an alias or a number names; None where there is none."""
        name, wanted = model_name(slug), str(alias_or_version)
        with self.said("read"), self._none_if_absent():
            if wanted.isdecimal():
                return int(self.client.get_model_version(name, wanted).version)
            return int(self.client.get_model_version_by_alias(name, wanted).version)
        return None

    def version_of(self, slug: str, folder: Path) -> int | None:
        """Return the number of the version that holds what is in `folder`; None where it was never registered."""
        content = content_sha256(folder)
        with self.said("read"):
            return self._registered(model_name(slug), content)

    def versions(self, slug: str | None = None) -> list[PolicyVersion]:
        """Return the versions of a target, or of every target; newest first within one."""
        with self.said("read"):
            if slug is not None:
                names = [model_name(slug)]
            else:
                found = self.client.search_registered_models(filter_string=f"name LIKE '{PREFIX}%'", max_results=1000)
                names = sorted(model.name for model in found)
            return [version for name in names for version in self._versions(name)]

    def fetch(self, slug: str, version: int) -> Path:
        """Return a local folder with the version's policy, as `GraftPolicy.load` reads it; copied once and kept."""
        name = model_name(slug)
        with self.said("read"):
            found = self._known(name, version)
            content = found.tags.get(CONTENT_TAG, "")
            registry = hashlib.sha256(self.tracking_uri.encode()).hexdigest()[:8]
            folder = self._cache / f"{name}-{version}-{registry}-{content[:12]}"
            if folder.is_dir() and any(folder.iterdir()) and content_sha256(folder) == content:
                return folder
            self._cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=self._cache) as aside:
                copied = self._download(found, Path(aside))
                if content_sha256(copied) != content:
                    raise RegistryError(f"{name} version {version} is not what was registered: its files have changed")
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):  # another process was faster with the same files
                    copied.rename(folder)
            return folder

    def fetch_reference(self, reference: str) -> Path:
        """`fetch` for `models:/graft-<slug>@<alias>` or `models:/graft-<slug>/<version>`."""
        name, at, alias = reference.removeprefix("models:/").partition("@")
        if not at:
            name, _, alias = name.partition("/")
        if not name.startswith(PREFIX) or not alias:
            raise RegistryError(
                f"{reference!r} names no policy; write models:/{PREFIX}TARGET@champion or models:/{PREFIX}TARGET/7"
            )
        slug = name.removeprefix(PREFIX)
        version = self.resolve(slug, alias)
        if version is None:
            raise RegistryError(f"the registry {self.tracking_uri} holds no {name} {alias!r}; see graft policies")
        return self.fetch(slug, version)

    # ---------------------------------------------------------------- inside

    def _add_version(
        self,
        folder: Path,
        name: str,
        experiment: str,
        tags: Mapping[str, str],
        description: str,
        run_id: str | None,
    ) -> int:
        run_id = run_id or self._new_run(experiment, tags)
        with tempfile.TemporaryDirectory() as aside:
            model = write_model(folder, Path(aside), tags.get(SPEC_TAG, ""))
            logged = self.client.create_logged_model(experiment, name=name, source_run_id=run_id, tags=dict(tags))
            self.client.log_model_artifacts(logged.model_id, str(model))
        self.client.finalize_logged_model(logged.model_id, "READY")
        from mlflow.exceptions import MlflowException

        try:
            self.client.create_registered_model(name, description="GRAFT policies of one target model")
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        made = self.client.create_model_version(
            name,
            source=logged.artifact_location,
            run_id=run_id,
            tags=dict(tags),
            description=description,
            model_id=logged.model_id,
        )
        return int(made.version)

    def _new_run(self, experiment: str, tags: Mapping[str, str]) -> str:
        run = self.client.create_run(experiment, run_name="registration").info.run_id
        for key, value in tags.items():
            if key.startswith(METRIC_TAG):
                self.client.log_metric(run, key.removeprefix(METRIC_TAG), float(value))
        self.client.set_terminated(run)
        return str(run)

    def _download(self, found: Any, aside: Path) -> Path:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        place = self.client.get_model_version_download_uri(found.name, found.version)
        files = get_artifact_repository(place, tracking_uri=self.tracking_uri)
        return Path(files.download_artifacts(_POLICY_PATH, str(aside)))

    def _registered(self, name: str, content: str) -> int | None:
        same = [version.version for version in self._versions(name) if version.tags.get(CONTENT_TAG) == content]
        return max(same, default=None)

    def _versions(self, name: str) -> list[PolicyVersion]:
        aliases = self._aliases(name)
        found = []
        page = None
        while page is None or page.token:
            page = self.client.search_model_versions(
                f"name = '{name}'", max_results=1000, page_token=page.token if page else None
            )
            found += [_policy_version(version, aliases) for version in page]
        return sorted(found, key=lambda version: -version.version)

    def _known(self, name: str, version: int) -> Any:
        with self._none_if_absent():
            return self.client.get_model_version(name, str(version))
        raise RegistryError(f"the registry {self.tracking_uri} holds no {name} version {version}; see graft policies")

    def _aliases(self, name: str) -> dict[str, int]:
        with self._none_if_absent():
            return {alias: int(version) for alias, version in self.client.get_registered_model(name).aliases.items()}
        return {}

    @contextlib.contextmanager
    def _none_if_absent(self) -> Iterator[None]:
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            if error.error_code not in _ABSENT:
                raise

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Whatever writes to MLflow: one process at a time where it is a SQLite file, errors in one sentence."""
        with self.said("written"), self._alone():
            yield

    @contextlib.contextmanager
    def said(self, what: str) -> Iterator[None]:
        """Turn what goes wrong in MLflow, its database or the network into one sentence.

        A `RegistryUnavailableError`, unless MLflow has answered that it refuses.
        """
        try:
            yield
        except RegistryError:
            raise
        except Exception as error:
            if not _is_of_mlflow(error):
                raise
            is_refused = getattr(error, "error_code", None) in _REFUSALS
            kind = RegistryError if is_refused else RegistryUnavailableError
            reason = " ".join(str(error).split())[:300]
            raise kind(f"the registry {self.tracking_uri} cannot be {what}: {reason}") from error

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the SQLite file's lock, which whoever writes through this module takes; nothing for a server."""
        if self._database is None:
            yield
            return
        with self._database.with_name(self._database.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def content_sha256(folder: Path) -> str:
    """Hash of the names and bytes of all files below a folder.

    Raises:
        RegistryError: no folder, or an empty one.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise RegistryError(f"there is no policy in {folder}: it is no folder with files")
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _policy_version(version: Any, aliases: Mapping[str, int]) -> PolicyVersion:
    number, tags = int(version.version), dict(version.tags)
    return PolicyVersion(
        name=version.name,
        version=number,
        aliases=tuple(sorted(alias for alias, of in aliases.items() if of == number)),
        created_at=datetime.fromtimestamp(version.creation_timestamp / 1000, UTC),
        metrics={
            key.removeprefix(METRIC_TAG): float(value) for key, value in tags.items() if key.startswith(METRIC_TAG)
        },
        tags={key: value for key, value in tags.items() if not key.startswith(METRIC_TAG)},
        run_id=version.run_id or None,
    )


def _database_file(tracking_uri: str) -> Path | None:
    """The file of a SQLite URI, None for a server. Refuses what cannot hold a registry safely."""
    scheme = urlsplit(tracking_uri).scheme
    if scheme == "sqlite":
        path = tracking_uri.removeprefix("sqlite:///")
        if path in ("", ":memory:") or path == tracking_uri:
            raise RegistryError(
                f"the registry {tracking_uri!r} names no file; write sqlite:////absolute/path/mlflow.db"
            )
        return Path(path).absolute()
    if scheme in ("", "file"):
        raise RegistryError(
            f"the registry {tracking_uri!r} is a folder; give a server such as http://host:5000, or a file as "
            "sqlite:////absolute/path/mlflow.db"
        )
    return None


def _check_reachable(tracking_uri: str) -> None:
    """Say at once that nobody listens: MLflow itself would try again for minutes."""
    parts = urlsplit(tracking_uri)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        return
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    try:
        socket.create_connection((parts.hostname, port), timeout=_REACH_TIMEOUT_S).close()
    except OSError as error:
        raise RegistryUnavailableError(
            f"the registry {tracking_uri} cannot be reached: {error.strerror or error}"
        ) from error


def _is_of_mlflow(error: Exception) -> bool:
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, MlflowException | SQLAlchemyError | OSError)
