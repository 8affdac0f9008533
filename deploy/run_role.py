"""`pullfill worker | decode | prefill | frontend`: one process that joins a cluster.

vLLM reads the environment and the cores when it is imported. So they are set here first. Then the
role's own `run` is imported and called.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

from pullfill.config import ClusterRef, split_urls
from pullfill.deploy import accelerator, machine, plan, vllm_flags
from pullfill.deploy.local_servers import check_port, split_url
from pullfill.deploy.state import StateDir
from pullfill.errors import ConfigError, NotNow
from pullfill.ids import is_name
from pullfill.net.security import Security
from pullfill.options import ClusterOptions, FrontendOptions, RoleOptions, WorkerOptions, declared


def run_worker(
    role: str, options: WorkerOptions, cluster: ClusterOptions, vllm_args: Sequence[str]
) -> int:
    """Run a worker until it has drained. Return its exit code. role: the command."""
    options = replace(options, host=_address_of(options))
    ref, model, arguments = _prepare(role, options, cluster, vllm_args)
    warn_if_exposed(role, options.host, ref.security)
    _warn_if_unreachable(role, options.host, ref)
    if missing := sorted(set(options.cores) - set(plan.usable_cores())):
        raise ConfigError(f"--cpu: there is no core {missing[0]} here (0-{os.cpu_count()})")
    if model == plan.resolve_model(plan.DEMO):
        # It is small: more threads cost more than they do.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.cores:
        os.sched_setaffinity(0, options.cores)
    extra = plan.role_flags(role, arguments, gpus=accelerator.gpu_count())
    options = replace(options, model=model)
    # It imports vLLM, which reads the environment.
    from pullfill.worker.process import run

    return run(role, ref, options, extra + vllm_flags.for_worker(arguments))


def run_frontend(
    options: FrontendOptions, cluster: ClusterOptions, vllm_args: Sequence[str]
) -> int:
    """Run a frontend until it has drained. Return its exit code."""
    ref, model, arguments = _prepare("frontend", options, cluster, vllm_args)
    if not any(arg.startswith("--api-key") for arg in arguments):
        warn_if_exposed("frontend", options.host, ref.security)
    # It imports vLLM, which reads the environment.
    from pullfill.frontend.main import run

    return run(ref, replace(options, model=model), arguments)


def _address_of(options: WorkerOptions) -> str:
    """Return the IPv4 address of `--host`. The worker can listen there, at all of its ports.

    Raises ConfigError, before the model is loaded."""
    # The socket for frontends binds IPv4 addresses only.
    name = options.host
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise NotNow(
            f"--host {name!r} has no IPv4 address: give one of this machine's, e.g. --host 10.0.0.5"
        ) from None
    host = str(found[0][4][0])
    if ipaddress.ip_address(host).is_unspecified:
        raise ConfigError(
            f"--host {name!r} is also the address that others get: give one of this machine's, "
            "e.g. --host 10.0.0.5"
        )
    check_port("--host", host, 0)
    ports = {
        one.name: port
        for one in declared(WorkerOptions)
        if one.name.endswith("-port") and (port := getattr(options, one.field))
    }
    for flag, port in ports.items():
        check_port(flag, host, port)
        if list(ports.values()).count(port) > 1:
            raise ConfigError(f"{flag} {port} is given to two servers: choose different ports")
    return host


def _warn_if_unreachable(role: str, host: str, ref: ClusterRef) -> None:
    """Warn if a worker listens on loopback in a cluster of several machines."""
    servers = [split_url(url, 0)[0] for url in split_urls(ref.etcd_url)]
    if _is_loopback(host) and not any(map(_is_loopback, servers)):
        _warn(
            f"this worker is at {host}, which only this machine reaches, but etcd is at "
            f"{servers[0]}: workers and frontends elsewhere cannot use it. Give this machine's "
            "address with --host"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def warn_if_exposed(role: str, host: str, security: Security) -> None:
    """Warn if a process listens beyond loopback without keys: anybody could connect as a peer."""
    if role == "frontend":
        open_to_all = security.frontend.api_key_file is None
        what, key = "send it requests", "[frontend] api_key_file (or --api-key)"
    else:
        open_to_all = security.cluster.key_file is None
        what, key = "connect to its KV port", "[cluster] key_file"
        if role != "prefill":
            what = "claim jobs, read and write KV and run requests"
    if open_to_all and not _is_loopback(host):
        _warn(
            f"this {role} listens on {host}, and whoever reaches it can {what}: set {key} in a "
            "--security file (docs/operations.md)"
        )


def _warn(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr)


def _prepare(
    role: str, options: RoleOptions, cluster: ClusterOptions, vllm_args: Sequence[str]
) -> tuple[ClusterRef, str, list[str]]:
    """Return the cluster, the model's path, and the vLLM flags. Raises ConfigError."""
    if options.instance_id is not None and not is_name(options.instance_id):
        raise ConfigError(f"instance id {options.instance_id!r}: lower-case letters, digits, -, _")
    vllm_flags.check(vllm_args)
    machine.refuse_wrong_packages()
    ref = cluster.find()
    here = None
    if ref.state_dir is not None and not (cluster.etcd and cluster.nats):
        here = StateDir(ref.state_dir).readable()
    model = options.model or (here.model if here else "")
    if not model:
        raise ConfigError("which model? Give --model PATH, the same as the cluster's")
    base: list[str] = []
    # A worker that joins the local cluster gets the flags that the cluster was started with. With
    # another dtype or block size it could not exchange KV.
    if here and here.model and plan.resolve_model(model) == plan.resolve_model(here.model):
        base = [*here.engine_args, *here.role_args.get(role, [])]
    elif model == plan.DEMO:
        base = plan.engine_flags(model, gpus=accelerator.gpu_count(), workers=2)
    plan.check_model(model)
    if model == plan.DEMO:
        plan.make_demo_model()
    return ref, plan.resolve_model(model), [*base, *vllm_args]
