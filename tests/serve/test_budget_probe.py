"""What a replica decodes to learn what rounds cost and bring."""

from __future__ import annotations

from graft_dist.prompts import Prompt, read_prompts, starter_prompts_path
from serve.budget_probe import probe_prompts


def test_all_tasks_take_turns() -> None:
    prompts = [prompt for prompt in read_prompts(starter_prompts_path()) if isinstance(prompt, Prompt)]
    tasks = {prompt.task for prompt in prompts}
    assert len(tasks) == 3
    chosen = probe_prompts()
    assert len(chosen) == len({prompt.id for prompt in chosen}) == 8
    for first in range(len(chosen) - len(tasks) + 1):  # a slow machine does not come to the last ones
        assert {prompt.task for prompt in chosen[first : first + len(tasks)]} == tasks
