"""Commands shown in the documents exist: each flag that a page gives to one of our commands is in its help."""

import re
import shlex
import subprocess
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest

from jobs import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown_commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every `graft ...` and `python jobs/....py ...` in shell blocks, and with options in prose."""
    commands = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.DOTALL)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        lines += re.findall(r"`((?:graft [a-z]|python jobs/)[^`]*--[^`]*)`", prose)
        for line in lines:
            words = shlex.split(line, comments=True)
            start = next((i for i, word in enumerate(words) if is_ours(words, i)), None)
            if start is not None:
                commands.append((page.name, words[start:]))
    return commands


def is_ours(words: list[str], index: int) -> bool:
    if Path(words[index]).name == "graft":
        return index == 0 or words[index - 1] == "--"  # elsewhere it is a word such as a namespace
    return words[index].startswith("jobs/") and words[index].endswith(".py") and "python" in words[index - 1]


@cache
def help_text(command: str) -> str:
    """What `--help` prints; in this process, since a new one would import everything again."""
    shown = StringIO()
    with redirect_stdout(shown), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "250")
        if command.endswith(".py"):
            main = import_module(command.removesuffix(".py").replace("/", ".")).main
            with pytest.raises(SystemExit, match="0"):
                main(["--help"])
        else:
            assert cli.run([*command.split(), "--help"]) == 0
    return shown.getvalue()


def test_the_readme_shows_the_main_commands() -> None:
    shown = {" ".join(words[:2]) for page, words in shown_commands() if page == "README.md"}
    assert {"graft generate", "graft audit", "graft bench", "graft query"} <= shown
    assert any(name.startswith("jobs/collect.py") for name in shown)


@pytest.mark.parametrize(("page", "words"), shown_commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_flag_is_in_the_help(page: str, words: list[str]) -> None:
    if words[0].endswith(".py"):
        text = help_text(words[0])
    elif words[1].startswith("-"):
        text = help_text("")
    else:
        text = help_text(" ".join(words[1 : 3 if words[1] in ("schedule", "store") else 2]))
    flags = [word.split("=")[0] for word in words if word.startswith("--") and len(word) > 2]
    known = set(re.findall(r"--[a-z][a-z0-9-]*", text))
    assert [flag for flag in flags if flag not in known] == []


def test_make_targets_that_are_shown_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    shown = {
        target
        for page in PAGES
        for target in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {"quickstart", "test"} <= shown
    assert shown - targets == set()


def test_what_a_shown_job_reads_is_sent_along_with_it() -> None:
    """Of `--working-dir .` Ray leaves behind what .gitignore and .rayignore name, which git reads alike."""
    submitted = {
        word
        for page in PAGES
        for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
        if "ray job submit" in line and "--working-dir ." in line
        for word in line.split()
        if (ROOT / word).is_file()
    }
    assert {"jobs/collect.py", "jobs/benchmark.py", "bench/paper.yaml"} <= submitted
    git = ["git", "-c", f"core.excludesFile={ROOT / '.rayignore'}", "check-ignore", "--no-index", "--"]
    left = subprocess.run([*git, *sorted(submitted)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (left.returncode, left.stdout, left.stderr) == (1, "", "")  # 1: none of them
