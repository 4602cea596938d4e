"""Policies of a service: loaded, refused, measured, refined, followed in the registry."""

from __future__ import annotations

import asyncio
import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from graft_dist.budget import AcceptanceGain, UtilityBudget, batch_costs
from graft_dist.cost_curve import CostCurve
from graft_dist.edge_scorer import MarginalScorer
from graft_dist.errors import RegistryError
from graft_dist.hardware import describe_hardware
from graft_dist.policy import DecodingPolicy, GraftPolicy
from graft_dist.target import Target
from serve import service as service_module
from serve.cost_refiner import CostRefiner
from serve.observer import StepReport
from serve.policy_source import PolicySource
from serve.replica import Decoder
from serve.serve_args import PolicyPin, UserConfig
from storage.registry import Registry
from tests.graft_dist.policies import make_policy
from tests.serve.conftest import MODEL, Running, recite

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "recite"}], "temperature": 0}
CURVE = CostCurve((0, 4, 6), (10.0, 12.0, 13.0), "hand")


@pytest.fixture
def running(serve_reciter: Callable[..., Running]) -> Iterator[Running]:
    started = serve_reciter(accuracy=1.0, methods=("plain", "graft"))
    yield started
    started.close()


def saved(target: Target, folder: Path, **changes: Any) -> PolicyPin:
    """A policy for the reciting target and its drafter, without an edge scorer of its own."""
    hardware = describe_hardware("float32", target.device)
    fields = {
        "target_fingerprint": target.fingerprint,
        "drafter_fingerprint": "fake-0",
        "max_budget": 6,
        "cost_curves": {hardware: CURVE},
    }
    return PolicyPin(folder=str(make_policy(None, **(fields | changes)).save(folder)))


def reconfigure(running: Running, pin: PolicyPin | None) -> None:
    asyncio.run(running.service.reconfigure(UserConfig(policy=pin)))


def ask(running: Running, num_tokens: int = 30, **graft: Any) -> Any:
    answer = running.client().chat.completions.create(
        **ASK, max_tokens=num_tokens, extra_body={"graft": {"metrics": True} | graft}
    )
    assert answer.choices[0].message.content == recite(num_tokens)
    return answer.model_dump()


def test_rounds_have_the_threads_that_the_application_gives_them(serve_reciter: Callable[..., Running]) -> None:
    for fields, expected in (({"threads": 2}, 2), ({"num_cpus": 3.0}, 1)):  # the configuration says 1
        started = serve_reciter(**fields)
        try:
            assert asyncio.run(started.service.decode.call(torch.get_num_threads)) == expected
        finally:
            started.close()
    torch.set_num_threads(1)


def test_a_policy_is_made_without_threads_that_rounds_would_have_to_share_processors_with(
    serve_reciter: Callable[..., Running], reciting_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More OpenMP threads than processors sleep between operations: rounds took twice as long."""
    found = []

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            found.append(torch.get_num_threads())
            return work(*arguments)

        return wrapped

    monkeypatch.setattr(PolicySource, "read", noting(PolicySource.read))
    monkeypatch.setattr(PolicySource, "saved", noting(PolicySource.saved))
    started = serve_reciter(threads=2)
    try:
        reconfigure(started, saved(reciting_target, tmp_path / "policy"))
        assert found == [1, 1]
        assert asyncio.run(started.service.decode.call(torch.get_num_threads)) == 2
    finally:
        started.close()
        torch.set_num_threads(1)


def test_a_policy_that_knows_this_hardware_with_the_threads_of_rounds_is_taken_at_its_word(
    serve_reciter: Callable[..., Running], reciting_target: Target, tmp_path: Path
) -> None:
    started = serve_reciter(threads=2)
    try:
        device = reciting_target.device
        hardware = asyncio.run(started.service.decode.call(lambda: describe_hardware("float32", device)))
        assert "2 threads" in hardware
        reconfigure(started, saved(reciting_target, tmp_path / "policy", cost_curves={hardware: CURVE}))
        assert started.service.refusal is None
        assert started.service.decode.active.policy.budget.cost.source == "hand"
    finally:
        started.close()
        torch.set_num_threads(1)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked for what was freed")
def test_what_a_policy_left_in_memory_goes_back_to_the_system(
    running: Running, reciting_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []

    def leave_holes(source: PolicySource, pin: PolicyPin) -> GraftPolicy:
        blocks = [bytearray(b"x" * 60_000) for _ in range(2_000)]  # too small for pages of their own
        kept.append(blocks[-1])  # so that freeing the others does not free the end of the heap
        return GraftPolicy.load(Path(str(pin.folder)))

    def resident_mb() -> float:
        return psutil.Process().memory_info().rss / 1e6

    monkeypatch.setattr(PolicySource, "read", leave_holes)
    trim, before = service_module._return_freed_memory, []
    monkeypatch.setattr(service_module, "_return_freed_memory", lambda: (before.append(resident_mb()), trim()))
    reconfigure(running, saved(reciting_target, tmp_path / "policy"))
    assert running.service.refusal is None
    assert before[0] - resident_mb() > 60  # of 120


def test_a_saved_policy_decodes_and_a_wrong_one_is_refused(
    running: Running, reciting_target: Target, tmp_path: Path
) -> None:
    def methods() -> list[str]:
        return running.client().models.retrieve(MODEL).model_dump()["graft"]["methods"]

    good = saved(reciting_target, tmp_path / "good")
    assert methods() == ["plain"]  # there is nothing learned yet
    reconfigure(running, good)
    assert methods() == ["plain", "graft"]
    answer = ask(running, method="graft")
    fingerprint = running.service.decode.active.fingerprint
    assert answer["metrics"]["graft"]["policy_fingerprint"] == fingerprint
    assert answer["metrics"]["graft"]["acceptance_length"] > 1
    assert answer["system_fingerprint"].endswith(f"folder-{fingerprint[:8]}")
    other = ask(running, method="plain")["metrics"]["graft"]  # the policy had no part in it
    assert (other["mean_budget"], other["policy_fingerprint"], other["policy_version"]) == (0.0, None, None)

    for wrong in (
        saved(reciting_target, tmp_path / "target", target_fingerprint="f" * 64),
        saved(reciting_target, tmp_path / "drafter", drafter_fingerprint="another"),
        PolicyPin(folder=str(tmp_path / "nowhere")),
        PolicyPin(folder="builtin:nobody"),
    ):
        reconfigure(running, wrong)
        health = running.service.health()
        assert health["policy"]["fingerprint"] == fingerprint and health["status"] == "ok"
        assert health["refused_policy"]["policy"] == wrong.folder and health["refused_policy"]["reason"]
        assert health["system_fingerprint"].endswith("+refused")
        assert running.reports.policies[-1] == (f"folder-{fingerprint[:8]}", health["refused_policy"]["reason"])
    assert ask(running)["metrics"]["graft"]["policy_fingerprint"] == fingerprint

    reconfigure(running, good)
    assert running.service.health()["refused_policy"] is None
    assert running.reports.policies[-1] == (f"folder-{fingerprint[:8]}", None)


def test_costs_and_gains_are_measured_before_the_first_request_and_never_again(
    running: Running, reciting_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that knows its costs comes first: those that need the measured ones later must not hold up a stream."""
    reconfigure(running, saved(reciting_target, tmp_path / "knowing"))

    def measuring(*arguments: Any) -> Any:
        raise AssertionError("measured while requests run")

    monkeypatch.setattr(service_module, "probe", measuring)
    stream = running.client().chat.completions.create(**ASK, max_tokens=200, stream=True)
    text = next(stream).choices[0].delta.content or ""
    stranger = saved(reciting_target, tmp_path / "stranger", cost_curves={"another box": CURVE})
    for pin, label in ((stranger, "folder"), (None, "ddtree")):
        reconfigure(running, pin)
        active = running.service.decode.active
        assert active.label.startswith(label) and running.service.refusal is None
        assert isinstance(active.policy.budget, UtilityBudget)
        assert active.policy.budget.cost.source.startswith("measured before decoding")
    text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == recite(200)
    ask(running)


def test_a_probe_that_fails_leaves_a_server_that_works(
    running: Running, reciting_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> Any:
        raise MemoryError("no room\nfor a second engine")

    monkeypatch.setattr(service_module, "probe", failing)
    reconfigure(running, None)
    health = running.service.health()
    assert (health["policy"]["label"], health["status"]) == ("plain", "degraded")
    assert health["unmeasured"] == "no room for a second engine" and "measured" in health["problem"]
    ask(running)

    # One that would need the measured costs is refused; one that knows its own decodes as ever.
    stranger = saved(reciting_target, tmp_path / "stranger", cost_curves={"another box": CURVE})
    reconfigure(running, stranger)
    assert running.service.refusal is not None and running.service.decode.active.label == "plain"
    ask(running)
    reconfigure(running, saved(reciting_target, tmp_path / "knowing"))
    health = running.service.health()
    assert health["policy"]["label"].startswith("folder-") and health["status"] == "ok"
    assert health["unmeasured"] == "no room for a second engine"
    assert ask(running)["metrics"]["graft"]["acceptance_length"] > 1


def test_a_device_that_fails_while_it_is_measured_ends_the_replica(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(service_module, "probe", failing)
    with pytest.raises(RuntimeError, match="CUDA error"):
        reconfigure(running, None)


def test_a_first_policy_that_does_not_fit_leaves_a_server_that_works(
    running: Running, reciting_target: Target, tmp_path: Path
) -> None:
    reconfigure(running, saved(reciting_target, tmp_path / "wrong", target_fingerprint="f" * 64))
    health = running.service.health()
    assert health["policy"]["label"] == "ddtree" and health["refused_policy"] is not None
    ask(running)


def test_whatever_goes_wrong_with_a_policy_the_old_one_decodes(
    running: Running, reciting_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = object.__new__(Decoder)
    replica._service = running.service
    unreadable = {"policy": {"fodler": "x"}}
    with pytest.raises(ValueError, match="fodler"):  # nothing is in force yet: the application shall not start
        asyncio.run(replica.reconfigure(unreadable))
    good = saved(reciting_target, tmp_path / "good")
    reconfigure(running, good)
    label = running.service.decode.active.label

    asyncio.run(replica.reconfigure(unreadable))
    refused = running.service.health()["refused_policy"]
    assert refused["policy"] == "user_config" and "fodler" in refused["reason"]

    def failing(pin: PolicyPin) -> Any:
        raise RuntimeError("no answer from http://me:secret@registry:5000 in time")

    monkeypatch.setattr(running.service._source, "read", failing)
    reconfigure(running, good)
    reason = "no answer from http://registry:5000 in time"
    assert running.service.health()["refused_policy"] == {"policy": good.folder, "reason": reason}
    assert running.service.decode.active.label == label
    ask(running)
    del replica._service  # its end is not the service's


@pytest.fixture
def num_asked(running: Running, monkeypatch: pytest.MonkeyPatch) -> Counter[str | None]:
    """How often each policy was asked for; the one named `away` can be had at the third time."""
    counts: Counter[str | None] = Counter()
    read = running.service._source.read

    def counting(pin: PolicyPin) -> Any:
        counts[pin.folder] += 1
        if str(pin.folder).endswith("away") and counts[pin.folder] < 3:
            raise RegistryError("the registry is away")
        return read(pin)

    monkeypatch.setattr(running.service._source, "read", counting)
    monkeypatch.setattr(service_module, "_RETRY_S", 0.0)
    return counts


def test_a_policy_that_cannot_be_had_is_asked_for_again(
    running: Running, reciting_target: Target, tmp_path: Path, num_asked: Counter[str | None]
) -> None:
    away = saved(reciting_target, tmp_path / "away")

    async def run() -> None:
        await running.service.reconfigure(UserConfig(policy=away))
        assert running.service.health()["refused_policy"]["reason"] == "the registry is away"
        async with asyncio.timeout(30):
            while running.service.refusal is not None:
                await asyncio.sleep(0.001)

    asyncio.run(run())
    label = f"folder-{running.service.decode.active.fingerprint[:8]}"
    assert running.reports.policies == [("ddtree", "the registry is away"), (label, None)]  # each thing is said once
    assert num_asked == {away.folder: 3}


def test_a_registry_that_takes_the_call_and_is_silent_holds_nothing_up(
    running: Running, reciting_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, good = saved(reciting_target, tmp_path / "silent"), saved(reciting_target, tmp_path / "good", max_budget=4)
    answers, num_asked, read = threading.Event(), Counter[str | None](), running.service._source.read

    def reading(pin: PolicyPin) -> Any:
        num_asked[pin.folder] += 1
        assert pin.folder != silent.folder or answers.wait(60)
        return read(pin)

    monkeypatch.setattr(running.service._source, "read", reading)
    monkeypatch.setattr(service_module, "_LOADING_S", 0.05)
    monkeypatch.setattr(service_module, "_RETRY_S", 0.0)

    async def run() -> None:
        reconfigure = running.service.reconfigure
        await reconfigure(UserConfig(policy=silent))  # comes back, although nobody has answered
        assert running.service.health()["refused_policy"]["reason"].startswith("it was not there within 0.05 s")
        await reconfigure(UserConfig(policy=good))  # another one does not wait for it
        assert running.service.refusal is None
        await reconfigure(UserConfig(policy=silent))
        answers.set()
        async with asyncio.timeout(30):
            while running.service.refusal is not None:
                await asyncio.sleep(0.001)

    asyncio.run(run())
    fingerprint = GraftPolicy.load(tmp_path / "silent").fingerprint
    assert running.service.decode.active.fingerprint == fingerprint
    assert num_asked == {silent.folder: 2, good.folder: 1}  # however often it was looked for while it was fetched


def test_a_folder_that_is_not_there_yet_is_looked_at_again(
    running: Running, reciting_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one on a volume that is mounted after the replica has started."""
    pin = saved(reciting_target, tmp_path / "late")
    (tmp_path / "late").rename(tmp_path / "elsewhere")
    monkeypatch.setattr(service_module, "_RETRY_S", 0.0)

    async def run() -> None:
        await running.service.reconfigure(UserConfig(policy=pin))
        assert "holds no policy.json" in running.service.health()["refused_policy"]["reason"]
        (tmp_path / "elsewhere").rename(tmp_path / "late")
        async with asyncio.timeout(30):
            while running.service.refusal is not None:
                await asyncio.sleep(0.001)

    asyncio.run(run())
    assert running.service.decode.active.fingerprint is not None


def test_asking_goes_on_when_a_swap_fails(
    running: Running,
    reciting_target: Target,
    tmp_path: Path,
    num_asked: Counter[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it does while the round loop has not come round for too long."""
    away, swap = saved(reciting_target, tmp_path / "away"), running.service.decode.swap
    failures = [RuntimeError("the decode thread is stuck"), RuntimeError("the decode thread is stuck")]

    async def failing(active: Any) -> None:
        if active.fingerprint is not None and failures:
            raise failures.pop()
        await swap(active)

    async def run() -> None:
        await running.service.reconfigure(UserConfig(policy=away))
        monkeypatch.setattr(running.service.decode, "swap", failing)
        async with asyncio.timeout(30):
            while running.service.refusal is not None:
                await asyncio.sleep(0.001)

    asyncio.run(run())
    assert not failures and num_asked == {away.folder: 5}


def test_another_policy_ends_the_asking(
    running: Running, reciting_target: Target, tmp_path: Path, num_asked: Counter[str | None]
) -> None:
    away, good = saved(reciting_target, tmp_path / "away"), saved(reciting_target, tmp_path / "good", max_budget=4)
    wrong = saved(reciting_target, tmp_path / "wrong", target_fingerprint="f" * 64)

    async def run() -> None:
        wanted = [UserConfig(policy=pin) for pin in (away, good)]
        await asyncio.gather(*(running.service.reconfigure(each) for each in wanted))  # in turn, one right on the other
        await running.service.reconfigure(UserConfig(policy=wrong))
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert num_asked == {away.folder: 1, good.folder: 1, wrong.folder: 1}  # one that does not fit never will
    assert [refused is None for _, refused in running.reports.policies] == [False, True, False]


def test_an_observer_of_requests_that_fails_harms_no_request(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(report: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(running.reports, "requested", failing)
    ask(running)
    ask(running)


def test_the_registrys_champion_is_followed(running: Running, reciting_target: Target, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    registry, service = Registry(uri), running.service
    slug = service.config.slug
    numbers = []
    for mat in (2.0, 3.0):
        pin = saved(reciting_target, tmp_path / f"policy-{mat}", metrics={"mat": mat})
        numbers.append(registry.register(Path(str(pin.folder)), slug, {"mat": mat}))
    asyncio.run(service.look_for_champion(uri))
    assert service.decode.active.version is None  # there is no champion yet
    assert service.health()["champion_problem"] == f"the registry has no champion of {slug} yet"
    registry.promote(slug, numbers[0])
    asyncio.run(service.look_for_champion(uri))
    assert service.health()["champion_problem"] is None
    assert (service.decode.active.version, service.decode.active.label) == (numbers[0], f"v{numbers[0]}")
    assert ask(running)["metrics"]["graft"]["policy_version"] == numbers[0]
    registry.promote(slug, numbers[1])
    asyncio.run(service.look_for_champion(uri))
    assert service.decode.active.version == numbers[1]

    wrong = saved(reciting_target, tmp_path / "wrong", target_fingerprint="f" * 64)
    registry.promote(slug, registry.register(Path(str(wrong.folder)), slug, {"mat": 4.0}))
    asyncio.run(service.look_for_champion(uri))
    assert service.refusal is not None and service.decode.active.version == numbers[1]
    registry.rollback(slug)
    asyncio.run(service.look_for_champion(uri))
    assert service.refusal is None and running.reports.policies[-1] == (f"v{numbers[1]}", None)


def test_looking_for_the_champion_goes_on_when_it_fails(
    serve_reciter: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    async def look(uri: str) -> None:
        looks.append(uri)
        raise RuntimeError("the decode thread is stuck")

    async def following() -> None:
        await running.service.reconfigure(UserConfig())
        running.service.follow_champion()
        async with asyncio.timeout(30):
            while len(looks) < 3:
                await asyncio.sleep(0.001)

    monkeypatch.setattr(service_module.random, "uniform", lambda low, high: 0.0)
    running = serve_reciter(poll_champion={"tracking_uri": "http://nobody:5000"})
    monkeypatch.setattr(running.service, "look_for_champion", look)
    try:
        asyncio.run(following())
    finally:
        running.close()


def test_without_a_champion_a_server_starts_and_says_so_once(
    serve_reciter: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a replica starts that is told to follow a registry, which is away at first and then has no champion."""
    answers: list[OSError | None] = [OSError("no route"), OSError("no route"), None, None]
    problems: list[str | None] = []

    def asked(uri: str, slug: str) -> None:
        problems.append(running.service.health()["champion_problem"])
        answer = answers.pop(0) if answers else None
        if answer is not None:
            raise answer

    async def starting() -> None:
        await running.service.reconfigure(UserConfig())
        running.service.follow_champion()
        async with asyncio.timeout(60):
            while len(problems) < 5:
                await asyncio.sleep(0.001)

    said: list[str] = []
    monkeypatch.setattr(service_module, "registered_champion", asked)
    monkeypatch.setattr(service_module.logger, "warning", lambda text, *words, **_: said.append(text % words))
    monkeypatch.setattr(service_module.random, "uniform", lambda low, high: 0.0)
    running = serve_reciter(poll_champion={"tracking_uri": "http://nobody:5000"})
    try:
        asyncio.run(starting())
        ask(running)
        away = "the registry does not say who is champion: no route"
        none = f"the registry has no champion of {running.service.config.slug} yet"
        assert problems[:5] == [None, away, away, none, none]
        assert said == [f"{away}; ddtree stays", f"{none}; ddtree stays"]
        assert (running.service.health()["status"], running.service.decode.active.label) == ("ok", "ddtree")
    finally:
        running.close()


# ---- costs while running


def rounds(num_rounds: int, round_ms: float, *budgets: int) -> Iterator[StepReport]:
    """Reports of rounds that took `round_ms`, of as many sequences as budgets."""

    ns, rows = int(round_ms * 1e6), sum(budgets) + len(budgets)
    draft_ns = ns // 4 if any(budgets) else 0
    fields = {"draft_ns": draft_ns, "build_ns": 0, "verify_ns": ns - draft_ns, "commit_ns": 0}
    fields |= {"batch_rows": rows, "batch_size": len(budgets)}
    for _ in range(num_rounds):
        yield StepReport(
            events=[SimpleNamespace(trace=SimpleNamespace(budget=budget, **fields)) for budget in budgets],
            num_live=len(budgets),
            num_waiting=0,
            step_s=0.0,
            policy_label="x",
            active=None,
        )  # type: ignore[list-item, arg-type]


def test_costs_follow_what_rounds_take() -> None:
    policy = DecodingPolicy("x", MarginalScorer(), UtilityBudget(AcceptanceGain(), CURVE, 6), 4)
    refiner = CostRefiner(lambda: policy)
    for report in [*rounds(128, 20.0, 0), *rounds(128, 24.0, 4)]:
        refiner.stepped(report)
    assert isinstance(policy.budget, UtilityBudget) and refiner.num_refined == 1
    assert policy.budget.cost.round_ms == pytest.approx((20.0, 24.0, 26.0))  # the unseen point moved along
    for report in rounds(256, 18.0, 1, 0):  # two sequences of two rows, one of them padding
        refiner.stepped(report)
    assert policy.budget.cost.round_ms[1] == pytest.approx(18.0)
    assert list(policy.budget.cost.round_ms) == sorted(policy.budget.cost.round_ms)
    assert policy.budget.cost.source == "hand, refined while running"


def test_the_context_is_not_paid_for_twice() -> None:
    cost = replace(CURVE, token_ms=0.5)
    policy = DecodingPolicy("x", MarginalScorer(), UtilityBudget(AcceptanceGain(), cost, 6), 4)
    assert isinstance(policy.budget, UtilityBudget)
    refiner = CostRefiner(lambda: policy)
    for report in rounds(256, 60.0, 0):
        refiner.stepped(report)
    assert policy.budget.cost.token_ms == 0.0 and policy.budget.cost.round_ms[0] == pytest.approx(60.0)


def test_batches_are_points_of_their_own() -> None:
    policy = DecodingPolicy("x", MarginalScorer(), UtilityBudget(AcceptanceGain(), CURVE, 6), 4)
    assert isinstance(policy.budget, UtilityBudget)
    refiner = CostRefiner(lambda: policy)
    alone = CURVE.table(6)
    plain_ms, drafted_ms = batch_costs(CURVE, 8, 6)
    for report in [*rounds(64, 2 * drafted_ms[3], *[3] * 8), *rounds(192, 1.5 * plain_ms, *[0] * 8)]:
        refiner.stepped(report)
    assert refiner.num_refined == 1
    refined = policy.budget.cost
    assert refined.budgets == (0, 4, 6, 12, 24, 48)  # 8 sequences of 4 rows are 31 nodes
    now_plain, now_drafted = batch_costs(refined, 8, 6)
    assert now_drafted[3] / drafted_ms[3] > 1.6 and 1.2 < now_plain / plain_ms < 1.7
    assert refined.table(6)[1] < 1.7 * alone[1]  # one sequence's costs moved by what all did, not by twice


def test_policies_that_weigh_no_costs_are_left_alone() -> None:
    from graft_dist.policy import ddtree

    refiner = CostRefiner(lambda: ddtree(6, 4))
    for report in rounds(300, 18.0, 4):
        refiner.stepped(report)
    assert refiner.num_refined == 0
