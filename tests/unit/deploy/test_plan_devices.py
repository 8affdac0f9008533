"""Which devices the workers of each role get."""

from __future__ import annotations

from typing import Any

import pytest

from pullfill.deploy import accelerator, plan
from pullfill.errors import ConfigError
from pullfill.options import UpOptions


def here(monkeypatch: pytest.MonkeyPatch, *, gpus: int, cores: int = 8) -> None:
    monkeypatch.setattr(accelerator, "gpu_count", lambda: gpus)
    monkeypatch.setattr(accelerator, "why_not_mig", lambda: None)
    monkeypatch.setattr(plan, "usable_cores", lambda: list(range(cores)))


def places(**given: Any) -> list[tuple[int, ...]]:
    found = plan.placements(UpOptions(**{"model": "org/m", **given}))
    return [place.gpus or place.cores for place in found]


def test_without_flags_all_workers_share_all(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, gpus=2)
    assert places(decode=2, prefill=1) == [(0,), (1,), (0,)]
    here(monkeypatch, gpus=0)
    assert places() == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_each_role_keeps_to_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, gpus=4)
    two = {"decode_devices": (3,), "prefill_devices": (0, 2)}
    assert places(decode=1, prefill=2, **two) == [(3,), (0,), (2,)]
    pair = {"prefill": ["-tp", "2"]}
    assert places(role_args=pair, **two) == [(3,), (0, 2)]
    assert places(decode_devices=(3,), prefill=3) == [(3,), (0,), (1,), (2,)], "what is left"
    assert places(decode_devices=(0, 1, 2, 3)) == [(0,), (1,)], "nothing is left: they share all"


def test_each_role_keeps_to_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, gpus=0, cores=4)
    assert places(decode=2, decode_devices=(0,)) == [(0,), (0,), (1, 2, 3)]
    assert places(model="demo", prefill_devices=(1, 2)) == [(0, 3), (1, 2)]


def test_the_memory_of_a_gpu_is_shared_by_its_own_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(**given: Any) -> str:
        (flag,) = plan.engine_arguments(UpOptions(model="org/m", **given))
        return flag.partition("=")[2]

    here(monkeypatch, gpus=4)
    assert share(decode=2, prefill=2) == "0.880"
    assert share(decode=2, prefill=2, prefill_devices=(0,)) == "0.440"
    assert share(decode=2, prefill=3, prefill_devices=(0, 1, 2, 3)) == "0.440"


@pytest.mark.parametrize(
    ("gpus", "given", "why"),
    [
        (2, {"decode_devices": (2,)}, "--decode-devices: there is no GPU 2 here: there are 0, 1"),
        (0, {"prefill_devices": (1, 9)}, "--prefill-devices: there is no core 9 here"),
        (2, {"decode_devices": (0, 1), "prefill_devices": (1,)}, "GPU 1 is in --decode-devices"),
        (
            4,
            {"prefill_devices": (0, 1), "prefill": 2, "role_args": {"prefill": ["-tp", "2"]}},
            "the workers need 4 GPUs .TP x PP: 2 . 2., but there are 2",
        ),
    ],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch, gpus: int, given: dict[str, Any], why: str
) -> None:
    here(monkeypatch, gpus=gpus)
    with pytest.raises(ConfigError, match=why):
        plan.check(UpOptions(frontends=0, model="org/m", **given))
