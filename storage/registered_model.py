"""A policy as an MLflow model: its folder, and around it what MLflow's own tools want (signature, example, code).

Who decodes with a policy reads its folder and needs none of this; it is there for `mlflow.pyfunc.load_model`, which
scores edges of the draft tree.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVED_CODE = Path(__file__).with_name("edge_model.py")
"""Code that MLflow runs when somebody loads the model; a file and not a pickled object."""


def write_model(folder: Path, aside: Path, target_spec: str) -> Path:
    """Write the MLflow model of the policy in `folder` below `aside`, and return its folder.

    The policy becomes `artifacts/policy` there. `target_spec` says where the target's embeddings are found when the
    model is loaded: no copy of them is kept.
    """
    import mlflow.pyfunc
    import pandas as pd
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    policy, model = aside / "policy", aside / "model"
    shutil.copytree(folder, policy)
    edges = Schema([ColSpec("long", "parent"), ColSpec("long", "child"), ColSpec("long", "depth")])
    example = pd.DataFrame({"parent": [1, 1], "child": [2, 3], "depth": [1, 1]})
    with quiet("mlflow"):
        mlflow.pyfunc.save_model(
            str(model),
            python_model=str(SERVED_CODE),
            artifacts={"policy": str(policy)},
            signature=ModelSignature(inputs=edges, outputs=Schema([ColSpec("double", "score")])),
            input_example=example,
            model_config={"target": target_spec},
            pip_requirements=_requirements(),
        )
    return model


def _requirements() -> list[str]:
    from importlib.metadata import version

    return [f"{package}=={version(package)}" for package in ("graft-dist", "mlflow")]


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Keep a package's remarks and warnings out of a job's log for a while; errors are still shown."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        # Recorded, and dropped: MLflow resets the filters that would ignore its own.
        with warnings.catch_warnings(record=True):
            yield
    finally:
        logger.setLevel(level)
