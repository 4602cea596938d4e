"""Steps are done once each, in order, whatever interrupts them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graft_dist.errors import GraftError, PromptError
from jobs.run_steps import Ends, Results, Step, StepBrokenOffError, StepFailedError, Stopped, run_steps


class Script:
    """Steps a, b and c that note their calls; `fail` makes one raise."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fail: dict[str, BaseException | Ends] = {}

    def steps(self) -> list[Step]:
        return [Step(name, self._action(name)) for name in "abc"]

    def _action(self, name: str) -> Callable[[Results], Any]:
        def action(results: Results) -> Any:
            self.calls.append((name, dict(results)))
            what = self.fail.get(name)
            if isinstance(what, Ends):
                return what
            if what is not None:
                raise what
            return {"of": name}

        return action

    def run(self, folder: Path, check: Callable[[], None] = lambda: None) -> Results | Ends:
        return run_steps(folder, self.steps(), check=check, say=lambda line: None)


def test_results_travel_and_a_second_run_repeats_nothing(tmp_path: Path) -> None:
    script = Script()
    expected = {name: {"of": name} for name in "abc"}
    assert script.run(tmp_path / "run") == expected
    assert script.calls[-1] == ("c", {"a": {"of": "a"}, "b": {"of": "b"}})
    assert script.run(tmp_path / "run") == expected
    assert [name for name, _ in script.calls] == ["a", "b", "c"]


@pytest.mark.parametrize("where", "abc")
@pytest.mark.parametrize(
    ("what", "message", "exit_code"),
    [
        (KeyboardInterrupt(), "stopped at step {}: it was interrupted", 130),
        (SystemExit(143), "stopped at step {}: it was told to end", 143),
        (Stopped("the collection was cut off", 4), "stopped at step {}: the collection was cut off", 4),
        (OSError("no\nroom"), "failed at step {}: OSError: no room", 1),
    ],
)
def test_a_run_that_is_broken_off_goes_on_in_the_step_it_was_in(
    tmp_path: Path, where: str, what: BaseException, message: str, exit_code: int
) -> None:
    script = Script()
    script.fail[where] = what
    with pytest.raises(StepBrokenOffError) as broken:
        script.run(tmp_path)
    assert (str(broken.value), broken.value.exit_code) == (message.format(where), exit_code)
    script.fail.clear()
    assert script.run(tmp_path) == {name: {"of": name} for name in "abc"}
    assert [name for name, _ in script.calls] == sorted("abc" + where)


def test_a_failure_names_its_step_and_keeps_what_was_done(tmp_path: Path) -> None:
    script = Script()
    script.fail["b"] = PromptError("no prompts")
    with pytest.raises(StepFailedError, match=r"^failed at step b: no prompts$"):
        script.run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["1-a.json"]


def test_a_step_can_end_the_run_for_good(tmp_path: Path) -> None:
    script = Script()
    script.fail["b"] = Ends("nothing new", "all prompts are collected")
    assert script.run(tmp_path) == Ends("nothing new", "all prompts are collected")
    assert script.run(tmp_path) == Ends("nothing new", "all prompts are collected")
    assert [name for name, _ in script.calls] == ["a", "b"]


def test_nothing_is_recorded_once_the_run_must_not_go_on(tmp_path: Path) -> None:
    script, checks = Script(), []

    def check() -> None:
        checks.append(None)
        if len(checks) == 4:  # before and after a, before b, after b
            raise GraftError("the lease is lost")

    with pytest.raises(GraftError, match="the lease is lost"):
        script.run(tmp_path, check)
    assert [path.name for path in tmp_path.iterdir()] == ["1-a.json"]


def test_a_record_that_cannot_be_written_is_said_of_its_step(tmp_path: Path) -> None:
    def lose_the_folder(_: Results) -> Any:
        folder.rename(tmp_path / "elsewhere")

    folder = tmp_path / "run"
    with pytest.raises(StepBrokenOffError, match=r"^failed at step a: FileNotFoundError"):
        run_steps(folder, [Step("a", lose_the_folder)], check=lambda: None, say=lambda line: None)


@pytest.mark.parametrize("text", ["{", "[]", '{"step": "z", "result": 1}', '{"step": "a"}'])
def test_a_damaged_record_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "1-a.json").write_text(text)
    with pytest.raises(GraftError, match=r"1-a\.json"):
        Script().run(tmp_path)
