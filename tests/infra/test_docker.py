"""The Dockerfile, without Docker: what it copies is in the context, what it installs is pinned, as whom it runs."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import graft_dist

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "infra" / "docker"


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of the Dockerfile, continued lines joined."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def locked(file: Path) -> dict[str, str]:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in (line.split("==") for line in lines)}


def in_context(path: str) -> bool:
    """Whether .dockerignore lets a path of the repository through: the last pattern that fits decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.lstrip("!")
        parts = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
        if pattern.startswith("**/"):
            fits = any(fnmatch.fnmatch(Path(part).name, pattern[3:]) for part in parts)
        else:
            fits = any(fnmatch.fnmatch(part, pattern) for part in parts)
        if fits:
            kept = line.startswith("!")
    return kept


def test_what_is_copied_exists_and_is_in_the_context() -> None:
    sources = []
    for name, rest in instructions():
        if name == "COPY":
            sources += [word for word in rest.split() if not word.startswith("--")][:-1]
    assert {"requirements.lock", "graft_dist", "jobs", "serve", "storage", "targets"} <= set(sources)
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert [source for source in sources if not in_context(source)] == []


def test_nothing_private_is_in_the_context() -> None:
    private = ["infra/secrets/ray_token", ".git/config", ".venv/bin/python", "data/store/x", "tests/x.py", ".env"]
    assert [path for path in private if in_context(path)] == []
    assert not in_context("jobs/__pycache__/cli.pyc")
    assert in_context("jobs/cli.py") and in_context("graft_dist/data/starter_prompts.jsonl")


def test_every_image_ends_as_a_user_without_rights() -> None:
    stages: dict[str, str] = {}
    stage = ""
    for name, rest in instructions():
        if name == "FROM":
            stage = rest.split()[-1]
        elif name == "USER":
            stages[stage] = rest
    assert stages == {"mlflow": "1000:1000", "ray": "1000:1000"}


def test_base_and_dependencies_are_pinned() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    version = re.search(r"ARG PYTHON_VERSION=(\d+\.\d+)\.\d+", text)
    assert version is not None
    supported = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert supported.startswith(f">={version[1]}")
    bases = [rest for name, rest in instructions() if name == "FROM"]
    assert bases[0] == "python:${PYTHON_VERSION}-slim-bookworm AS base"
    assert all(rest.startswith("base AS ") for rest in bases[1:])
    for name, rest in instructions():
        if name == "RUN":
            for command in re.findall(r"pip install[^&|]*", rest):
                is_pinned = "requirements.lock" in command or "--no-deps" in command
                assert is_pinned, f"not pinned: {command}"
    assert "latest" not in text


def test_dependencies_come_before_the_code() -> None:
    order = [rest for name, rest in instructions() if name in ("COPY", "RUN")]
    torch = next(index for index, rest in enumerate(order) if "^torch==" in rest)
    code = next(index for index, rest in enumerate(order) if rest.endswith("graft_dist graft_dist"))
    last = next(index for index, rest in enumerate(order) if "--editable ." in rest)
    assert torch < code < last


def test_the_mlflow_server_has_the_projects_versions() -> None:
    ours, theirs = locked(ROOT / "requirements.lock"), locked(DOCKER / "mlflow.lock")
    shared = set(ours) & set(theirs)
    assert {"urllib3", "six"} <= shared
    assert {name: theirs[name] for name in shared} == {name: ours[name] for name in shared}


def test_examples_in_the_dockerfile_name_this_version() -> None:
    tags = re.findall(r"-t graft-dist:(\S+)-(cpu|cuda)", (DOCKER / "Dockerfile").read_text())
    assert {version for version, _ in tags} == {graft_dist.__version__}
    assert {variant for _, variant in tags} == {"cpu", "cuda"}
