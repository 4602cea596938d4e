"""A learning run in MLflow: parameters, the data set, curves, numbers, plots.

Only the driver talks to MLflow, and writes in batches: a tracking server answers each call separately.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graft_dist.learning.tdes import Evaluation
from jobs.cluster import job_id
from jobs.learning_data import SPLITS, LearningData
from jobs.provenance import provenance
from storage.registry import Registry


class TrackedRun:
    """One MLflow run in the target's experiment; a run that is resumed goes on in the same one."""

    def __init__(self, registry: Registry, run_id: str) -> None:
        self._client, self.run_id = registry.client, run_id

    @classmethod
    def open(cls, registry: Registry, slug: str, run_id: str | None, params: Mapping[str, Any]) -> TrackedRun:
        """Go on with run `run_id`, or make a new one with these parameters."""
        if run_id is not None:
            return cls(registry, run_id)
        about = provenance()
        tags = {
            "graft.target": slug,
            "graft.commit": str(about["commit"]),
            "graft.versions": json.dumps(about["versions"]),
            "graft.ray_submission_id": job_id() or "",
        }
        run = registry.client.create_run(registry.experiment(slug), run_name=f"policy of {slug}", tags=tags)
        tracked = cls(registry, run.info.run_id)
        from mlflow.entities import Param

        registry.client.log_batch(tracked.run_id, params=[Param(name, str(value)) for name, value in params.items()])
        return tracked

    def log_data(self, data: LearningData, root: str) -> None:
        """The data set: which versions of which store, and how much of it was used for what."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        identity = data.identity
        profile = {
            split: {
                "sequences": len(data.splits[split]),
                "decoded_rounds": sum(each.num_decoded for each in data.splits[split]),
                "dense_rounds": sum(each.num_dense for each in data.splits[split]),
            }
            for split in SPLITS
        }
        source = {"store": root, "snapshot": identity.store, "runs": identity.run_ids, "shards": identity.num_shards}
        dataset = Dataset(
            name=f"rounds of {data.source.target_spec}"[:500],
            digest=identity.store[:36],
            source_type="graft-store",
            source=json.dumps(source),
            profile=json.dumps(profile),
        )
        tag = InputTag("mlflow.data.context", "training")
        self._client.log_inputs(self.run_id, datasets=[DatasetInput(dataset, [tag])])

    def log_results(self, metrics: Mapping[str, float], looks: Sequence[Evaluation], files: Sequence[Path]) -> None:
        """Curves of the fit, final numbers, plots and the report."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(name, value, now, 0) for name, value in metrics.items()]
        rows += [Metric("fit_held_out_kl", look.held_out_kl, now, look.step) for look in looks]
        rows += [Metric("fit_loss", look.loss, now, look.step) for look in looks[1:]]
        for start in range(0, len(rows), 500):
            self._client.log_batch(self.run_id, metrics=rows[start : start + 500])
        for file in files:
            self._client.log_artifact(self.run_id, str(file), "plots" if file.suffix == ".png" else None)

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self.run_id)
