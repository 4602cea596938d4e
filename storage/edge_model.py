"""What MLflow runs when somebody loads a registered policy with `mlflow.pyfunc`: scores of single edges.

Rows of (parent token, child token, depth of the child from 1) go in, f of the edge comes out: what the policy's edge
scorer adds to the drafter's log-probability (0 without one), as far as the edge alone decides it. Left out is what a
gate adds by the drafter's hidden state, and how its probabilities are weighed. The target's embeddings are read when
the first edge is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow.models
import mlflow.pyfunc


class EdgeModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc, name-defined]
    """Scores edges of the draft tree."""

    def load_context(self, context: Any) -> None:
        """Load the policy; refuses a broken one."""
        from graft_dist.policy import GraftPolicy  # here: MLflow runs this file when a version is registered, too

        self.policy = GraftPolicy.load(Path(context.artifacts["policy"]))
        self.embeddings: Any = None  # float32 [V, E]

    # MLflow reads type hints as a schema of its own and would warn of ours; the signature is given when registering.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """Return f of each row."""
        import torch

        from graft_dist.errors import PolicyError
        from graft_dist.target import read_embeddings, read_fingerprint

        network = self.policy.tdes
        if network is None:
            return [0.0] * len(model_input)
        if self.embeddings is None:
            spec = context.model_config["target"]
            self.policy.check(read_fingerprint(spec), self.policy.drafter_fingerprint)
            self.embeddings = read_embeddings(spec).float()
        last = len(self.embeddings) - 1
        columns = []
        for name, least, most in (("parent", 0, last), ("child", 0, last), ("depth", 1, network.config.draft_depth)):
            column = torch.tensor(model_input[name].to_numpy())
            wrong = column[(column < least) | (column > most)]
            if len(wrong) > 0:
                raise PolicyError(f"{name} is {int(wrong[0])}, allowed is {least} to {most}")
            columns.append(column)
        with torch.no_grad():
            tables = network.token_tables(self.embeddings[torch.cat(columns[:2])])
            number = torch.arange(len(model_input))
            hidden = torch.zeros(len(model_input), network.config.hidden_size)
            certain = torch.zeros(len(model_input))
            pair = (number, number + len(model_input))
            scores = network(tables, *pair, columns[2] - 1, hidden, (certain, certain))
        return [float(score) for score in scores]


mlflow.models.set_model(EdgeModel())
