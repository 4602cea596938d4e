"""Prompt sources: every form of file gives the same prompts; mistakes are sentences."""

import json
import shutil
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from graft_dist.errors import PromptError
from graft_dist.prompt_source import PromptSource
from graft_dist.prompts import BadPrompt, Prompt
from jobs.prompt_reader import read_sources

ROWS = [{"question": "What is 2 + 3?", "answer": "5"}, {"question": "What is 7 - 4?", "answer": "3"}]
EXPECTED = [Prompt("sum-0", "math", ("What is 2 + 3?",)), Prompt("sum-1", "math", ("What is 7 - 4?",))]


def source(**changes: Any) -> PromptSource:
    return PromptSource(**{"turns": ["{question}"], "id": "sum-{index}", "task": "math", **changes})


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


class Folder:
    """A folder with the paths of the hub's file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def glob(self, path: str) -> list[str]:
        return [str(found.relative_to(self.root)) for found in self.root.glob(path)]

    def open(self, path: str, mode: str) -> IO[Any]:
        return open(self.root / path, mode)


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_rows_become_prompts_by_templates(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / f"rows.{write.__name__.removeprefix('write_')}", ROWS)
    assert list(read_sources([source(path=path)])) == EXPECTED


def test_a_data_set_of_the_hub_is_read_file_by_file(tmp_path: Path) -> None:
    folder = tmp_path / "datasets" / "openai" / "gsm8k@main" / "main"
    folder.mkdir(parents=True)
    write_parquet(folder / "test-00000-of-00002.parquet", ROWS[:1])
    write_parquet(folder / "test-00001-of-00002.parquet", ROWS[1:])
    shutil.copy(folder / "test-00000-of-00002.parquet", folder / "train-00000-of-00001.parquet")
    wanted = source(hub="openai/gsm8k", files="main/test-*.parquet")
    assert list(read_sources([wanted], Folder(tmp_path))) == EXPECTED
    with pytest.raises(PromptError, match=r"openai/gsm8k at main has no files main/dev-\*"):
        list(read_sources([source(hub="openai/gsm8k", files="main/dev-*")], Folder(tmp_path)))


def test_a_data_set_without_a_pattern_is_read_whole(tmp_path: Path) -> None:
    folder = tmp_path / "datasets" / "openai" / "gsm8k@main"
    (folder / "more").mkdir(parents=True)
    write_parquet(folder / "a.parquet", ROWS[:1])
    write_jsonl(folder / "more" / "b.jsonl", ROWS[1:])
    (folder / "README.md").write_text("no prompts")
    assert list(read_sources([source(hub="openai/gsm8k")], Folder(tmp_path))) == EXPECTED
    (tmp_path / "datasets" / "openai" / "empty@main").mkdir()
    with pytest.raises(PromptError, match=r"openai/empty at main has no files \*\*/\*\.parquet or \*\*/\*\.jsonl"):
        list(read_sources([source(hub="openai/empty")], Folder(tmp_path)))


def test_own_form_patterns_limits_and_double_ids(tmp_path: Path) -> None:
    rows = [{"id": str(number), "task": "chat", "turns": [f"Say {number}."]} for number in range(6)]
    write_jsonl(tmp_path / "a.jsonl", rows[:3])
    write_jsonl(tmp_path / "b.jsonl", rows[3:])
    write_parquet(tmp_path / "all.parquet", rows)
    found = list(read_sources([PromptSource(path=str(tmp_path / "*.jsonl"))]))
    assert found == [Prompt(row["id"], "chat", tuple(row["turns"])) for row in rows]
    both = [PromptSource(path=str(tmp_path / "a.jsonl"), limit=2), PromptSource(path=str(tmp_path / "all.parquet"))]
    assert [prompt.id for prompt in read_sources(both)] == ["0", "1", "2", "3", "4", "5"]


def test_data_sets_that_number_their_rows_alike_lose_none(tmp_path: Path) -> None:
    first, second = (write_jsonl(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", ROWS), ("b", ROWS[::-1])))
    found = list(read_sources([source(path=path, id="{index}") for path in (first, second, first)]))
    questions = [row["question"] for row in (*ROWS, *ROWS[::-1])]
    assert [(prompt.id, prompt.turns) for prompt in found if isinstance(prompt, Prompt)] == [
        (name, (question,)) for name, question in zip(("0", "1", "0'", "1'"), questions, strict=True)
    ]


def test_bad_rows_of_the_own_form_do_not_stop_the_others(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [{"id": "a", "turns": [" "]}, {"id": "b", "turns": ["Hi."]}])
    bad, good = list(read_sources([PromptSource(path=path)]))
    assert isinstance(bad, BadPrompt) and bad.line_number == 1
    assert good == Prompt("b", "other", ("Hi.",))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "there is no prompt file"),
        ('{"question": "a"}\n{', "line 2 of .* is not valid JSON"),
        ("[1]\n", "line 1 of .* is no JSON object"),
        ('{"q": "a"}\n', r"row 0 of .* does not fill the template '\{question\}' .* it has q"),
        ('{"question": " "}\n', "row 0 of .* gives an empty turn"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, text: str | None, complaint: str) -> None:
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PromptError, match=complaint):
        list(read_sources([source(path=str(path))]))


def test_a_file_that_is_no_parquet_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(PromptError, match="is no Parquet file"):
        list(read_sources([source(path=str(tmp_path / "x.parquet"))]))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"path": "a.jsonl", "hub": "a/b", "files": "x"},
        {"path": "a.jsonl", "files": "x"},
        {"path": "a.jsonl", "turns": ["{a"]},
        {"path": "a.jsonl", "turns": ["{a.__class__}"]},
        {"path": "a.jsonl", "turns": []},
        {"path": "a.jsonl", "split": "train"},
        {"hub": "no-owner", "files": "x"},
        {"path": "a.jsonl", "traffic": "/data/store"},
        {"path": "a.jsonl", "days": 3},
        {"traffic": "/data/store", "days": 0},
        {"traffic": "/data/store", "turns": ["{question}"]},
        {"traffic": "/data/store", "files": "x"},
    ],
)
def test_descriptions_that_cannot_work_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PromptSource(**keys)
