"""The project's paperwork agrees with itself: dependencies, lock files, version, starter data."""

import re
import tomllib
from pathlib import Path
from typing import Any

import graft_dist

ROOT = Path(__file__).resolve().parents[1]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def direct_dependencies() -> set[str]:
    table = project()
    lines = table["dependencies"] + table["optional-dependencies"]["dev"]
    return {normal(re.split(r"[\[<>=,;!~ ]", line)[0]) for line in lines}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line.strip() and not line.startswith("#")]
    return {normal(package): version for package, version in pairs}


def test_version_is_the_same_everywhere() -> None:
    assert project()["version"] == graft_dist.__version__


def test_every_direct_dependency_is_locked() -> None:
    assert direct_dependencies() - set(locked("requirements.lock")) == set()


def test_locks_hold_plain_versions() -> None:
    versions = locked("requirements.lock") | locked("requirements-target.lock")
    assert [f"{name}=={version}" for name, version in versions.items() if not re.fullmatch(r"[\w.]+", version)] == []


def test_every_direct_dependency_has_its_reason() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    named = {normal(name.split("[")[0]) for name in re.findall(r"`([\w.-]+(?:\[\w+\])?)`", page)}
    assert direct_dependencies() - named == set()


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    pages = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert pages and [page for page in pages if page not in index] == []


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []
