"""What `pullfill up` will start, with which flags, and on which GPUs or cores.

`check` refuses what cannot work, before anything runs. `worker_specs` tells how to start workers
and frontends, once NATS and etcd have addresses. Flags that the user gives come after ours on the
command line, and the last one wins.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from pullfill.config import ClusterRef, check_namespace, ranks_of
from pullfill.demo import recipe
from pullfill.deploy import accelerator, local_servers, machine, vllm_flags
from pullfill.deploy.vllm_flags import flag_name, group_flags
from pullfill.errors import ConfigError, NotNow
from pullfill.ids import new_instance_id
from pullfill.net.security import OPEN
from pullfill.options import ClusterOptions, RoleOptions, UpOptions, arguments, frontend_url
from pullfill.registry import live_settings

# Kinds of workers: of both sides, or of one. Those that decode come first.
ROLES = ("worker", "decode", "prefill")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+\Z")

DEMO = "demo"

# For the demo model exact arithmetic and a quick start matter. It is small enough to be slow.
DEMO_FLAGS = (
    "--served-model-name=demo",
    "--dtype=float32",
    "--max-model-len=4096",
    "--max-num-batched-tokens=1024",
    "--max-num-seqs=32",
    "--enforce-eager",
)

CPU_FLAGS = {
    # A prefill worker maps its own cache and that of each decode worker: below 0.9 GB with both.
    DEMO: (f"--kv-cache-memory-bytes={64 << 20}",),
    "other": ("--enforce-eager", f"--kv-cache-memory-bytes={1 << 30}"),
}

# Tokens in one step of a worker that prefills for others, on CPU, unless the user says. Larger
# steps compute no faster there. But prompts that wait together share a step: the first would end
# with the last.
PREFILL_CHUNK = 1024

# vLLM flags that choose the size of a step, or leave it to vLLM. Then we do not choose it.
_DECIDE_STEPS = frozenset(
    """
    config enable-chunked-prefill max-num-batched-tokens max-num-seqs performance-mode
    """.split()
)

# Share of a GPU's memory that vLLM takes, divided by the workers on that GPU.
GPU_MEMORY_SHARE = 0.88

KV_BYTES = "kv-cache-memory-bytes"


@dataclass(slots=True, kw_only=True)
class ProcessSpec:
    """One process to start.

    env: what it has besides the environment of every child.
    url: where a frontend answers. Empty for others.
    drain_s: how long it may drain.
    after: name of the worker on the same GPU that must be ready first. Empty: none."""

    name: str
    role: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    instance_id: str | None = None
    url: str = ""
    drain_s: float = 60.0
    after: str = ""


def check(options: UpOptions) -> None:
    """Refuse, before anything starts, what cannot work. Raises ConfigError."""
    if options.frontends and not options.decodes and not options.frontend.by_stock:
        raise ConfigError(
            "a frontend without a decode worker cannot serve: use --workers 1, --decode 1 or more, "
            "--frontends 0, or stock vLLM servers (--servers)"
        )
    for role in ("decode", "prefill"):
        if options.worker and options.role_args.get(role) and not getattr(options, role):
            raise ConfigError(
                f"--{role}-args is for workers that only {role}, and there are none: use "
                f"--vllm-args, or --{role} 1 or more"
            )
    check_namespace(options.namespace)
    vllm_flags.check(options.vllm_args)
    vllm_flags.check_plain_http(options.vllm_args)
    _check_gpus(options)
    for text in options.settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text!r}: give KEY=VALUE, e.g. router.policy=conditional")
        live_settings.check(key, value)
    check_model(options.model)
    if options.worker + options.decode + options.prefill + options.frontends:
        machine.refuse_wrong_packages()
    if options.port == 0:
        options.port = local_servers.free_port()
    for port in (options.port, *filter(None, options.own_ports)):
        if options.frontends:
            local_servers.check_port("--port", options.host, port)
    _check_security(options)
    if options.etcd_url is None:
        local_servers.etcd_binary()
    elif why := local_servers.etcd_ready(options.etcd_url, 1.0, options.security.etcd):
        raise ConfigError(why)
    if options.nats_url is None:
        local_servers.nats_binary()
    elif why := local_servers.nats_ready(options.nats_url, 5.0):
        raise ConfigError(f"{why}. Check --nats")


def _check_gpus(options: UpOptions) -> None:
    """Refuse too few GPUs. Workers may share a GPU only if none of them needs several."""
    if why := accelerator.why_not_mig():
        raise ConfigError(why)
    needed, here = _ranks(options), accelerator.gpu_count()
    if here and max(needed, default=1) > 1 and sum(needed) > here:
        each = " + ".join(map(str, needed))
        raise ConfigError(
            f"the workers need {sum(needed)} GPUs (TP x PP: {each}), but there are {here}: "
            "start fewer workers, or choose a smaller -tp or -pp"
        )


def _check_security(options: UpOptions) -> None:
    """Refuse logins for servers that `up` starts. Those listen on loopback and ask for none."""
    security = options.security
    for name, url in (("nats", options.nats_url), ("etcd", options.etcd_url)):
        if url is None and getattr(security, name) != getattr(OPEN, name):
            raise ConfigError(
                f"[{name}] in {security.path} is for a server of your own: name it with "
                f"--{name} URL, or leave the section out"
            )


def check_model(model: str) -> None:
    """Refuse a model that is not `demo`, a directory of a model, or ORG/NAME of a model hub.

    Raises ConfigError."""
    if model == DEMO:
        return
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file() or (path / "params.json").is_file():
            return
        raise ConfigError(f"{path} is no model: it has no config.json. Give a checkpoint directory")
    if path.exists():
        raise ConfigError(f"{path} is a file: give the checkpoint's directory")
    if _HUB_NAME.match(model) and not model.startswith("."):
        return
    raise ConfigError(
        f"no model at {model}: give a checkpoint directory, ORG/NAME of a model hub, or `demo`"
    )


def resolve_model(model: str) -> str:
    """Return the model's name for vLLM: a directory of this machine, or ORG/NAME of a hub."""
    path = demo_directory() if model == DEMO else Path(model).expanduser()
    return str(path.absolute()) if model == DEMO or path.is_dir() else model


def named_model(model: str) -> str:
    """Return the value of `--model` for another process, in whatever directory that runs."""
    return model if model == DEMO else resolve_model(model)


def demo_directory() -> Path:
    """Return the directory of the demo model, one per user and recipe."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "pullfill" / f"demo-{recipe.DEMO.digest()}"


def make_demo_model() -> None:
    """Make the demo model unless it is there. Raises ConfigError."""
    # In a process of its own: it loads torch, which reads the environment.
    directory = demo_directory()
    command = [sys.executable, "-P", "-m", "pullfill.demo.checkpoint", str(directory)]
    if subprocess.run(command).returncode:
        raise NotNow(
            f"the demo model could not be made in {directory}, the reason is above. Check the free "
            "space, then try again"
        )


def engine_arguments(options: UpOptions) -> list[str]:
    """Return the vLLM flags of every process: the defaults, then the user's."""
    workers = options.worker + options.decode + options.prefill
    flags = engine_flags(options.model, gpus=accelerator.gpu_count(), workers=workers)
    return flags + options.vllm_args


def worker_arguments(options: UpOptions, role: str) -> list[str]:
    """Return the vLLM flags of every worker or frontend of the role."""
    return engine_arguments(options) + options.role_args.get(role, [])


def served_name(options: UpOptions) -> str:
    """Return the model name that clients must send."""
    name = resolve_model(options.model)  # unless --served-model-name gives some. Its first counts
    for flag, *values in group_flags(worker_arguments(options, "frontend")):
        if flag_name(flag) == "served-model-name":
            name = flag.partition("=")[2] or next(iter(values), name)
    return name


def _ranks(options: UpOptions) -> list[int]:
    """Return TP x PP of each worker, in the order of ROLES."""
    ranks = {role: ranks_of(worker_arguments(options, role)) for role in ROLES}
    return [ranks[role] for role in ROLES for _ in range(getattr(options, role))]


def frontend_cores(options: UpOptions) -> set[int]:
    """Return the cores of frontends once all is ready: those of no worker, else those that decode.

    Of the workers with both sides the first half counts as decoding: these get streams first
    (`worker_specs`).
    Empty: any, as no worker is pinned."""
    # A frontend works for each decoded token. Beside a prefill worker it took 12 % of its core:
    # prompts of 1.75 s took 2.1 to 2.3, and queued. Two cores, streams and long prompts: on either
    # core 409 tokens/s, ITL p99 17.6 ms; on the core that decodes 429 tokens/s, 16.4 ms.
    places = placements(options)
    taken = {core for place in places for core in place.cores}
    both = options.worker
    decoding = [*places[: -(-both // 2)], *places[both : both + options.decode]]
    beside = {core for place in decoding for core in place.cores}
    return (set(usable_cores()) - taken or beside) if taken else set()


def worker_spec(
    options: UpOptions,
    cluster: ClusterRef,
    name: str,
    instance: str,
    place: Place,
    *,
    after: str = "",
    own_port: int = 0,
) -> ProcessSpec:
    """Return how to start one worker or frontend. Its role is the first word of its name.

    instance: its instance id. own_port: of a frontend. 0: any free one."""
    role = name.partition("-")[0]
    url, flags = "", worker_arguments(options, role)
    told: RoleOptions = replace(options.workers, cores=place.cores)
    if role == "frontend":
        url = frontend_url(options.host, own_port or options.port)
        told = replace(
            options.frontend,
            host=options.host,
            port=options.port,
            own_port=own_port,
            # Longer than most starts of a decode worker take.
            restart_wait_s=30.0 if options.restart else 0.0,
        )
    else:
        flags = vllm_flags.for_worker(flags)
    told = replace(told, model=named_model(options.model), instance_id=instance)
    where = ClusterOptions(
        etcd=cluster.etcd_url,
        nats=cluster.nats_url,
        namespace=cluster.namespace,
        state_dir=str(cluster.state_dir) if cluster.state_dir else None,
        security=cluster.security.path or None,
    )
    # -P: what lies in the user's directory must not shadow modules.
    python = [sys.executable, "-P", "-m", "pullfill.deploy.cli"]
    return ProcessSpec(
        name=name,
        role=role,
        argv=[*python, role, *arguments(where), *arguments(told, role), *flags],
        env=device_env(place),
        instance_id=instance,
        url=url,
        drain_s=options.drain_s(role),
        after=after,
    )


def worker_specs(options: UpOptions, cluster: ClusterRef) -> list[ProcessSpec]:
    """Return how to start the workers, in the order of ROLES, and the frontends."""
    specs: list[ProcessSpec] = []
    names = [f"{role}-{i}" for role in ROLES for i in range(getattr(options, role))]
    # In this order they get streams under the policy `pack`, the first ones at first.
    ids = [i for r in ROLES for i in sorted(new_instance_id(r) for _ in range(getattr(options, r)))]
    # vLLM sizes its KV cache by what the GPU's memory lost while it loaded its model. Of two
    # workers that load on one GPU at once, each would count the other's memory as its own. So they
    # start in turn, unless all were given a size.
    roles = {name.partition("-")[0] for name in names}
    sized = all(KV_BYTES in map(flag_name, worker_arguments(options, role)) for role in roles)
    last: dict[tuple[int, ...], str] = {}
    for name, instance, place in zip(names, ids, placements(options), strict=True):
        # Workers that share GPUs have one each (`_check_gpus`).
        after = "" if sized else last.get(place.gpus, "")
        specs.append(worker_spec(options, cluster, name, instance, place, after=after))
        if place.gpus:
            last[place.gpus] = name
    for index, own_port in enumerate(options.own_ports):
        name, place = f"frontend-{index}", Place()
        instance = new_instance_id("frontend")
        specs.append(worker_spec(options, cluster, name, instance, place, own_port=own_port))
    return specs


# --------------------------------------------------------------------------- flags, environment


def engine_flags(model: str, *, gpus: int, workers: int) -> list[str]:
    """Return the default vLLM flags of every process.

    model: as the user typed it.
    workers: number of workers."""
    flags: list[str] = list(DEMO_FLAGS) if model == DEMO else []
    if not gpus:
        return flags + list(CPU_FLAGS[DEMO if model == DEMO else "other"])
    # vLLM refuses to start unless this share is free, also if the KV cache's size is given.
    share = GPU_MEMORY_SHARE / max(1, math.ceil(workers / gpus))
    flags.append(f"--gpu-memory-utilization={share:.3f}")
    return [*flags, f"--{KV_BYTES}={1 << 30}"] if model == DEMO else flags


def role_flags(role: str, arguments: Sequence[str], *, gpus: int) -> list[str]:
    """Return the flags that a worker of this role puts before those it was given."""
    if role == "decode" or gpus:
        return []
    if any(flag_name(group[0]) in _DECIDE_STEPS for group in group_flags(arguments)):
        return []
    return [f"--max-num-batched-tokens={PREFILL_CHUNK}"]


def device_env(place: Place) -> dict[str, str]:
    """Return the variable by which a worker on GPUs sees only its own devices."""
    if not place.gpus:
        return {}
    visible = accelerator.visible()
    names = [visible[gpu] if visible else str(gpu) for gpu in place.gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def usable_cores() -> list[int]:
    """Return the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


# --------------------------------------------------------------------------- placement


@dataclass(frozen=True, slots=True)
class Place:
    """Where one worker runs.

    cores: CPU cores. Empty: any. The worker's ranks share them.
    gpus: indices among the GPUs that this process may use."""

    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


def placements(options: UpOptions) -> list[Place]:
    """Return where each worker runs, in the order of ROLES."""
    ranks, gpus, cores = _ranks(options), accelerator.gpu_count(), usable_cores()
    ends = accumulate(ranks)
    if gpus:
        # Each rank gets a GPU of its own. Workers of one rank share GPUs if there are too few.
        return [
            Place(gpus=tuple(rank % gpus for rank in range(end - count, end)))
            for count, end in zip(ranks, ends, strict=True)
        ]
    if not options.pin or len(cores) < 2:
        return [Place() for _ in ranks]
    # Each worker gets cores of its own. To share them costs more than more threads bring.
    share = 1 if options.model == DEMO else max(1, len(cores) // max(1, sum(ranks)))
    places: list[Place] = []
    start = 0
    for count in ranks:
        width = min(share * count, len(cores))
        if start + width > len(cores):
            start = 0
        places.append(Place(cores=tuple(cores[start : start + width])))
        start += width
    return places
