"""What a `CollectActor` loads: both models, their engine, and the writer of its rows.

Only actors import this: it brings the engine and all of transformers, for which a driver would wait in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from transformers.utils.logging import disable_progress_bar

from graft_dist.decoder import load_decoder, new_engine
from graft_dist.dense import dense_rounds
from graft_dist.drafter import DFlashDrafter
from graft_dist.edge_scorer import hidden_projection
from graft_dist.engine import Engine
from graft_dist.hardware import describe_hardware
from graft_dist.prompts import Prompt, render
from graft_dist.rounds import RoundRecord, SequenceRecord
from graft_dist.sampling import SamplingParams
from graft_dist.software import describe_software
from graft_dist.target import Target
from jobs.collect_actor import ActorPlan, ModelInfo
from jobs.collector import Collector
from jobs.decode_spec import DecodeSpec
from jobs.units import Unit, WorkItem
from storage.schema import Provenance, UnitKey
from storage.trajectories import FileInfo, TrajectoryStore, new_attempt


def load_collector(plan: ActorPlan) -> tuple[Collector, ModelInfo]:
    """Load target, drafter and engine as `plan` says. Raises `TargetError`, `DrafterError` or `PolicyError`."""
    torch.set_num_threads(plan.num_threads)
    disable_progress_bar()  # a hundred lines in the job's log, from every actor
    spec, config = plan.spec, plan.spec.config
    # Dense rounds ask the drafter also where no round drafts.
    target, drafter = load_decoder(config, "ddtree" if spec.dense else spec.method)
    models = ModelInfo(
        target.fingerprint,
        target.tokenizer_sha256,
        None if drafter is None else drafter.fingerprint,
        0 if drafter is None else drafter.draft_depth,
        target.dtype_name,
    )
    projection = None
    if spec.num_hidden > 0 and drafter is not None:
        projection = hidden_projection(drafter.fingerprint, target.hidden_size, spec.num_hidden)
    make_engine = partial(
        new_engine,
        config,
        target,
        None if spec.method == "plain" else drafter,
        spec.policy(),
        max_slots=plan.num_slots,
        max_budget=spec.max_budget,
        record=plan.store is not None and spec.records_rounds,
        projection=projection,
        detokenize=False,
    )
    _warm_up(make_engine())
    dense = None
    if spec.dense and drafter is not None and plan.store is not None:
        dense = partial(_dense, target, drafter, config.num_candidates, projection)
    made_by = _provenance(spec, models, describe_hardware(models.dtype, target.device))
    collector = Collector(
        make_engine=make_engine,
        num_slots=plan.num_slots,
        render=partial(_render, target, spec),
        sampling=spec.sampling,
        write=None if plan.store is None else _Writer(plan.store, made_by, models.identity(spec)),
        dense=dense,
        slice_s=plan.slice_s,
    )
    return collector, models


def _warm_up(engine: Engine) -> None:
    """Decode a few tokens: the first round compiles the tree builder, which must not be recorded as anyone's timing."""
    engine.add([0, 1, 2], SamplingParams(max_new_tokens=4, ignore_eos=True))
    while engine.has_work:
        engine.step()


def _render(target: Target, spec: DecodeSpec, item: WorkItem) -> list[int]:
    prompt = Prompt(item.prompt_id, item.task, item.turns)
    return render(target.tokenizer, prompt, spec.config.system_prompt, spec.config.enable_thinking)


def _dense(
    target: Target,
    drafter: DFlashDrafter,
    num_candidates: int,
    projection: torch.Tensor | None,
    record: SequenceRecord,
) -> list[RoundRecord]:
    known = (record.sequence_id, record.prompt_token_ids, record.output_token_ids)
    return dense_rounds(target, drafter, *known, num_candidates, projection)


class _Writer:
    """Writes each unit as a new attempt of this run."""

    def __init__(self, root: str, provenance: Provenance, run_id: str) -> None:
        self._store = TrajectoryStore(root)
        self._provenance = provenance
        self._run_id = run_id

    def __call__(
        self, unit: Unit, sequences: Sequence[SequenceRecord], rounds: Sequence[RoundRecord]
    ) -> list[FileInfo]:
        key = UnitKey(unit_id=unit.unit_id, attempt=new_attempt(), run_id=self._run_id)
        return self._store.write_unit(key, self._provenance, sequences, rounds)


def _provenance(spec: DecodeSpec, models: ModelInfo, hardware: str) -> Provenance:
    return Provenance(
        target=spec.config.slug,
        target_spec=spec.config.target,
        target_fingerprint=models.target_fingerprint,
        drafter_fingerprint=models.drafter_fingerprint,
        policy=spec.policy().name,
        policy_fingerprint=spec.policy_fingerprint(),
        hardware=hardware,
        software=describe_software(),
    )
