"""Prompts: read from JSONL files, rendered with the target's chat template, split once and for all by their hash.

A prompt file has one JSON object a line: `{"id": "mine-001", "task": "chat", "turns": ["Name three colours."]}`, where
`turns` are the user's messages in order. `task` groups results and is "other" where it is left out; further keys are
ignored. A line that is no such object becomes a `BadPrompt` in its place, so that one of them never stops a job.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from graft_dist.errors import PromptError

HELD_OUT_FRACTION = 0.2

LearningSplit = Literal["fit", "tune", "test"]
"""What a prompt's rounds are for when a policy is learned: fitting it, choosing among variants, judging the choice."""

TUNE_FRACTION, TEST_FRACTION = 0.15, 0.2


@dataclass(frozen=True)
class Prompt:
    """One prompt: its id (unique in a run), the task it is counted under, and the user's messages in order."""

    id: str
    task: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class BadPrompt:
    """A line that holds no usable prompt.

    id: `<file name>:<line number>`, since the line's own id may be missing, broken or taken; never equal to another id.
    line_number: counted from 1.
    error: one sentence that says why.
    """

    id: str
    line_number: int
    error: str


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that `render` needs."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any: ...


def starter_prompts_path() -> Path:
    """The file with the 60 prompts that ship with the package (20 each of code, math and chat)."""
    return Path(__file__).resolve().parent / "data" / "starter_prompts.jsonl"


def read_prompts(source: str | Path | Iterable[str | Path]) -> list[Prompt | BadPrompt]:
    """Read one JSONL file or several, in order; empty lines are skipped.

    A bad line, or an id that an earlier line has, gives a `BadPrompt` and no exception. Raises `PromptError` when a
    file cannot be read at all.
    """
    paths = [source] if isinstance(source, str | Path) else list(source)
    found: list[Prompt | BadPrompt] = []
    seen: dict[str, str] = {}  # id -> where it stands
    for path in paths:
        for line_number, line in enumerate(_read_lines(Path(path)), start=1):
            if not line.strip():
                continue
            where = f"{Path(path).name}:{line_number}"
            item: Prompt | BadPrompt | str = _parse_line(line)
            if isinstance(item, Prompt) and item.id in seen:
                item = f"the id {item.id!r} is already taken by {seen[item.id]}"
            if isinstance(item, str):
                item = BadPrompt(_free_id(where, seen), line_number, item)
            seen[item.id] = where
            found.append(item)
    return found


def render(
    tokenizer: ChatTokenizer,
    prompt: Prompt,
    system_prompt: str | None = None,
    enable_thinking: bool | None = None,
) -> list[int]:
    """The token ids that the target continues: the chat template over the turns, ending where the answer begins.

    Several turns stand one after the other as user messages, since the answers between them are not known.
    `enable_thinking` is handed to the template only when it is given. Raises `PromptError` when the template refuses.
    """
    messages = [{"role": "user", "content": turn} for turn in prompt.turns]
    return render_messages(tokenizer, messages, system_prompt, enable_thinking, what=f"prompt {prompt.id!r}")


def render_messages(
    tokenizer: ChatTokenizer,
    messages: list[dict[str, str]],
    system_prompt: str | None = None,
    enable_thinking: bool | None = None,
    what: str = "the conversation",
) -> list[int]:
    """The token ids that the target continues after `messages`, which have a role and a content each.

    They have no system message: that is `system_prompt`. Raises `PromptError`, which calls them `what`, when the
    template refuses.
    """
    if system_prompt is not None:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    options: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    try:
        ids = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False, **options
        )
    except Exception as error:  # templates raise jinja2's errors, tokenizers their own: all mean the same here
        raise PromptError(f"the chat template cannot render {what} ({' '.join(str(error).split())})") from error
    return [int(token_id) for token_id in ids]


def prompt_hash(turns: Sequence[str]) -> str:
    """The SHA-256 of the turns as a JSON list, in hexadecimal: a prompt's identity whatever its id or file."""
    return hashlib.sha256(json.dumps(list(turns), ensure_ascii=False).encode("utf-8")).hexdigest()


def split_fraction(turns: Sequence[str]) -> float:
    """A number in [0, 1) that depends on the turns alone, so that a split stays put as prompts are added."""
    return int.from_bytes(bytes.fromhex(prompt_hash(turns))[:8], "big") / 2**64


def is_held_out(turns: Sequence[str]) -> bool:
    """Whether the prompt belongs to the fifth that no drafter is ever trained on."""
    return split_fraction(turns) < HELD_OUT_FRACTION


def learning_split(turns: Sequence[str]) -> LearningSplit:
    """The part of policy learning that a prompt belongs to; it stays put as prompts are added.

    Independent of `is_held_out`, which looks at another part of the same hash.
    """
    fraction = int.from_bytes(bytes.fromhex(prompt_hash(turns))[8:16], "big") / 2**64
    if fraction < TEST_FRACTION:
        return "test"
    return "tune" if fraction < TEST_FRACTION + TUNE_FRACTION else "fit"


def _read_lines(path: Path) -> list[bytes]:
    # As bytes: one line in another encoding must not hide the others. bytes.splitlines splits at CR and LF only.
    try:
        return path.expanduser().read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise PromptError(f"the prompt file {path} cannot be read ({error.strerror or error})") from error


def _parse_line(line: bytes) -> Prompt | str:
    """The prompt on a line, or the sentence that says why there is none."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "the line is not UTF-8 text"
    except (ValueError, RecursionError) as error:
        return f"the line is not valid JSON ({error})"
    if not isinstance(record, dict):
        return f"the line holds {_shown(record)}, allowed is an object with id, task and turns"
    task = record.get("task", "other")
    for key, value in (("id", record.get("id")), ("task", task)):
        if not _is_text(value):
            return f"{key} is {_shown(value)}, allowed is a text that is not empty"
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns:
        return f"turns is {_shown(turns)}, allowed is a list of at least one text"
    for turn in turns:
        if not _is_text(turn):
            return f"a turn is {_shown(turn)}, allowed is a text that is not empty"
    return Prompt(record["id"], task, tuple(turns))


def _is_text(value: object) -> bool:
    """A string with something in it that can be written as UTF-8; JSON also allows halves of surrogate pairs."""
    if not isinstance(value, str) or not value.strip():
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _free_id(where: str, seen: dict[str, str]) -> str:
    free = where
    while free in seen:
        free += "'"
    return free


def _shown(value: object) -> str:
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
