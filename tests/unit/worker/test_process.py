"""What a worker with both sides cannot do yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.errors import ConfigError
from pullfill.worker.process import refuse_what_two_sides_cannot


def test_it_is_refused_however_it_was_asked_for() -> None:
    """Its flags have several spellings, and may stand in a file."""
    tier = {"kv_connector": "Tier", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}
    extra = {"connectors": [{"kv_connector": "Ours"}, tier]}
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra)
    )
    with pytest.raises(ConfigError, match="KV offloading"):
        refuse_what_two_sides_cannot(config)
    extra["connectors"].remove(tier)
    config.parallel_config = SimpleNamespace(world_size=2)
    with pytest.raises(ConfigError, match="one rank"):
        refuse_what_two_sides_cannot(config)
