"""The error tree: one root for commands to catch, ValueError for callers who know nothing of this project."""

import pytest

from graft_dist import errors

KINDS = [
    errors.ConfigError,
    errors.TargetError,
    errors.DrafterError,
    errors.PromptError,
    errors.PolicyError,
    errors.PolicyUnreadableError,
    errors.StoreError,
    errors.RegistryError,
    errors.RegistryUnavailableError,
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_a_graft_error(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.GraftError)


@pytest.mark.parametrize("kind", KINDS[:6])
def test_wrong_input_is_also_a_value_error(kind: type[Exception]) -> None:
    assert issubclass(kind, ValueError)


def test_the_docstring_draws_every_error() -> None:
    defined = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert len(defined) == len(KINDS) + 1
    assert all(name in (errors.__doc__ or "") for name in defined)
