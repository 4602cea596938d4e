"""The errors that a user of graft-dist can cause and can mend.

    GraftError
    ├── ConfigError    a target's YAML file: unknown key, wrong type, impossible value
    ├── TargetError    a target model that is missing or cannot be decoded with draft trees
    ├── DrafterError   a drafter checkpoint that is broken, of another kind, or does not fit its target
    ├── PromptError    a prompt source that cannot be read, or a prompt that cannot be rendered
    ├── PolicyError    a decoding policy that does not exist or contradicts itself
    │   └── PolicyUnreadableError  a saved one that is not there, or not whole; later it may be
    ├── StoreError     a trajectory store that cannot be opened, read or written
    └── RegistryError  a registry of policies that cannot be reached, or does not hold what was asked for
        └── RegistryUnavailableError  it cannot be reached, read or written now; later it may be

Each message is one sentence: what is wrong (the name and the value), and what is allowed or what to do. Commands catch
`GraftError`, print the sentence and exit with code 2. The first six are also a `ValueError`, so that code which knows
nothing of this project catches them as one. Violations of our own invariants are `AssertionError`s instead.
"""


class GraftError(Exception):
    """Root of all errors that a user can mend; the message is one sentence for that user."""


class ConfigError(GraftError, ValueError):
    """A configuration names an unknown key, holds a wrong type or an impossible value, or cannot be read."""


class TargetError(GraftError, ValueError):
    """The target model cannot be found, or is of a kind that draft trees cannot be verified on."""


class DrafterError(GraftError, ValueError):
    """The drafter checkpoint is incomplete, of another kind, or does not fit the target; says both sides' numbers."""


class PromptError(GraftError, ValueError):
    """A prompt file cannot be read at all, or a prompt cannot be rendered with the target's chat template."""


class PolicyError(GraftError, ValueError):
    """A decoding policy is unknown or its parts contradict each other."""


class PolicyUnreadableError(PolicyError):
    """A saved policy is not there, or cannot be read: another time it may be."""


class StoreError(GraftError):
    """The trajectory store cannot be opened, read or written as asked."""


class RegistryError(GraftError):
    """The registry of policies cannot be reached, does not hold what was asked for, or refuses."""


class RegistryUnavailableError(RegistryError):
    """The registry of policies cannot be reached, read or written now; what was asked may have been done in part."""


def is_device_failure(error: BaseException) -> bool:
    """Whether an exception says that the accelerator itself has failed, after which no work on it can succeed.

    Running out of memory is not one: smaller work may still fit.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "OutOfMemoryError" in kinds:
        return False
    text = str(error)
    return "AcceleratorError" in kinds or "CUDA error" in text or "device-side assert" in text
