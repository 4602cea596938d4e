"""The numbers that are published in bench/, in the README and in the drafter's card follow from committed rows."""

import itertools
import json
import re
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest

from graft_dist.bench import Arm, Measurement, to_measurement
from graft_dist.generate import Answer, Request
from graft_dist.prompts import Prompt
from jobs.bench_folder import BenchFolder
from jobs.load_client import Outcome, Reply
from jobs.load_report import ServiceLevel, render_markdown, summarise, to_lines, to_row
from jobs.load_schedule import Load

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = sorted(file.parent for file in (ROOT / "bench").rglob("summary.json"))
CARDS = sorted((ROOT / "graft_dist" / "data").rglob("README.md"))
DOCUMENTS = [ROOT / "README.md", *CARDS]
NAMES = ["README", *(card.parent.parent.name for card in CARDS)]
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if "\n<!-- figures" in page.read_text(encoding="utf-8")]


def verify(*folders: Path) -> subprocess.CompletedProcess[str]:
    # -S -I: without site-packages, so that it shows that the standard library is enough.
    command = [sys.executable, "-S", "-I", "bench/verify.py", *map(str, folders)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_published_numbers_follow_from_their_rows(folder: Path) -> None:
    done = verify(folder)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("document", [*DOCUMENTS, *PAGES], ids=[*NAMES, *(page.stem for page in PAGES)])
def test_figures_of_a_document_follow_from_their_rows(document: Path) -> None:
    done = verify(document)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_any_changed_digit_of_a_marked_figure_is_found(document: Path, tmp_path: Path) -> None:
    check = runpy.run_path(str(ROOT / "bench" / "verify.py"))["document_differences"]
    text = document.read_text(encoding="utf-8")
    copy, num_changed = tmp_path / "copy.md", 0
    for marker in re.finditer(r"<!-- figures:.*?-->\s*", text):
        end = text.index("\n\n", marker.end())
        start = text.index("---|\n", marker.end()) if text[marker.end()] == "|" else marker.end()
        for figure in re.finditer(r"\d+\.\d+|\d+ %", text[start:end]):
            for digit in re.finditer(r"\d", figure[0]):
                place = start + figure.start() + digit.start()
                copy.write_text(f"{text[:place]}{(int(digit[0]) + 1) % 10}{text[place + 1 :]}", encoding="utf-8")
                assert check(copy), f"{figure[0]} may be changed at {digit.start()}"
                num_changed += 1
    assert num_changed > 60
    copy.write_text("A document without a marked figure: 1.23.\n")
    assert check(copy) == ["no figure is marked"]
    copy.write_text(text.replace("; columns:", "; cells:").replace("; values:", "; numbers:"))
    assert check(copy) == ["a comment that begins with figures: cannot be read"]


def test_a_folder_of_summaries_is_read_by_the_names_of_its_files(tmp_path: Path) -> None:
    check = runpy.run_path(str(ROOT / "bench" / "verify.py"))["document_differences"]
    for name, seconds in (("no-write", 12.34), ("out", 13.0)):
        summary = {"tokens": 500, "seconds": seconds, "settings": {"slots": 8}, "message": None, "set_aside": []}
        (tmp_path / f"{name}.json").write_text(json.dumps(summary))
    page = tmp_path / "page.md"
    marker = f"<!-- figures: {tmp_path}; rows: run; columns: tokens, seconds -->\n\n| run | tokens | s |\n|-|-|-|\n"
    page.write_text(marker + "| no-write | 500 | 12.3 |\n| out | 500 | 13 |\n")
    assert check(page) == []
    page.write_text(marker + "| no-write | 500 | 12.3 |\n| out | 501 | 13 |\n| other | 5 | 1 |\n")
    assert len(check(page)) == 3


def measurements(index: int) -> list[Measurement]:
    request = Request(f"p{index}", "ab"[index % 2], [1, 2])
    tokens = list(range(13))
    plain = Answer(request, tokens, "", "length", None, [1] * 12, 0, 0.1, 1.0 + 0.1 * index)
    tree = Answer(request, tokens, "", "length", None, [3] * 4, 32, 0.1, 0.5 + 0.07 * (index % 3))
    learned = Answer(request, tokens, "", "length", None, [4] * 3, 24, 0.1, 0.4 + 0.05 * (index % 5))
    arms = (Arm("plain", 0), Arm("ddtree", 8), Arm("graft", 64))
    return [to_measurement(*pair) for pair in zip(arms, (plain, tree, learned), strict=True)]


def test_true_numbers_pass_and_each_false_one_is_named(tmp_path: Path) -> None:
    folder = BenchFolder(tmp_path, [Arm("plain", 0), Arm("ddtree", 8), Arm("graft", 64)])
    folder.open({}, {})
    for index in range(8):
        folder.append(measurements(index))
    folder.finish()
    assert verify(tmp_path).returncode == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    for column in ("speedup", "speedup_low", "mat", "tokens_per_s", "mean_budget", "num_prompts"):
        false = [{**row, column: row[column] * 2} for row in summary]
        (tmp_path / "summary.json").write_text(json.dumps(false))
        done = verify(tmp_path)
        assert done.returncode == 1
        assert f"ddtree 8 all: {column} is" in done.stdout
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    lines = (tmp_path / "comparisons.jsonl").read_text().splitlines()
    compared = [json.loads(line) for line in lines]
    page = tmp_path / "page.md"
    ratio = f"{compared[-1]['ratio']:.3f}"
    page.write_text(
        f"<!-- figures: {tmp_path}/comparisons.jsonl; values: graft/ddtree-8 all ratio -->\n\nOver DDTree: {ratio}.\n"
    )
    assert verify(page).returncode == 0
    for column in ("ratio", "low", "high", "num_prompts"):
        false = [{**row, column: row[column] * 2} for row in compared]
        (tmp_path / "comparisons.jsonl").write_text("".join(json.dumps(row) + "\n" for row in false))
        done = verify(tmp_path)
        assert done.returncode == 1
        assert f"graft over ddtree-8, all: {column} is" in done.stdout


def test_a_load_tests_numbers_pass_and_each_false_one_is_named(tmp_path: Path) -> None:
    load, level, random = Load(concurrency=2), ServiceLevel(400.0, 60.0), Random(0)
    pairs = []
    for block, arm, position in itertools.product(range(6), ("plain", "ddtree"), range(4)):
        total_s = (1.0 if arm == "plain" else 0.6) * random.uniform(0.9, 1.1)
        ttft_s = random.uniform(0.05, 0.2)
        gaps = tuple(random.uniform(0.0, 0.1) for _ in range(5))
        is_lost = (block, position, arm) == (2, 1, "ddtree")
        outcome = Outcome.timeout if is_lost else Outcome.ok
        text, metrics = f"text {position}", {"rounds": 5, "mean_budget": 8.0 * (arm != "plain")}
        reply = Reply(outcome, 0.0, total_s, ttft_s, gaps, (text,), ("stop",), 20, graft=metrics)
        prompt = Prompt(f"p{position}", "chat", ("?",))
        pairs.append(to_row(load, block, position, arm, prompt, 0.1 * position, 0.0, reply))
    rows, gap_rows = [row for row, _ in pairs], [gap for _, gap in pairs]
    summary = summarise(rows, gap_rows, level)
    (tmp_path / "raw.jsonl").write_text(to_lines(rows))
    (tmp_path / "gaps.jsonl").write_text(to_lines(gap_rows))
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"service_level": asdict(level)}}))
    (tmp_path / "summary.md").write_text(render_markdown(summary, rows, level))
    true = [asdict(row) for row in summary]
    (tmp_path / "summary.json").write_text(json.dumps(true))
    done = verify(tmp_path)
    assert done.returncode == 0, done.stdout
    for column in set(true[1]) - {"load", "arm", "concurrency"}:
        false = [true[0], {**true[1], column: 2 * true[1][column] + 1}]
        (tmp_path / "summary.json").write_text(json.dumps(false))
        done = verify(tmp_path)
        assert done.returncode == 1
        assert f"closed-2 ddtree: {column} is" in done.stdout, column
    (tmp_path / "summary.json").write_text(json.dumps(true[:1]))
    assert "one entry for each load and arm" in verify(tmp_path).stdout
