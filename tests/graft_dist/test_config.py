"""TargetConfig: the shipped files load, and what cannot work is refused with the key and what is allowed."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from graft_dist.config import Resources, TargetConfig, is_folder_spec, load_config, targets_folder
from graft_dist.errors import ConfigError
from graft_dist.prompt_source import PromptSource
from graft_dist.retraining import DriftRule, Retraining
from graft_dist.schedule import Schedule

MINIMAL = "target: builtin:smollm2-135m\ndrafter: builtin:smollm2-135m\n"
ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text))
    message = str(caught.value)
    assert "mine.yaml" in message
    assert "\n" not in message
    return message


def test_minimal_file_takes_the_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    assert config == TargetConfig(target="builtin:smollm2-135m", drafter="builtin:smollm2-135m")
    assert (config.dtype, config.device, config.max_length, config.max_slots) == ("auto", "auto", 2048, 8)
    assert (config.num_candidates, config.budget, config.budgets) == (16, 16, (8, 16, 32, 64))
    assert (config.resources.num_cpus, config.resources.num_gpus, config.resources.num_actors) == (1.0, 0.0, 1)
    assert config.system_prompt is None and config.enable_thinking is None and config.threads is None
    assert config.revision is None and config.memory_limit_gb is None and not config.trust_remote_code


def test_every_key_is_read(tmp_path: Path) -> None:
    config = load_config(
        write(
            tmp_path,
            """
            target: Qwen/Qwen3-8B
            revision: main
            drafter: z-lab/Qwen3-8B-DFlash-b16
            drafter_revision: 0123abc
            dtype: float32
            device: cuda
            threads: 4
            trust_remote_code: true
            system_prompt: Be brief.
            enable_thinking: false
            max_length: 4096
            max_slots: 3
            memory_limit_gb: 1.5
            num_candidates: 8
            budget: 0
            budgets: [0, 4]
            resources: {num_cpus: 0.5, num_gpus: 1, num_actors: 2}
            """,
        )
    )
    dumped = config.model_dump(mode="json")
    assert set(dumped) == set(TargetConfig.model_fields)
    assert dumped["drafter_revision"] == "0123abc"
    assert dumped["budgets"] == [0, 4]
    assert dumped["resources"] == {"num_cpus": 0.5, "num_gpus": 1.0, "num_actors": 2}


def test_config_is_frozen() -> None:
    config = TargetConfig(target="gpt2", drafter="./drafter")
    with pytest.raises(ValidationError):
        config.budget = 3  # type: ignore[misc]
    assert config.model_copy(update={"budget": 3}).budget == 3
    assert config.budget == 16


@pytest.mark.parametrize(
    ("name", "target", "drafter"),
    [
        ("smollm2-135m", "builtin:smollm2-135m", "builtin:smollm2-135m"),
        ("qwen3-4b", "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
        ("qwen3-8b", "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
        ("qwen3-coder-30b-a3b", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
    ],
)
def test_shipped_targets(name: str, target: str, drafter: str) -> None:
    config = load_config(targets_folder() / f"{name}.yaml")
    assert (config.target, config.drafter) == (target, drafter)
    assert load_config(name) == config


def test_no_shipped_target_is_untested() -> None:
    assert {path.stem for path in targets_folder().glob("*.yaml")} == {
        "smollm2-135m",
        "qwen3-4b",
        "qwen3-8b",
        "qwen3-coder-30b-a3b",
    }


@pytest.mark.parametrize(
    ("target", "slug"),
    [
        ("builtin:smollm2-135m", "smollm2-135m"),
        ("Qwen/Qwen3-8B", "Qwen--Qwen3-8B"),
        ("gpt2", "gpt2"),
        ("./models/my model", "folder--my-model"),
        ("/srv/models/llama=3/", "folder--llama-3"),
        ("/", "folder--root"),
    ],
)
def test_slug(target: str, slug: str) -> None:
    assert TargetConfig(target=target, drafter="./drafter").slug == slug


def test_folders_are_told_from_hub_ids() -> None:
    assert all(is_folder_spec(spec) for spec in ("/a", "./a", "../a", ".", ".."))
    assert not any(is_folder_spec(spec) for spec in ("a", "a/b", "builtin:smollm2-135m"))


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("bugdet: 8", ["unknown key bugdet", "did you mean budget?"]),
        ("zzz: 8", ["unknown key zzz", "allowed are target, revision, drafter"]),
        ("resources: {num_gpu: 1}", ["unknown key resources.num_gpu", "did you mean num_gpus?"]),
        ("resources: {num_actors: 0}", ["resources.num_actors is 0", "a whole number from 1 to 4096"]),
        ("resources: 3", ["resources is 3", "num_cpus, num_gpus and num_actors"]),
        ("dtype: float16", ["dtype is 'float16'", "auto, float32 or bfloat16"]),
        ("device: mps", ["device is 'mps'", "auto, cpu or cuda"]),
        ("max_slots: 0", ["max_slots is 0", "a whole number from 1 to 1024"]),
        ("max_slots: '8'", ["max_slots is '8'", "a whole number"]),
        ("max_slots: true", ["max_slots is True", "a whole number"]),
        ("max_slots: 2.5", ["max_slots is 2.5", "a whole number"]),
        ("max_slots: null", ["max_slots is None", "a whole number"]),
        ("max_length: 3", ["max_length is 3", "from 16 to 1048576"]),
        ("threads: 0", ["threads is 0", "or null"]),
        ("memory_limit_gb: -1", ["memory_limit_gb is -1", "above 0"]),
        ("memory_limit_gb: .nan", ["memory_limit_gb is nan", "above 0"]),
        ("memory_limit_gb: .inf", ["memory_limit_gb is inf", "above 0"]),
        ("trust_remote_code: 1", ["trust_remote_code is 1", "true or false"]),
        ("enable_thinking: nope", ["enable_thinking is 'nope'", "true, false, or null"]),
        ("system_prompt: 7", ["system_prompt is 7", "a text"]),
        ("num_candidates: 257", ["num_candidates is 257", "from 1 to 256"]),
        ("budget: -1", ["budget is -1", "from 0 to 4096"]),
        ("budgets: []", ["budgets is []", "a list of distinct whole numbers"]),
        ("budgets: 8", ["budgets is 8", "a list of distinct whole numbers"]),
        ("budgets: [8, '16']", ["budgets.1 is '16'", "a list of distinct whole numbers"]),
        ("budgets: [8, -1]", ["budgets.1 is -1", "a list of distinct whole numbers"]),
        ("budgets: [8, 8]", ["budgets is", "a list of distinct whole numbers"]),
        ("budgets: [2048]", ["a budget of 2048 does not fit max_length 2048"]),
        ("budget: 2048", ["a budget of 2048 does not fit max_length 2048"]),
        ("revision: main", ["revision is 'main'", "builtin:smollm2-135m has no revisions"]),
        ("drafter_revision: main", ["drafter_revision is 'main'", "has no revisions"]),
        ("device: cuda", ["device is cuda", "resources.num_gpus is 0"]),
        ("retrain: {}", ["the key retrain.prompts is missing", "a list of sources"]),
        ("retrain: {prompts: [{path: a.jsonl}], marjin: 0}", ["unknown key retrain.marjin", "did you mean margin?"]),
        ("retrain: {prompts: [{path: a.jsonl}], margin: 2}", ["retrain.margin is 2", "a share from 0 to 1"]),
        ("retrain: {prompts: [{path: a.jsonl}], drift: {drop: 2}}", ["retrain.drift.drop is 2", "a share above 0"]),
        ("retrain: {prompts: [{path: a.jsonl}], runs: 's3://bucket/runs'}", ["retrain.runs", "not a URI"]),
        ("retrain: {prompts: [{path: a.jsonl}], explore: [0, 8]}", ["retrain.explore", "two of them at least above 0"]),
        ("retrain: {prompts: [{path: a.jsonl, limit: 0}]}", ["retrain.prompts.0.limit is 0", "from 1 on"]),
        ("retrain: {prompts: [{path: a.jsonl, hub: a/b}]}", ["retrain.prompts.0", "one of path, hub and traffic"]),
        ("schedule: {cron: 0 3 * * *, jitter_s: -1}", ["schedule.jitter_s is -1", "from 0 to 3600"]),
        ("schedule: {cron: 0 3 * * *, on_failure: mail}", ["schedule.on_failure is 'mail'", "a list of words"]),
        ("schedule: {cron: 0 3 * * *, on_failure: []}", ["schedule.on_failure is []", "a list of words"]),
        ("schedule: {cron: 0 3 * * *, on_failure: [mail, 1]}", ["schedule.on_failure.1 is 1", "a list of words"]),
        ("{device: cpu, resources: {num_gpus: 1}}", ["resources.num_gpus is 1", "device is cpu"]),
    ],
)
def test_wrong_values_name_the_key_and_what_is_allowed(tmp_path: Path, line: str, parts: list[str]) -> None:
    if line.startswith("{"):
        text = "{target: 'builtin:smollm2-135m', drafter: 'builtin:smollm2-135m', " + line[1:]
    else:
        text = MINIMAL + line + "\n"
    message = refusal(tmp_path, text)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize("spec", ["builtin:smollm3", "a/b/c", "~/a", "a b", "-x", "", "https://example.org/model"])
@pytest.mark.parametrize("key", ["target", "drafter"])
def test_model_specs_that_mean_nothing(tmp_path: Path, key: str, spec: str) -> None:
    values = {"target": "gpt2", "drafter": "./drafter", key: spec}
    message = refusal(tmp_path, "".join(f"{name}: '{value}'\n" for name, value in values.items()))
    assert f"{key} is {spec!r}" in message
    assert "builtin:smollm2-135m, a Hugging Face id" in message


def test_missing_key(tmp_path: Path) -> None:
    message = refusal(tmp_path, "target: gpt2\n")
    assert "the key drafter is missing" in message
    assert "a Hugging Face id" in message


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + "budget: -1\nmax_slots: 0\n")
    assert "budget is -1" in message and "max_slots is 0" in message


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    assert "the key budget stands twice" in refusal(tmp_path, MINIMAL + "budget: 4\nbudget: 8\n")


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words\n"])
def test_content_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    assert "allowed is a mapping of keys to values" in refusal(tmp_path, text)


@pytest.mark.parametrize("text", ["a: [1", "{a: b}: c\n", "a: !!python/object:os.system x\n"])
def test_broken_yaml(tmp_path: Path, text: str) -> None:
    assert "not valid YAML" in refusal(tmp_path, text)


def test_not_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00target")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)


def test_missing_file_offers_the_shipped_targets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file.*qwen3-8b.*smollm2-135m"):
        load_config(tmp_path / "nothing.yaml")


def test_long_values_are_cut_in_messages(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, MINIMAL + f"dtype: {'x' * 5000}\n")) < 400


def test_every_key_is_documented() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    sections = {"resources": Resources, "retrain": Retraining, "retrain.drift": DriftRule, "schedule": Schedule}
    keys = list(TargetConfig.model_fields)
    keys += [f"{section}.{key}" for section, model in sections.items() for key in model.model_fields]
    keys = [key for key in keys if key not in sections]
    keys += [f"retrain.prompts[].{key}" for key in PromptSource.model_fields if key not in ("revision", "files")]
    assert [key for key in keys if f"| `{key}` |" not in page] == []


def test_documented_example_loads(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    example = page.split("```yaml\n")[1].split("```")[0]
    assert load_config(write(tmp_path, example)).resources.num_actors == 4
