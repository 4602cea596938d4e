"""`Service`: one target with its drafter, decoded on a thread, and the policy that is in force. What a replica holds.

Knows neither HTTP nor Ray: `http_app.py` puts routes in front of it, `replica.py` gives it to Ray Serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import json
import logging
import random
import re
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import torch

from graft_dist import __version__
from graft_dist.config import TargetConfig, is_folder_spec
from graft_dist.decoder import load_decoder, new_engine
from graft_dist.drafter import DFlashDrafter
from graft_dist.engine import Engine
from graft_dist.errors import GraftError, PolicyError, PolicyUnreadableError, is_device_failure
from graft_dist.hardware import describe_hardware
from graft_dist.policy import plain
from graft_dist.software import describe_software
from graft_dist.target import Target
from serve import errors
from serve.active_policy import ActivePolicy
from serve.answer import TokenTexts
from serve.budget_probe import Probe, measured_policy, probe
from serve.cost_refiner import CostRefiner
from serve.decode_thread import DecodeThread
from serve.errors import ApiError
from serve.observer import DecodeObserver, RequestObserver, RequestReport
from serve.policy_source import PolicySource, registered_champion
from serve.round_view import Pieces, RoundViewer
from serve.serve_args import AliasPolling, PolicyPin, RegistryPin, ServeArgs, TrafficRecording, UserConfig
from serve.text_bound import text_bound
from serve.traffic_recorder import TrafficRecorder
from storage import Provenance

_RETRY_S = 30.0  # after which a policy is asked for again that could not be had
_LOADING_S = 20.0  # that a policy may take to be there: Serve sends a replica nothing while its policy is changed

Loaded = TypeVar("Loaded")

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Refusal:
    """A policy that was asked for and is not in force."""

    name: str  # as people know it; "user_config" where that cannot be read
    reason: str  # one line
    version: int | None = None  # in the registry


class Service:
    """Loads the models and starts decoding; blocks while it does. `reconfigure` then sets the policy.

    Args:
        args: the application's arguments.
        config: the target's configuration, read where the application was built.
        observers: watch the decode thread.
        request_observers: watch requests and policies.
    """

    def __init__(
        self,
        args: ServeArgs,
        config: TargetConfig,
        observers: Sequence[DecodeObserver] = (),
        request_observers: Sequence[RequestObserver] = (),
    ) -> None:
        self.args = args
        self.config = config
        self.model = args.model or _model_name(config)
        self.created = int(time.time())
        self.refusal: Refusal | None = None
        self._request_observers = list(request_observers)
        self._probe: Probe | None = None
        self._unmeasured: str | None = None  # why nothing could be measured, in one line
        self._has_policy = False
        self._reconfiguring = asyncio.Lock()
        self.decode = DecodeThread(
            self._make_engine,
            max_queue=args.max_queue,
            stuck_after_s=args.stuck_after_s,
            retry_after_s=args.retry_after_s,
            observers=observers,
        )
        self.target: Target
        self.drafter: DFlashDrafter
        self.max_length: int
        self._source: PolicySource
        self.decode.start()
        # An own copy, used by one thread: tokenizers are not made for several threads at once.
        self._tokenizer = copy.deepcopy(self.target.tokenizer)
        self._bound = text_bound(self._tokenizer)
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="graft-tokenize")
        self.token_texts = TokenTexts(copy.deepcopy(self.target.tokenizer))
        self._pieces = Pieces(copy.deepcopy(self.target.tokenizer))  # the event loop's
        self.refiner = CostRefiner(lambda: self.decode.active.policy)
        self.decode.observe(self.refiner)
        self._poller: asyncio.Task[None] | None = None
        self._champion_problem: str | None = None  # why there is no champion to follow, in one line
        self._retrier: asyncio.Task[None] | None = None
        self._loading: tuple[PolicyPin, asyncio.Task[ActivePolicy]] | None = None  # what is still being fetched
        self._recorder: TrafficRecorder | None = None
        if args.record_traffic is not None:
            self._recorder = self._make_recorder(args.record_traffic)
            self.decode.observe(self._recorder)

    def _make_engine(self) -> tuple[Engine, ActivePolicy]:
        """On the decode thread: load target and drafter."""
        threads = self.args.threads or self.config.threads or self.args.num_cpus or self.config.resources.num_cpus
        torch.set_num_threads(max(1, int(threads)))
        self.target, drafter = load_decoder(self.config)
        assert drafter is not None
        if self.target.tokenizer is None:
            raise GraftError(f"{self.config.target} has no tokenizer, so there is no text to serve")
        self.drafter = drafter
        engine = new_engine(self.config, self.target, drafter, plain(), max_slots=self.args.max_slots)
        self.max_length = engine.max_length
        # Here, for it counts the threads of the one who asks: only this one has those that rounds have.
        self._hardware = describe_hardware(self.target.dtype_name, self.target.device)
        max_budget = None if self.config.memory_limit_gb is None else max(self.config.budget, *self.config.budgets)
        self._source = PolicySource(self.config, self.target, drafter, self.args.methods, max_budget)
        return engine, self._source.unsaved(plain())

    def _make_recorder(self, settings: TrafficRecording) -> TrafficRecorder:
        made_by = Provenance(
            target=self.config.slug,
            target_spec=self.config.target,
            target_fingerprint=self.target.fingerprint,
            drafter_fingerprint=self.drafter.fingerprint,
            policy="",  # each unit's own
            policy_fingerprint=None,
            hardware=self._hardware,
            software=describe_software(),
        )
        logger.info("%g of the requests are recorded in %s", settings.share, settings.store)
        return TrafficRecorder(settings, made_by, self.target.tokenizer_sha256, self._tell_traffic)

    def _tell_traffic(self, outcome: str, number: int) -> None:
        self._tell("traffic", outcome, number)

    def _tell(self, what: Literal["requested", "policy_changed", "traffic"], *report: Any) -> None:
        for observer in list(self._request_observers):
            try:
                getattr(observer, what)(*report)
            except Exception:
                logger.exception("%s failed and is switched off", type(observer).__name__)
                if observer in self._request_observers:
                    self._request_observers.remove(observer)

    # ---- texts and tokens

    async def render(self, messages: list[dict[str, str]]) -> list[int]:
        """The token ids of a conversation in the target's chat template.

        Raises ValueError where the template refuses, and `ApiError` for a text that is surely too long.
        """
        if self.config.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        thinking = self.config.enable_thinking
        options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}

        def work() -> list[int]:
            try:
                text = self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **options
                )
                self._refuse_long(text, "messages")
                return list(self._tokenizer.encode(text, add_special_tokens=False))  # the template has brought them
            except ApiError:
                raise
            except Exception as error:  # templates raise jinja2's errors, tokenizers their own
                raise ValueError(
                    f"the chat template refuses these messages ({' '.join(str(error).split())})"
                ) from error

        return await self._tokenize(work)

    async def encode(self, text: str) -> list[int]:
        """The token ids of a plain text. Raises `ApiError` for one that is surely too long."""
        self._refuse_long(text, "prompt")
        return await self._tokenize(lambda: list(self._tokenizer.encode(text)))

    def _refuse_long(self, text: str, param: str) -> None:
        """Refuse what has too many tokens however it is cut into them: tokenizing it, others would wait for it."""
        if self._bound is not None:
            errors.check_prompt_length(self._bound.least_tokens(text), self.max_length, param, "at least ")

    async def decode_text(self, token_ids: list[int]) -> str:
        """The text of token ids of the vocabulary, as an answer would show it."""
        return await self._tokenize(lambda: str(self._tokenizer.decode(token_ids, skip_special_tokens=True)))

    def new_viewer(self, stop: Sequence[str]) -> RoundViewer:
        """A viewer of one answer's rounds, for the event loop."""
        return RoundViewer(self._pieces, stop)

    async def _tokenize(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    # ---- policy

    @property
    def system_fingerprint(self) -> str:
        """Names the target and the policy in force; ends in `+refused` while one that was asked for is not."""
        refused = "" if self.refusal is None else "+refused"
        return f"graft-{self.target.fingerprint[:8]}-{self.decode.active.label}{refused}"

    async def reconfigure(self, wanted: UserConfig) -> None:
        """Put the pinned policy in force between two rounds. One that does not fit is refused: the old one stays.

        So does one that cannot be had, such as a registered version while the registry is away; it is asked for again
        and again, until it is there or another one is wanted.

        The first call, before the first request, also measures what rounds cost and bring here, whatever is pinned: a
        policy that comes later may need it, and nothing but rounds may hold up the streams by then. When measuring
        fails, that is said, and until there is a saved policy that knows its costs nothing is drafted.

        Raises only when nothing is in force yet and none can be made: Serve ends a replica whose `reconfigure` raises,
        with all its requests.
        """
        async with self._changing_policy():
            await self._measure()
            if not await self._adopt(wanted.policy):
                self._retrier = asyncio.get_running_loop().create_task(self._retry(wanted.policy))

    @contextlib.asynccontextmanager
    async def _changing_policy(self) -> AsyncIterator[None]:
        """Alone with the policy; whatever was asked for before is not asked for again."""
        self._stop_retrying()  # which would hold the lock while a registry does not answer
        async with self._reconfiguring:
            self._stop_retrying()  # of somebody who had the lock until now
            yield

    async def _adopt(self, pin: PolicyPin | None) -> bool:
        """Put a policy in force, or refuse it. False: it could not be had, and another time it may be."""
        try:
            active = await self._loaded(pin)
        except Exception as error:
            if pin is None and not self._has_policy:
                raise
            if not isinstance(error, GraftError | OSError | ValueError):
                logger.error("loading a policy failed:\n%s", _without_passwords(traceback.format_exc()))
            version = None if pin is None or pin.registry is None else pin.registry.version
            await self._refuse(Refusal("none" if pin is None else pin.describe(), _one_line(error), version))
            return isinstance(error, PolicyError) and not isinstance(error, PolicyUnreadableError)
        await self._put_in_force(active)
        self._accept()
        return True

    async def _retry(self, pin: PolicyPin | None) -> None:
        is_settled = False
        while not is_settled:
            await asyncio.sleep(_RETRY_S)
            try:
                async with self._reconfiguring:
                    is_settled = await self._adopt(pin)
            except Exception:  # the round loop seems stuck, say: another time it is not
                self._log_failure("putting a policy in force")

    def _log_failure(self, what: str) -> None:
        text = _without_passwords(traceback.format_exc())
        logger.error("%s failed; %s stays:\n%s", what, self.decode.active.label, text)

    def _stop_retrying(self) -> None:
        if self._retrier is not None:
            self._retrier.cancel()
            self._retrier = None

    async def refuse_config(self, error: ValueError) -> None:
        """Refuse a user_config that cannot be read: the policy in force stays. Raises the error if there is none."""
        if not self._has_policy:
            raise error
        async with self._changing_policy():
            await self._refuse(Refusal("user_config", _one_line(error)))

    def follow_champion(self) -> None:
        """Begin to poll the registry, where the arguments ask for it. On the event loop; a second call does nothing."""
        settings = self.args.poll_champion
        if settings is not None and self._poller is None:
            self._poller = asyncio.get_running_loop().create_task(self._poll(settings))

    async def _poll(self, settings: AliasPolling) -> None:
        while True:
            try:
                await self.look_for_champion(settings.tracking_uri)
            except Exception:  # the round loop seems stuck, say: another time it is not
                self._log_failure("looking for the champion")
            # With some spread, so that replicas that start together do not ask together.
            await asyncio.sleep(settings.every_s * random.uniform(0.8, 1.2))

    async def look_for_champion(self, tracking_uri: str) -> None:
        """Put the registry's champion in force if it is another version; whatever goes wrong, the policy stays."""
        version, problem = None, None
        try:
            version = await asyncio.to_thread(registered_champion, tracking_uri, self.config.slug)
        except Exception as error:  # the registry is away, or answers nonsense
            problem = f"the registry does not say who is champion: {_one_line(error)}"
        else:
            if version is None:
                problem = f"the registry has no champion of {self.config.slug} yet"
        if problem is not None and problem != self._champion_problem:  # said once, however often it is found again
            logger.warning("%s; %s stays", problem, self.decode.active.label)
        self._champion_problem = problem
        refused = None if self.refusal is None else self.refusal.version
        if version is None or version == refused:
            return
        if version != self.decode.active.version:
            pin = PolicyPin(registry=RegistryPin(version=version, tracking_uri=tracking_uri))
            await self.reconfigure(UserConfig(policy=pin))
        elif refused is not None:  # the champion that was refused is none any more
            self._stop_retrying()
            self._accept()

    async def _loaded(self, pin: PolicyPin | None) -> ActivePolicy:
        """The policy, if it is there soon; else it goes on being fetched, and whoever asks again finds it.

        A registry that takes a call and does not answer would hold up everything that Serve has for this replica.
        """
        if pin is None:
            self._loading = None
            return await self._load(None)
        if self._loading is None or self._loading[0] != pin:
            self._loading = (pin, asyncio.get_running_loop().create_task(self._load(pin)))
            self._loading[1].add_done_callback(lambda task: task.cancelled() or task.exception())  # may be nobody's
        task = self._loading[1]
        await asyncio.wait({task}, timeout=_LOADING_S)
        if not task.done():
            raise GraftError(f"it was not there within {_LOADING_S:g} s; it is still waited for")
        self._loading = None
        return task.result()

    async def _load(self, pin: PolicyPin | None) -> ActivePolicy:
        assert self._probe is not None
        if pin is None:
            # A fixed budget may be far slower than no draft; without costs nobody would notice.
            decoding = plain() if self._unmeasured is not None else measured_policy(self._probe, self.config)
            return self._source.unsaved(decoding)
        policy = await _beside_rounds(lambda: self._source.read(pin))
        cost = policy.cost_curves.get(self._hardware) or self._probe.cost
        return await _beside_rounds(lambda: self._source.saved(pin, policy, cost))

    async def _refuse(self, refusal: Refusal) -> None:
        if not self._has_policy:
            await self._put_in_force(await self._load(None))
        if refusal != self.refusal:  # said once, however often it is asked for again
            self.refusal = refusal
            logger.warning("policy %s is refused, %s stays: %s", refusal.name, self.decode.active.label, refusal.reason)
            self._tell_policy()

    def _accept(self) -> None:
        """What is in force is what was asked for."""
        self.refusal = None
        self._tell_policy()

    async def _put_in_force(self, active: ActivePolicy) -> None:
        await self.decode.swap(active)
        self._has_policy = True
        logger.info("policy %s is in force", active.label)
        await asyncio.to_thread(_return_freed_memory)

    async def _measure(self) -> None:
        """What rounds cost and bring here: once, on the decode thread, where nothing else is under way yet."""
        if self._probe is None:
            self._probe = await self.decode.call(self._try_probe)
            if self._unmeasured is None:
                logger.info("measured %d rounds in %.1f s", self._probe.num_rounds, self._probe.seconds)

    def _try_probe(self) -> Probe:
        """On the decode thread: an empty probe where measuring fails. Raises what says that the device has failed."""
        try:
            return probe(self.target, self.drafter, self.config)
        except Exception as error:
            if is_device_failure(error):
                raise
            self._unmeasured = _one_line(error)
            logger.warning("what rounds cost could not be measured: %s", self._unmeasured, exc_info=True)
            return Probe(None, None, 0, 0.0)

    def _tell_policy(self) -> None:
        self._tell("policy_changed", self.decode.active.label, None if self.refusal is None else self.refusal.reason)

    # ---- requests and health

    def report(self, report: RequestReport, texts: Mapping[str, Any]) -> None:
        """A request has ended: one line of JSON in the log. `texts` (prompts, answers) are logged only on request."""
        line = {
            "event": "request",
            "request_id": report.request_id,
            "endpoint": report.endpoint,
            "outcome": report.outcome,
            "status": report.status,
            "stream": report.is_streamed,
            "prompt_tokens": report.num_prompt_tokens,
            "output_tokens": report.num_output_tokens,
            "first_token_ms": None if report.first_token_s is None else round(report.first_token_s * 1e3, 1),
            "duration_ms": round(report.duration_s * 1e3, 1),
            "policy": report.policy,
            "method": report.method,
        }
        logger.info(json.dumps(line | (dict(texts) if self.args.log_prompts else {}), ensure_ascii=False))
        self._tell("requested", report)

    def health(self) -> dict[str, Any]:
        """What /healthz shows; `status` is "ok", "degraded" (nothing is drafted, for a reason) or "failed"."""
        active = self.decode.active
        status, problem = "ok", None
        try:
            self.decode.check()
        except RuntimeError as error:
            status, problem = "failed", str(error)
        else:
            if self.decode.is_resting:
                status, problem = "degraded", "drafting failed: decoding without a draft for a while"
            elif self._unmeasured is not None and active.fingerprint is None:
                status, problem = "degraded", "costs could not be measured: decoding without a draft"
        refused = None
        if self.refusal is not None:
            refused = {"policy": self.refusal.name, "reason": self.refusal.reason}
        return {
            "status": status,
            "problem": problem,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "policy": {"label": active.label, "version": active.version, "fingerprint": active.fingerprint},
            "refused_policy": refused,
            "champion_problem": self._champion_problem,
            "unmeasured": self._unmeasured,
            "sequences": self.decode.num_sequences,
            "limit": self.decode.limit,
            "recorded_traffic": None if self._recorder is None else asdict(self._recorder.counts),
            "version": __version__,
        }

    def close(self) -> None:
        """Stop decoding. From any thread."""
        self.decode.stop()
        if self._recorder is not None:
            self._recorder.close()
        self._tokenizing.shutdown(wait=False)


async def _beside_rounds(work: Callable[[], Loaded]) -> Loaded:
    """Do something with tensors on a thread of its own, one operation after the other.

    A thread that computes in parallel has OpenMP threads of its own from then on. As soon as there are more of them
    than processors, OpenMP puts all of them to sleep between operations, those of the decode thread too, and rounds
    take twice as long: docs/performance.md.
    """

    def alone() -> Loaded:
        torch.set_num_threads(1)
        return work()

    return await asyncio.to_thread(alone)


def _return_freed_memory() -> None:
    """Give the system back what making a policy, and the one before it, took: some hundredths of a second.

    glibc keeps what was freed, and separately for each thread that ever made one: a gigabyte after twenty policies,
    where this keeps it at 70 MB. Elsewhere nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def new_seed() -> int:
    """A seed for a request that gives none."""
    return secrets.randbits(62)


def _one_line(error: Exception) -> str:
    """For people and for /healthz, which asks for no key: without the password that an address may hold."""
    return _without_passwords(" ".join(str(error).split()) or type(error).__name__)


def _without_passwords(text: str) -> str:
    """Without what stands before the @ of an address."""
    return re.sub(r"://[^/\s]*@", "://", text)


def _model_name(config: TargetConfig) -> str:
    """A hub id is known to clients as it is; anything else goes by its short name."""
    is_hub_id = not config.target.startswith("builtin:") and not is_folder_spec(config.target)
    return config.target if is_hub_id else config.slug
