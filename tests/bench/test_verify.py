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
from graft_dist.generate import Answer, Request, StageTimes
from graft_dist.prompts import Prompt
from jobs.bench_folder import BenchFolder
from jobs.load_client import Outcome, Reply
from jobs.load_report import ServiceLevel, render_markdown, summarise, to_lines, to_row
from jobs.load_schedule import Load

ROOT = Path(__file__).resolve().parents[2]
PARTS = sorted(
    file.parent for file in (ROOT / "bench").glob("*/summary.jsonl") if file.with_name("raw.jsonl").is_file()
)
PUBLISHED = [*sorted(file.parent for file in (ROOT / "bench").rglob("summary.json")), *PARTS]
CARDS = sorted((ROOT / "graft_dist" / "data").rglob("README.md"))
DOCUMENTS = [ROOT / "README.md", *CARDS]
NAMES = ["README", *(card.parent.parent.name for card in CARDS)]
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "\n<!-- figures" in page.read_text(encoding="utf-8")]


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


def test_what_is_verified_when_nothing_is_named_is_all_of_these() -> None:
    published = runpy.run_path(str(ROOT / "bench" / "verify.py"))["published"]()
    assert {ROOT / path for path in published} == {*PUBLISHED, *DOCUMENTS, *PAGES}


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
    request = Request(f"p{index}", "ab"[index % 2], [1, 2], render_s=0.01)
    tokens = list(range(13))

    def answer(lengths: list[int], num_drafted: int, decode_s: float, num_mismatched: int) -> Answer:
        stages = StageTimes(100 * decode_s, 10 * decode_s, 870 * decode_s, 20 * decode_s)
        return Answer(
            request, tokens, "", "length", None, lengths, num_drafted, 0.1, decode_s, stages,
            num_mismatched=num_mismatched, total_s=0.12 + decode_s,
        )  # fmt: skip

    answers = {
        Arm("plain", 0): answer([1] * 12, 0, 1.0 + 0.1 * index, 0),
        Arm("ddtree", 8): answer([3] * 4, 32, 0.5 + 0.07 * (index % 3), 2),
        Arm("graft", 64): answer([4] * 3, 24, 0.4 + 0.05 * (index % 5), 1),
    }
    return [to_measurement(arm, own, load_s=2.0 + index) for arm, own in answers.items()]


def measured_folder(path: Path) -> Path:
    folder = BenchFolder(path, [Arm("plain", 0), Arm("ddtree", 8), Arm("graft", 64)])
    folder.open({}, {})
    for index in range(8):
        folder.append(measurements(index))
    folder.finish()
    return path


def test_true_numbers_pass_and_each_false_one_is_named(tmp_path: Path) -> None:
    assert verify(measured_folder(tmp_path)).returncode == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    for column in set(summary[0]) - {"method", "budget", "task"}:
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


def test_a_false_stage_in_the_tables_is_found(tmp_path: Path) -> None:
    check = runpy.run_path(str(ROOT / "bench" / "verify.py"))["differences"]
    tables = (measured_folder(tmp_path) / "summary.md").read_text()
    [line] = re.findall(r"^\| ddtree \| 8 \| \d.*$", tables, re.MULTILINE)
    cells = line.split(" | ")
    assert len(cells) == 8 and check(tmp_path) == []
    for place in range(2, 8):
        false = [*cells[:place], "9" + cells[place], *cells[place + 1 :]]
        (tmp_path / "summary.md").write_text(tables.replace(line, " | ".join(false)))
        assert [found.split(":")[0] for found in check(tmp_path)] == ["ddtree 8"]


def test_a_row_that_lacks_a_column_hides_no_false_number(tmp_path: Path) -> None:
    check = runpy.run_path(str(ROOT / "bench" / "verify.py"))["differences"]
    raw = measured_folder(tmp_path) / "raw.jsonl"
    first, *others = [json.loads(line) for line in raw.read_text().splitlines()]
    del first["end_to_end_s"]
    raw.write_text("".join(json.dumps(row) + "\n" for row in [first, *others]))
    assert any("end_to_end_s is " in line and "the rows give None" in line for line in check(tmp_path))


def test_rows_of_earlier_versions_pass_and_their_false_numbers_do_not(tmp_path: Path) -> None:
    check = runpy.run_path(str(ROOT / "bench" / "verify.py"))["differences"]
    raw, summary = (measured_folder(tmp_path) / "raw.jsonl"), tmp_path / "summary.json"
    new_columns = ("num_mismatched", "end_to_end_s", "load_s")
    rows = [json.loads(line) for line in raw.read_text().splitlines()]
    old_rows = [{key: value for key, value in row.items() if key not in new_columns} for row in rows]
    cells = [dict(list(cell.items())[:10]) for cell in json.loads(summary.read_text())]
    assert "num_prompts" in cells[0] and "mismatch_rate" not in cells[0]
    summary.write_text(json.dumps(cells))
    assert any("overhead_ms is None" in line for line in check(tmp_path))  # what the rows tell may not be left out
    raw.write_text("".join(json.dumps(row) + "\n" for row in old_rows))
    stage_line = runpy.run_path(str(ROOT / "bench" / "verify.py"))["stage_line"]
    outputs = {(row["prompt_id"], row["method"], row["budget"]): row for row in map(
        json.loads, (tmp_path / "outputs.jsonl").read_text().splitlines()
    )}  # fmt: skip
    arms = dict.fromkeys((cell["method"], cell["budget"]) for cell in cells)
    lines = [" | ".join(["", *map(shown, cell.values()), ""]).strip() for cell in cells]
    lines += [stage_line(arm, old_rows, outputs) for arm in arms]
    (tmp_path / "summary.md").write_text("\n".join(lines) + "\n")
    assert check(tmp_path) == []
    summary.write_text(json.dumps([{**cell, "mat": cell["mat"] + 1} for cell in cells]))
    assert any("mat is" in line for line in check(tmp_path))


def shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def test_medians_of_forward_passes_pass_and_each_false_one_is_named(tmp_path: Path) -> None:
    check = runpy.run_path(str(ROOT / "bench" / "verify.py"))["differences"]
    rows = [
        {"weights": weights, "budget": budget, "draft_ms": 0.01 if budget == 0 else 9.0 + turn, "verify_ms": ms + turn}
        for weights in ("plain", "packed")
        for turn in range(4)
        for budget, ms in ((0, 40.0), (8, 50.0), (64, 90.0))
    ]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    true = runpy.run_path(str(ROOT / "bench" / "forwards.py"))["summary"](rows)
    assert true[0] == {"weights": "plain", "verify_0": 41.5, "verify_8": 51.5, "verify_64": 91.5, "draft": 10.5}

    def found(cells: list[dict]) -> list[str]:
        (tmp_path / "summary.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells))
        return check(tmp_path)

    assert found(true) == []
    for column in list(true[0])[1:]:
        assert found([true[0], {**true[1], column: 1.0}])[0].startswith(f"packed: {column} is 1.0")
        assert found([true[0], {key: true[1][key] for key in true[1] if key != column}])
    assert "one row for each kind" in found(true[:1])[0]
    (tmp_path / "raw.jsonl").write_text('{"model": "m", "ms": 1.0}\n')
    assert "are the only ones known here" in found(true)[0]


ROOFLINE = [
    {"read_gb_s": [20.0, 30.0, 28.0], "gflop_s": [400.0, 380.0, 390.0]},
    {"pass": "verify 0", "weight_bytes": 3e8, "flops": 3e8, "products_ms": [18.0, 17.0], "pass_ms": [36.0, 35.0]},
    {"pass": "draft", "weight_bytes": 3e7, "flops": 2e8, "products_ms": [2.0, 1.5], "pass_ms": [6.0, 5.0]},
]
COMPILED = [
    {"way": way, "rows": rows, "first_s": 0.1 * rows, "max_difference": 0.5, "ms": [30.0 + rows, 31.0, 90.0]}
    for rows in (1, 9)
    for way in ("ours", "transformers", "compiled", "frozen")
]
VOCABULARY = [
    {"prompt_id": prompt, "size": size, "rounds": 7, "tokens": 20, "draft_ms": 40.0, "round_ms": 300.0 - size / 100}
    for prompt in ("a", "b")
    for size in (0, 8192)
]


@pytest.mark.parametrize(
    ("script", "rows"), [("roofline", ROOFLINE), ("compiled", COMPILED), ("draft_vocabulary", VOCABULARY)]
)
def test_the_summary_of_a_part_passes_and_each_false_figure_is_named(
    script: str, rows: list[dict], tmp_path: Path
) -> None:
    check = runpy.run_path(str(ROOT / "bench" / "verify.py"))["differences"]
    summarise_part = runpy.run_path(str(ROOT / "bench" / f"{script}.py"))["summary"]
    true = summarise_part(rows[0], rows[1:]) if script == "roofline" else summarise_part(rows)
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def found(cells: list[dict]) -> list[str]:
        (tmp_path / "summary.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells))
        return check(tmp_path)

    assert found(true) == []
    kind, *columns = true[0]
    for column in columns:
        assert found([*true[:-1], {**true[-1], column: 0.25}])[0].startswith(f"{true[-1][kind]}: {column} is 0.25")
    assert f"one row for each kind of {kind}" in found(true[:-1])[0]


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
