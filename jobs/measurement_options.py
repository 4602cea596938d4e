"""The options that scripts in `bench/` share which run a target themselves: which one, in what numbers, on how many
threads."""

from __future__ import annotations

import argparse

import torch

from graft_dist.config import TargetConfig, load_config


def target_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with `--config`, `--dtype` and `--threads`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="smollm2-135m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the configuration's")
    parser.add_argument("--threads", type=int, default=2)
    return parser


def chosen_config(chosen: argparse.Namespace) -> TargetConfig:
    """The configuration that the options name, in their dtype. Gives torch its threads."""
    torch.set_num_threads(chosen.threads)
    config = load_config(chosen.config)
    return config if chosen.dtype is None else config.model_copy(update={"dtype": chosen.dtype})
