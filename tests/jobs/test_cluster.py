"""A block that needs a cluster leaves the process as it found it."""

from __future__ import annotations

import pytest

from jobs import cluster


@pytest.mark.parametrize("was_connected", [False, True])
def test_a_process_is_in_a_cluster_afterwards_if_it_was_before(
    was_connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    joined = cluster.Cluster(is_local=False, message="joined", resources={})
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: was_connected)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: events.append("left"))
    monkeypatch.setattr(cluster, "connect", lambda *_: joined)
    with pytest.raises(KeyError), cluster.connected(None) as found:
        assert found is joined and events == []
        raise KeyError
    assert events == ([] if was_connected else ["left"])
