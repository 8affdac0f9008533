"""Which devices the workers of each role get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pullfill.deploy import accelerator, defaults, devices, plan
from pullfill.deploy.up_options import UpOptions
from pullfill.errors import ConfigError
from pullfill.options import WorkerOptions


def here(monkeypatch: pytest.MonkeyPatch, *, gpus: int, cores: int = 8) -> None:
    monkeypatch.setattr(accelerator, "gpu_count", lambda: gpus)
    monkeypatch.setattr(accelerator, "why_not_mig", lambda: None)
    monkeypatch.setattr(defaults, "usable_cores", lambda: list(range(cores)))


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


class TestOneMore:
    def another(
        self, role: str = "prefill", ranks: int = 1, stopped: Sequence[int] = (), **given: Any
    ) -> tuple[int, ...]:
        """Where one more worker goes when those of `given` run, but for the `stopped` ones."""
        options = UpOptions(**{"model": "org/m", **given})
        taken = [p for i, p in enumerate(plan.placements(options)) if i not in stopped]
        place = devices.place_another(options, role, ranks, taken)
        return place.gpus or place.cores

    def test_it_gets_the_cores_with_the_fewest_workers(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here(monkeypatch, gpus=0, cores=4)
        assert self.another(decode=1, prefill=1, model="demo") == (2,)
        assert self.another(decode=2, prefill=3, model="demo") == (1,)
        assert self.another(decode=1, prefill=1) == (0, 1), "as wide as the others"
        assert self.another(decode=1, prefill=1, stopped=[0]) == (0, 1)
        assert self.another(decode_devices=(3,)) == (0, 1, 2)
        assert self.another(workers=WorkerOptions(pin=False)) == ()

    def test_it_gets_a_gpu_whose_memory_has_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here(monkeypatch, gpus=4)
        assert self.another(decode=1, prefill=1) == (2,)
        assert self.another(decode=1, prefill=1, ranks=2) == (2, 3)
        assert self.another(decode=2, prefill=2, stopped=[1]) == (1,)
        assert self.another(decode=3, prefill=3, stopped=[5]) == (1,), "each GPU has two places"
        shrunk = UpOptions(model="org/m", prefill=0, first_workers={"decode": 1, "prefill": 1})
        here(monkeypatch, gpus=1)
        (alone,) = plan.placements(shrunk)
        assert devices.place_another(shrunk, "prefill", 1, [alone]).gpus == (0,), "its old place"
        assert plan.engine_arguments(shrunk) == ["--gpu-memory-utilization=0.440"]
        here(monkeypatch, gpus=4)
        for full in ({"decode": 2, "prefill": 2}, {"decode": 4, "prefill": 4}):
            with pytest.raises(ConfigError, match="one more prefill worker needs 1 GPU"):
                self.another(**full)
        with pytest.raises(ConfigError, match=r"needs 2 GPU.*only 1 of GPUs 1, 2, 3 have room"):
            self.another(decode_devices=(0,), prefill=2, ranks=2)
