"""`pullfill decode | prefill | frontend`: one process that joins a cluster.

The environment (cores, threads, offline hub) must be right before vLLM is imported, so it is set
here, and only then the role's own `run` is imported and called.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pullfill.config import (
    STANDING_LINKS,
    ClusterRef,
    FrontendOptions,
    WorkerOptions,
    check_address,
    check_url,
    parse_transports,
    ranks_of,
    split_urls,
)
from pullfill.deploy import accelerator, defaults, flags, plan
from pullfill.deploy.servers import port_problem, split_url
from pullfill.deploy.state import Launch, StateDir
from pullfill.errors import ConfigError
from pullfill.ids import is_name
from pullfill.net.security import Security
from pullfill.wire import DigestMode, KvMode


@dataclass(slots=True, kw_only=True)
class RoleCommand:
    """The command line of a role. cluster: (state_dir, etcd, nats, namespace)."""

    cluster: tuple[str | None, str | None, str | None, str | None]
    security: str | None = None
    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    instance_id: str | None = None
    cpu: str | None = None
    pin: bool = True
    lease_ttl_s: int = 5
    drain_timeout_s: float = 60.0
    connect_timeout_s: float = 30.0
    engine_stall_s: float = 60.0
    kv_digest: DigestMode = DigestMode.OFF
    kv_mode: KvMode = KvMode.PUSH_ASYNC
    kv_credits: int | None = None
    standing_links: int = STANDING_LINKS
    control_port: int = 0
    advertise_control: str | None = None
    transports: str | None = None
    kv_port: int = 0
    http_port: int = 0
    data_port: int = 0
    advertise: str | None = None
    advertise_kv: str | None = None
    max_inflight: int = 1024
    restart_wait_s: float = 0.0
    vllm_args: list[str] = field(default_factory=list)


def run_worker(role: str, command: RoleCommand) -> int:
    """Run a decode or prefill worker until it drained; its exit code."""
    _check_ports(command)
    ref, model, arguments = _prepare(role, command)
    _warn_if_exposed(role, command.host, ref.security)
    _warn_if_unreachable(role, command.host, ref)
    cores = cores_of(command, ref, small=command.model in (None, defaults.DEMO))
    _apply(cores, local_model=os.path.isdir(model), ranks=ranks_of(arguments))
    options = WorkerOptions(
        model=model,
        host=command.host,
        instance_id=command.instance_id,
        lease_ttl_s=command.lease_ttl_s,
        drain_timeout_s=command.drain_timeout_s,
        cpu=cores[0] if len(cores) == 1 else None,
        connect_timeout_s=command.connect_timeout_s,
        engine_stall_s=command.engine_stall_s,
        kv_digest=command.kv_digest,
        kv_mode=command.kv_mode,
        kv_credits=None if command.kv_credits is None else command.kv_credits << 20,
        standing_links=command.standing_links,
        control_port=command.control_port,
        advertise_control=command.advertise_control,
        transports=parse_transports(command.transports),
        kv_port=command.kv_port,
        http_port=command.http_port,
        data_port=command.data_port,
        advertise_kv=check_address("--advertise-kv", command.advertise_kv),
    )
    extra = defaults.role_flags(role, arguments, gpus=accelerator.gpu_count())
    return _entry(role)(ref, options, extra + defaults.worker_flags(arguments))


def run_frontend(command: RoleCommand) -> int:
    """Run a frontend until it drained; its exit code."""
    ref, model, arguments = _prepare("frontend", command)
    if not any(arg.startswith("--api-key") for arg in arguments):
        _warn_if_exposed("frontend", command.host, ref.security)
    problem = port_problem(command.host, command.port)
    if problem:
        raise ConfigError(
            f"cannot listen on {command.host}:{command.port} ({problem}): stop what uses it, or "
            "choose another with --port N"
        )
    _apply((), local_model=os.path.isdir(model))
    options = FrontendOptions(
        model=model,
        host=command.host,
        port=command.port,
        instance_id=command.instance_id,
        lease_ttl_s=command.lease_ttl_s,
        drain_timeout_s=command.drain_timeout_s,
        connect_timeout_s=command.connect_timeout_s,
        max_inflight=command.max_inflight,
        restart_wait_s=command.restart_wait_s,
        advertise=check_url("--advertise", command.advertise),
    )
    return _entry("frontend")(ref, options, arguments)


def _check_ports(command: RoleCommand) -> None:
    """Check, before the model is loaded, that the worker can listen where it is told.

    Replaces a host name by its address, since the socket for frontends binds IPv4 addresses only.
    Raises ConfigError."""
    given = command.host
    try:
        found = socket.getaddrinfo(given, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ConfigError(
            f"--host {given!r} has no IPv4 address: give one of this machine's, e.g. "
            "--host 10.0.0.5"
        ) from None
    command.host = str(found[0][4][0])
    if ipaddress.ip_address(command.host).is_unspecified:
        raise ConfigError(
            f"--host {given!r} is also the address that others get: give one of this machine's, "
            "e.g. "
            "--host 10.0.0.5"
        )
    flags = {
        "--control-port": command.control_port,
        "--kv-port": command.kv_port,
        "--http-port": command.http_port,
        "--data-port": command.data_port,
    }
    if why := port_problem(command.host, 0):
        raise ConfigError(
            f"cannot listen on --host {given} ({why}): give an address of this machine"
        )
    for flag, port in flags.items():
        if port and (why := port_problem(command.host, port)):
            raise ConfigError(
                f"cannot listen on {command.host}:{port} ({why}): stop what uses it, or choose "
                f"another with {flag} N"
            )
        if port and list(flags.values()).count(port) > 1:
            raise ConfigError(f"{flag} {port} is given to two servers: choose different ports")


def _warn_if_unreachable(role: str, host: str, ref: ClusterRef) -> None:
    """Warn if a worker listens on loopback in a cluster of several machines."""
    servers = [split_url(url, 0)[0] for url in split_urls(ref.etcd_url)]
    if _is_loopback(host) and not any(map(_is_loopback, servers)):
        print(
            f"WARNING: this {role} worker is at {host}, which only this machine reaches, but etcd "
            f"is at {servers[0]}: workers and frontends elsewhere cannot use it. Give this "
            "machine's address with --host",
            file=sys.stderr,
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _warn_if_exposed(role: str, host: str, security: Security) -> None:
    """Warn if the worker listens beyond loopback without keys: anybody could connect as a peer."""
    if _is_loopback(host):
        return
    if role == "frontend" and security.frontend.api_key_file is None:
        what, key = "send it requests", "[frontend] api_key_file (or --api-key)"
    elif role == "decode" and security.cluster.key_file is None:
        what, key = "claim jobs, read and write KV and run requests", "[cluster] key_file"
    elif role == "prefill" and security.cluster.key_file is None:
        what, key = "connect to its KV port", "[cluster] key_file"
    else:
        return
    print(
        f"WARNING: this {role} listens on {host}, and whoever reaches it can {what}: set {key} in "
        "a --security file (docs/security.md)",
        file=sys.stderr,
    )


def _entry(role: str) -> Callable[[ClusterRef, Any, list[str]], int]:
    # Imported here: each pulls in vLLM, and the environment must be set before that.
    if role == "decode":
        from pullfill.decode_worker.main import run as decode

        return decode
    if role == "prefill":
        from pullfill.prefill_worker.main import run as prefill

        return prefill
    from pullfill.frontend.main import run as frontend

    return frontend


def _prepare(role: str, command: RoleCommand) -> tuple[ClusterRef, str, list[str]]:
    """The cluster, the model's path, and the vLLM flags. Raises ConfigError."""
    if command.instance_id is not None and not is_name(command.instance_id):
        raise ConfigError(f"instance id {command.instance_id!r}: lower-case letters, digits, -, _")
    flags.check(command.vllm_args)
    state_dir, etcd, nats, namespace = command.cluster
    ref = ClusterRef.resolve(
        state_dir=state_dir,
        etcd=etcd,
        nats=nats,
        namespace=namespace,
        security=command.security,
    )
    launch = None
    if ref.state_dir is not None and not (etcd and nats):
        launch = StateDir(ref.state_dir).launch()
    model, arguments = _model_and_flags(role, command, launch)
    plan.check_model(model)
    if model == defaults.DEMO:
        log = plan.demo_directory().parent / "demo-model.log"
        with plan.start_demo_model(log, os.environ) as maker:
            plan.check_demo_model(maker.wait(), log)
    return ref, plan.resolve_model(model)[0], arguments


def _model_and_flags(
    role: str, command: RoleCommand, launch: Launch | None
) -> tuple[str, list[str]]:
    """A worker that joins the local cluster gets the flags the cluster was started with: another
    dtype or block size could not exchange KV."""
    model = command.model or (launch.model if launch else None)
    if model is None:
        raise ConfigError("which model? Give --model PATH, the same as the cluster's")
    if launch is not None and model == launch.model:
        own = launch.role_args.get(role, [])
        return model, [*launch.engine_args, *own, *command.vllm_args]
    base: list[str] = []
    if model == defaults.DEMO:
        base = defaults.engine_flags(model, gpus=accelerator.gpu_count(), workers=2)
    return model, base + command.vllm_args


def cores_of(command: RoleCommand, ref: ClusterRef, *, small: bool) -> tuple[int, ...]:
    if command.cpu is not None:
        try:
            cores = defaults.parse_cores(command.cpu)
        except ValueError:
            raise ConfigError(f"--cpu {command.cpu!r}: give core numbers, e.g. 1 or 0-3") from None
        missing = sorted(set(cores) - set(defaults.usable_cores()))
        if missing:
            raise ConfigError(f"--cpu: there is no core {missing[0]} here (0-{os.cpu_count()})")
        return cores
    usable = defaults.usable_cores()
    if not small or not command.pin or len(usable) < 2 or accelerator.gpu_count():
        return ()
    return (_quietest_core(usable, ref),)


def _quietest_core(usable: list[int], ref: ClusterRef) -> int:
    """The core with the least of the local cluster pinned to it. Company hurts a decode worker
    more than a prefill worker: every step of its streams waits."""
    weight = dict.fromkeys(usable, 0)
    if ref.state_dir is not None:
        with suppress(ConfigError):
            for entry in StateDir(ref.state_dir).live():
                with suppress(OSError):
                    mask = os.sched_getaffinity(entry.pid)
                    if len(mask) == 1 and mask <= weight.keys():
                        weight[min(mask)] += 3 if entry.role == "decode" else 2
    return min(usable, key=lambda core: (weight[core], core))


def _apply(cores: tuple[int, ...], *, local_model: bool, ranks: int = 1) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
    placement = defaults.Placement(cores=cores, ranks=ranks)
    os.environ.update(defaults.worker_env(os.environ, placement, local_model=local_model))
