"""What a swap leaves behind."""

from __future__ import annotations

import gc
import weakref

from graft_dist.policy import ddtree, plain
from serve.active_policy import ActivePolicy, MethodSwitch


def test_a_policy_that_was_swapped_out_is_gone_at_once() -> None:
    """Its tables are tens of megabytes: they must not wait until Python looks for circles of objects."""
    gc.disable()
    try:
        active = ActivePolicy("trees", 7, "abcd", ddtree(6, 4), {"plain": plain()})
        switch = MethodSwitch(active)
        switch.choose_method("a", "plain")
        in_use = switch.policy  # as the engine has it
        assert in_use.scorer is switch and (in_use.num_candidates, in_use.max_depth) == (4, None)
        gone = [weakref.ref(one) for one in (switch, active)]
        del switch, active
        assert all(ref() is not None for ref in gone)
        in_use = plain()
        assert in_use.num_candidates == 1 and all(ref() is None for ref in gone)
    finally:
        gc.enable()
