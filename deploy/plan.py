"""What `pullfill up` will start. `check` refuses what cannot work, before anything runs.

`worker_specs` tells how to start workers and frontends, once NATS and etcd have addresses.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pullfill
from pullfill.config import ClusterRef, check_namespace, ranks_of
from pullfill.deploy import accelerator, defaults, devices, machine, servers, vllm_flags
from pullfill.deploy.procs import CLUSTER_ENV, spawn
from pullfill.errors import ConfigError, NotNow
from pullfill.ids import new_instance_id
from pullfill.net.security import OPEN
from pullfill.options import (
    ClusterOptions,
    RoleOptions,
    UpOptions,
    WorkerOptions,
    arguments,
    frontend_url,
)
from pullfill.registry import settings

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+\Z")
RESTART_WAIT_S = 30.0
"""How long requests wait for a decode worker that is restarted. Longer than most starts take."""


@dataclass(slots=True, kw_only=True)
class ProcessSpec:
    """One process to start.

    url: where a frontend answers. Empty for others.
    drain_s: how long it may drain.
    after: name of the worker on the same GPU that must be ready first. Empty: none."""

    name: str
    role: str
    argv: list[str]
    env: dict[str, str]
    instance_id: str | None = None
    url: str = ""
    drain_s: float = 60.0
    after: str = ""


def check(options: UpOptions) -> None:
    """Refuse, before anything starts, what cannot work. Raises ConfigError."""
    check_counts(options)
    check_namespace(options.namespace)
    _check_elastic(options)
    options.vllm_args = vllm_flags.check(options.vllm_args)
    vllm_flags.check_plain_http(options.vllm_args)
    devices.check(options)
    _check_gpus(options)
    check_settings(options.settings)
    check_model(options.model)
    if options.decode + options.prefill + options.frontends:
        machine.refuse_wrong_packages()
    if options.port == 0:
        options.port = servers.free_port()
    for port in (options.port, *filter(None, options.own_ports)):
        if options.frontends:
            servers.check_port("--port", options.host, port)
    _check_security(options)
    if options.etcd_url is None:
        servers.etcd_binary()
    elif why := servers.etcd_ready(options.etcd_url, 5.0, options.security.etcd.tls()):
        raise ConfigError(f"{why}. Check --etcd")
    if options.nats_url is None:
        servers.nats_binary()
    elif why := servers.nats_ready(options.nats_url, 5.0):
        raise ConfigError(f"{why}. Check --nats")


def check_counts(options: UpOptions) -> None:
    """Refuse frontends that nobody can serve. Raises ConfigError."""
    if options.frontends and not options.decode and not options.by_stock:
        raise ConfigError(
            "a frontend without a decode worker cannot serve: use --decode 1 or more, "
            "--frontends 0, or stock vLLM servers (--forwarder)"
        )


def _check_elastic(options: UpOptions) -> None:
    """Refuse flags of one role together with --elastic. Raises ConfigError."""
    workers, usual = options.workers, WorkerOptions()
    if not workers.elastic:
        return
    given = [f"--{role}-args" for role in ("decode", "prefill") if options.role_args.get(role)]
    given += ["--kv-mode"] * (workers.kv_mode != usual.kv_mode)
    given += ["--reserve-seats"] * workers.reserve_seats
    given += ["--concurrency"] * (workers.concurrency is not None)
    if given:
        raise ConfigError(
            f"{given[0]} is a flag of one role, but workers with --elastic change roles: remove "
            f"{given[0]} or --elastic"
        )


def _check_gpus(options: UpOptions) -> None:
    """Refuse too few GPUs. Workers may share a GPU only if none of them needs several."""
    if why := accelerator.why_not_mig():
        raise ConfigError(why)
    ranks = ranks_by_role(options)
    for pool in devices.pools(options):
        needed = [ranks[role] for role in pool.roles for _ in range(getattr(options, role))]
        here = len(pool.gpus)
        if here and max(needed, default=1) > 1 and sum(needed) > here:
            each = " + ".join(map(str, needed))
            raise ConfigError(
                f"the workers need {sum(needed)} GPUs (TP x PP: {each}), but there are {here}: "
                "start fewer workers, or choose a smaller -tp or -pp"
            )


def check_settings(given: Sequence[str]) -> None:
    """Refuse what is not `KEY=VALUE` of a setting. Raises ConfigError."""
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text!r}: give KEY=VALUE, e.g. router.policy=cost")
        settings.check(key, value)


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
    if model == defaults.DEMO:
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
    path = demo_directory() if model == defaults.DEMO else Path(model).expanduser()
    return str(path.absolute()) if model == defaults.DEMO or path.is_dir() else model


def demo_directory() -> Path:
    """Return the directory of the demo model, one per user and version of pullfill."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "pullfill" / f"demo-{pullfill.__version__}"


def start_demo_model(log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that makes the demo model unless it is there. See `check_demo_model`."""
    # Not in this process: it would have to load torch.
    command = [sys.executable, "-P", "-m", "pullfill.demo.checkpoint", str(demo_directory())]
    return spawn(command, log=log, env=env)


def check_demo_model(exit_code: int, log: Path) -> None:
    """Raise ConfigError if the process that makes the demo model has failed."""
    if exit_code:
        directory = demo_directory()
        raise NotNow(
            f"the demo model could not be made in {directory}: see {log}. Check the free space "
            f"({shutil.disk_usage(_existing(directory)).free >> 20} MiB), then try again"
        )


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def engine_arguments(options: UpOptions) -> list[str]:
    """Return the vLLM flags of every process: the defaults, then the user's."""
    workers, gpus = devices.most_on_a_gpu(options)
    return defaults.engine_flags(options.model, gpus=gpus, workers=workers) + options.vllm_args


def worker_arguments(options: UpOptions, role: str) -> list[str]:
    """Return the vLLM flags of every worker or frontend of the role."""
    return engine_arguments(options) + options.role_args.get(role, [])


def served_name(options: UpOptions) -> str:
    """Return the model name that clients must send.

    It is the first name of `--served-model-name`. If the flag is given twice, the last one counts.
    Without the flag, it is the model's path or its name at the hub."""
    name = resolve_model(options.model)
    for flag, *values in vllm_flags.group_flags(worker_arguments(options, "frontend")):
        given, _, joined = flag.partition("=")
        known = vllm_flags.flag_name(given)
        if known == "served-model-name":
            name = joined or next(iter(values), name)
    return name


def ranks_by_role(options: UpOptions) -> dict[str, int]:
    """Return TP x PP of a decode worker and of a prefill worker."""
    return {role: ranks_of(worker_arguments(options, role)) for role in devices.ROLES}


def role_command(role: str, cluster: ClusterRef, model: str, options: RoleOptions) -> list[str]:
    """Return the command line of one worker or frontend, without vLLM flags."""
    where = ClusterOptions(
        etcd=cluster.etcd_url,
        nats=cluster.nats_url,
        namespace=cluster.namespace,
        state_dir=str(cluster.state_dir) if cluster.state_dir else None,
        security=cluster.security.path or None,
    )
    # -P: what lies in the user's directory must not shadow modules.
    argv = [sys.executable, "-P", "-m", "pullfill.deploy.cli", role]
    return [*argv, *arguments(where), *arguments(replace(options, model=model), role)]


def placements(options: UpOptions) -> list[defaults.Placement]:
    """Return where each worker runs: first the decode workers, then the prefill workers."""
    ranks, small = ranks_by_role(options), options.model == defaults.DEMO
    return [
        place
        for pool in devices.pools(options)
        for place in pool.place(
            [ranks[role] for role in pool.roles for _ in range(getattr(options, role))],
            pin=options.workers.pin,
            small=small,
        )
    ]


def other_cores(options: UpOptions) -> tuple[int, ...]:
    """Return the cores of frontends once all processes are ready. Empty: any."""
    return defaults.other_cores(placements(options), options.decode, defaults.usable_cores())


def renewed(spec: ProcessSpec) -> ProcessSpec:
    """Return the spec to start the process again. Workers and frontends get a new instance id."""
    if spec.instance_id is None:
        return spec
    fresh = new_instance_id(spec.role)
    argv = [fresh if part == spec.instance_id else part for part in spec.argv]
    return replace(spec, argv=argv, instance_id=fresh)


def _turns(options: UpOptions, places: Sequence[defaults.Placement]) -> list[int | None]:
    """As `defaults.starts_after`. No worker waits if all were given the size of their KV cache."""
    told = [
        defaults.KV_BYTES in map(vllm_flags.flag_name, worker_arguments(options, role))
        for role in ("decode", "prefill")
        if getattr(options, role)
    ]
    return [None] * len(places) if all(told) else defaults.starts_after(places)


def worker_spec(
    options: UpOptions,
    cluster: ClusterRef,
    cluster_id: str,
    name: str,
    place: defaults.Placement,
    *,
    after: str = "",
    own_port: int = 0,
) -> ProcessSpec:
    """Return how to start one worker or frontend. Its role is the first word of its name.

    own_port: of a frontend. 0: any free one."""
    role = name.partition("-")[0]
    model, instance, url = resolve_model(options.model), new_instance_id(role), ""
    flags = worker_arguments(options, role)
    told: RoleOptions = replace(options.workers, cores=place.cores)
    if role == "frontend":
        url = frontend_url(options.host, own_port or options.port)
        told = replace(
            options.frontend,
            host=options.host,
            port=options.port,
            own_port=own_port,
            restart_wait_s=RESTART_WAIT_S if options.restart else 0.0,
        )
    else:
        flags = vllm_flags.for_worker(flags)
    argv = role_command(role, cluster, model, replace(told, instance_id=instance)) + flags
    base = {**os.environ, CLUSTER_ENV: cluster_id}
    return ProcessSpec(
        name=name,
        role=role,
        argv=argv,
        env=defaults.worker_env(base, place, local_model=os.path.isdir(model)),
        instance_id=instance,
        url=url,
        drain_s=options.drain_s(role),
        after=after,
    )


def worker_specs(options: UpOptions, cluster: ClusterRef, cluster_id: str) -> list[ProcessSpec]:
    """Return how to start the decode workers, the prefill workers and the frontends."""
    specs: list[ProcessSpec] = []
    names = [f"{role}-{i}" for role in devices.ROLES for i in range(getattr(options, role))]
    places = placements(options)
    for name, place, before in zip(names, places, _turns(options, places), strict=True):
        after = "" if before is None else names[before]
        specs.append(worker_spec(options, cluster, cluster_id, name, place, after=after))
    for index, own_port in enumerate(options.own_ports):
        name, place = f"frontend-{index}", defaults.Placement()
        specs.append(worker_spec(options, cluster, cluster_id, name, place, own_port=own_port))
    return specs
