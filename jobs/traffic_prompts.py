"""What users asked, as prompts: read out of the recorded traffic of a trajectory store.

A store keeps token ids, so the words are read back and checked (`graft_dist.prompt_text`). Left out are requests that
failed, and those that cannot be read back: with another system prompt or tokenizer than the configuration's, say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from graft_dist.config import TargetConfig
from graft_dist.prompt_source import PromptSource
from graft_dist.prompt_text import PromptReader
from graft_dist.prompts import Prompt, prompt_hash
from graft_dist.target import read_tokenizer
from storage import connect
from storage.learning_rounds import asked_prompts

_MEMORY = "1GB"  # of DuckDB
_DAY_S = 86_400.0


class TrafficPrompts:
    """Reads the sources of one target; the tokenizer is loaded when there is something to read."""

    def __init__(self, config: TargetConfig) -> None:
        self._config = config

    def read(self, source: PromptSource) -> Iterator[Prompt]:
        """Every different prompt once, the one asked last first; none from a store that is not there yet.

        Raises:
            GraftError: the store cannot be read, or the target's chat template not read backwards.
        """
        assert source.traffic is not None
        since = 0.0 if source.days is None else time.time() - source.days * _DAY_S
        reader: PromptReader | None = None
        with closing(connect(source.traffic, memory_limit=_MEMORY)) as connection:
            for token_ids in asked_prompts(connection, self._config.slug, "traffic", since):
                reader = reader or self._reader()
                turns = reader.turns(token_ids)
                if turns is not None and all(turn.strip() for turn in turns):
                    yield Prompt(f"traffic-{prompt_hash(turns)[:16]}", source.task, turns)

    def _reader(self) -> PromptReader:
        config = self._config
        where: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
        return PromptReader(read_tokenizer(config.target, **where), config.system_prompt, config.enable_thinking)
