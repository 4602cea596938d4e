"""The import rule: jobs and serve -> storage -> graft_dist, and no environment variable inside the library.

Every import statement is read, also those inside functions, and every module of the library is imported in a new
interpreter.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FORBIDDEN = {
    "graft_dist": {
        "ray", "mlflow", "duckdb", "deltalake", "fastapi", "starlette", "uvicorn", "httpx", "httpx2", "requests",
        "urllib3", "aiohttp", "urllib", "http", "socket", "storage", "jobs", "serve",
    },
    "storage": {"ray", "fastapi", "starlette", "jobs", "serve"},
    "jobs": {"serve"},
}  # fmt: skip

# The `graft` command and the demonstration stand above everything: they may import the serving application.
COMMANDS = re.compile(r"jobs/(cli|demo|\w+_command)\.py")

# What a fresh interpreter must not hold after importing the whole library, whoever imported it. (torch and
# transformers bring HTTP clients of their own, so those are only forbidden as import statements above.)
NEVER_LOADED = {"ray", "mlflow", "duckdb", "deltalake", "fastapi", "starlette", "storage", "jobs", "serve"}


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line number, top-level package) of each import statement and each literal `import_module("...")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            # A relative import stays inside its own package.
            if node.level == 0:
                yield node.lineno, (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = ast.unparse(node.func)
            if name.endswith("import_module") or name == "__import__":
                yield node.lineno, str(node.args[0].value).split(".")[0]


def environment_reads(tree: ast.AST) -> Iterator[int]:
    """Line numbers where `os.environ`, `os.environb` or `os.getenv` is named, however it was imported."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}:
            yield node.lineno


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_import_statements(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in source_files(package)
        for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8")))
        if name in FORBIDDEN[package] and not COMMANDS.fullmatch(path.relative_to(ROOT).as_posix())
    ]
    assert wrong == []


def test_mlflow_stays_in_the_registry() -> None:
    users = {
        path.name
        for path in source_files("storage")
        if "mlflow" in {name for _, name in imported_names(ast.parse(path.read_text(encoding="utf-8")))}
    }
    assert users == {"registry.py", "registered_model.py", "edge_model.py"}


def test_the_reader_of_imports_finds_them_all() -> None:
    text = """
import ray
import ray.data as data, os
from duckdb import connect
from . import neighbour
def late():
    from jobs.cli import main
    importlib.import_module("mlflow.pyfunc")
    __import__("serve")
"""
    found = {name for _, name in imported_names(ast.parse(text))}
    assert found == {"ray", "os", "duckdb", "jobs", "mlflow", "serve"}


def test_the_library_reads_no_environment() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in source_files("graft_dist")
        for line in environment_reads(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert wrong == []


def test_the_reader_of_environment_reads_finds_them_all() -> None:
    text = "import os\nos.environ['A']\nos.getenv('A')\nfrom os import environ\nself.environ\n"
    assert set(environment_reads(ast.parse(text))) == {2, 3, 4}


def test_importing_the_library_loads_nothing_of_the_outside() -> None:
    modules = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in source_files("graft_dist")
    )
    assert "graft_dist" in modules and "graft_dist.config" in modules
    script = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert loaded & NEVER_LOADED == set()


def test_importing_the_package_alone_is_light() -> None:
    script = "import sys, graft_dist; print(sorted({'torch', 'transformers', 'numba', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
