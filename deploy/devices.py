"""Which GPUs, or CPU cores, the workers of each role may use: `--decode-devices` and the like.

Without such flags all workers share what this process may use. If only one role has the flag, the
other role gets what is left. If nothing is left, both share all GPUs, or all cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pullfill.deploy import accelerator, defaults
from pullfill.errors import ConfigError
from pullfill.options import UpOptions

ROLES = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that the workers of these roles share.

    cores: CPU cores.
    gpus: indices among the GPUs that this process may use. Empty: workers run on cores.
    given: whether the flags have chosen them."""

    roles: tuple[str, ...]
    cores: tuple[int, ...]
    gpus: tuple[int, ...]
    given: bool = False

    def place(self, ranks: Sequence[int], *, pin: bool, small: bool) -> list[defaults.Placement]:
        """Return a placement for each worker of the pool.

        ranks: TP x PP of each worker. pin, small: as `pin` and `one_core` of `defaults.place`.
        Cores that flags have chosen are all used, also without `pin`."""
        if self.given and not self.gpus and len(self.cores) == 1:
            return [defaults.Placement(cores=self.cores, ranks=count) for count in ranks]
        places = defaults.place(
            ranks,
            cores=self.cores,
            gpus=len(self.gpus),
            pin=pin or self.given,
            one_core=small and not self.given,
        )
        return [replace(p, gpus=tuple(self.gpus[index] for index in p.gpus)) for p in places]


def pools(options: UpOptions) -> list[Pool]:
    """Return the pools, that of decode workers first."""
    cores, gpus = tuple(defaults.usable_cores()), tuple(range(accelerator.gpu_count()))
    named = {role: named_of(options, role) for role in ROLES}
    if not any(named.values()):
        return [Pool(ROLES, cores, gpus)]
    if gpus and set(gpus) in map(set, named.values()):
        return [Pool(ROLES, cores, gpus, given=True)]
    every, found = gpus or cores, []
    for role, other in zip(ROLES, reversed(ROLES), strict=True):
        rest = tuple(device for device in every if device not in named[other])
        own = named[role] or rest or every
        given = bool(named[role] or rest)
        found.append(Pool((role,), cores, own, given) if gpus else Pool((role,), own, (), given))
    return found


def named_of(options: UpOptions, role: str) -> tuple[int, ...]:
    """Return the devices that the user has named for the role. Empty: none."""
    named: tuple[int, ...] = getattr(options, f"{role}_devices")
    return named


def most_on_a_gpu(options: UpOptions) -> tuple[int, int]:
    """Return numbers of workers and of GPUs: those of the pool whose GPUs have most to share."""
    workers = {role: getattr(options, role) for role in ROLES}
    counts = [(sum(workers[role] for role in p.roles), len(p.gpus)) for p in pools(options)]
    return max(counts, key=lambda count: math.ceil(count[0] / max(1, count[1])))


def check(options: UpOptions) -> None:
    """Refuse devices that are not there, and GPUs named for both roles. Raises ConfigError."""
    gpus = accelerator.gpu_count()
    here = list(range(gpus)) if gpus else defaults.usable_cores()
    what = "GPU" if gpus else "core"
    for role in ROLES:
        if missing := sorted(set(named_of(options, role)) - set(here)):
            raise ConfigError(
                f"--{role}-devices: there is no {what} {missing[0]} here: there are "
                f"{', '.join(map(str, here))}"
            )
    both = set(options.decode_devices) & set(options.prefill_devices)
    if gpus and both:
        raise ConfigError(
            f"GPU {min(both)} is in --decode-devices and in --prefill-devices: give each role GPUs "
            "of its own, or leave out both flags to share them"
        )
