"""`pullfill up`: starts everything, waits until it is ready, then keeps it running.

Life: lock the state directory → check → servers → workers and frontends in parallel → self-checks →
ready → restart what dies, until Ctrl-C, SIGTERM, `pullfill down`, or the end of every process →
drain. Each child is recorded in cluster.json right after its start, so that
`pullfill down` finds it even if this process was killed. A failed start stops everything and leaves
nothing running.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from pullfill.config import ClusterFile, ClusterRef
from pullfill.deploy import defaults, members, plan, servers
from pullfill.deploy.children import Children, StartFailed
from pullfill.deploy.disk import DiskWatch
from pullfill.deploy.down import stop_in_order, take_down
from pullfill.deploy.keeper import Keeper
from pullfill.deploy.procs import CLUSTER_ENV, is_alive, start_time, tail, wait_exit
from pullfill.deploy.readiness import keep_frontends_off, wait_ready
from pullfill.deploy.state import Launch, Locked, StateDir, identity, new_cluster_id
from pullfill.deploy.view import ProcessView
from pullfill.errors import ConfigError, RegistryUnavailable
from pullfill.net.this_host import pid_space
from pullfill.options import UpOptions
from pullfill.registry.settings import store as store_setting

START_FAILED_DRAIN_S = 5.0
SERVER_READY_S = 30.0
SERVER_TRIES = 3
SELF_CHECKS_S = 10.0
"""Longest wait for the self-checks, once all processes are ready."""
_POLL_S = 0.1


class Interrupted(Exception):
    """SIGINT or SIGTERM while the cluster started."""


class Supervisor:
    """One run of `up` over one state directory. Owns its children until they are let go."""

    def __init__(self, options: UpOptions, state: StateDir, view: ProcessView) -> None:
        self._options = options
        self._state = state
        self._view = view
        self._cluster_id = new_cluster_id()
        self._cluster = ClusterFile(
            namespace=options.namespace,
            nats_url=options.nats_url or "",
            etcd_url=options.etcd_url or "",
            frontend_url="",
        )
        if options.security.path:
            self._cluster.security = options.security.path
        self._signals = 0
        self._stop = asyncio.Event()
        self._children = Children(self._cluster, state, view)

    async def start(self) -> None:
        """Start all processes and wait until they are ready.

        Raises ConfigError, StartFailed or Interrupted. Then nothing is left running."""
        self._catch_signals()
        with self._state.locked():
            self._state.refuse_if_live()
            plan.check(self._options)
            self._cluster.frontend_url = self._options.frontend_url  # --port 0 is chosen by now
            self._state.prepare()
            own, model = os.getpid(), self._options.model
            self._state.write_launch(
                Launch(
                    cluster_id=self._cluster_id,
                    model=model if model == defaults.DEMO else plan.resolve_model(model),
                    engine_args=plan.engine_arguments(self._options),
                    role_args=self._options.role_args,
                    supervisor_pid=own,
                    supervisor_started=start_time(own) or 0,
                    supervisor_space=pid_space(),
                    restart=self._options.restart,
                )
            )
            self._state.write_cluster(self._cluster)
            try:
                await self._interruptible(self._start_all())
            except BaseException:
                await self._take_down(START_FAILED_DRAIN_S)
                self._children.reap()
                raise

    async def watch(self, *, detached: bool) -> None:
        """Restart what dies, until a signal, `pullfill down`, or the end of every process.

        Then drain the rest. Returns when nothing runs any more.

        detached: also stay, with no process left, so that `pullfill status` can show what was given
        up.
        """
        keeper = Keeper(self._options, self._children, self._stop, self._cluster_id)
        keeper.watch(*self._children.names)
        loop = asyncio.get_running_loop()
        stop, ended = loop.create_task(self._stop.wait()), loop.create_task(keeper.ended())
        disk = loop.create_task(DiskWatch(self._children, restart=self._options.restart).watch())
        await asyncio.wait([stop, ended], return_when=asyncio.FIRST_COMPLETED)
        if detached and any(entry.gave_up for entry in self._cluster.processes):
            await stop
        if self._stop.is_set() and not self._state.stopping():
            self._view.say("stopping: workers finish their streams (again to force)", "yellow")
        await self._stop_rest()
        await keeper.forget(*keeper.watched)
        for task in (stop, ended, disk):
            task.cancel()
        await asyncio.gather(stop, ended, disk, return_exceptions=True)
        self._children.reap()

    def let_go(self) -> None:
        """Let the children outlive this process."""
        self._children.let_go()

    async def _stop_rest(self) -> None:
        """Stop what runs and remove the record, unless `pullfill down` is doing that."""
        self._view.title = "stopping pullfill"
        while True:
            try:
                with self._state.locked():
                    launch = self._state.launch()
                    if launch is None or launch.cluster_id == self._cluster_id:
                        with self._view:
                            return await self._take_down()
            except Locked:
                if not any(is_alive(identity(entry)) for entry in self._cluster.processes):
                    return
                await asyncio.sleep(_POLL_S)
                continue
            except ConfigError as exc:  # the directory is gone, and cannot be made again
                self._view.say(str(exc), "yellow")
            # Our record was deleted. There is none, or it is of another `up`.
            with self._view:
                entries = self._cluster.processes
                await stop_in_order(entries, self._view, None, lambda: self._signals > 1)
            return

    async def _take_down(self, drain_s: float | None = None) -> None:
        entries, force = self._cluster.processes, lambda: self._signals > 1
        await take_down(self._state, entries, self._view, drain_s=drain_s, force=force)

    def _catch_signals(self) -> None:
        def on_signal() -> None:
            self._signals += 1
            self._stop.set()

        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(sig, on_signal)

    async def _interruptible(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Interrupted
            task.result()
        finally:
            for future in (task, stop):
                future.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    @property
    def _ref(self) -> ClusterRef:
        """Where the cluster is. The URLs of its servers are known once those are ready."""
        return ClusterRef(
            self._cluster.namespace,
            self._cluster.etcd_url,
            self._cluster.nats_url,
            self._state.path,
            self._options.security,
        )

    # ------------------------------------------------------------------ start

    async def _start_all(self) -> None:
        view, options = self._view, self._options
        first = [
            self._start_server("nats", "nats", servers.nats_command, servers.nats_ready),
            self._start_server("etcd", "http", servers.etcd_command, servers.etcd_ready),
        ]
        if options.decode + options.prefill + options.frontends and options.model == defaults.DEMO:
            first.insert(0, self._make_demo_model())
        await asyncio.gather(*first)
        ref = self._ref
        await self._store_settings(ref)
        specs = plan.worker_specs(options, ref, self._cluster_id)
        for spec in specs:
            if spec.after:
                view.set(spec.name, "waiting", f"for {spec.after}, on the same GPU")
            else:
                self._children.launch(spec)
        if not specs:
            return
        await wait_ready(options, self._children, ref, specs)
        # Frontends no longer compete with the workers for a quick start. NATS and etcd use little
        # and stay where they find room.
        keep_frontends_off(options, self._children, [spec.name for spec in specs])
        if options.prefill:
            await self._wait_checked(ref, specs)

    async def _make_demo_model(self) -> None:
        self._view.set("demo model", "starting", "made on first use")
        log = self._state.log_of("demo-model")
        maker = plan.start_demo_model(log, {**os.environ, CLUSTER_ENV: self._cluster_id})
        try:
            plan.check_demo_model(await wait_exit(maker), log)
        finally:
            maker.kill()
            maker.wait()
        self._view.set("demo model", "ready", str(plan.demo_directory()))

    async def _store_settings(self, ref: ClusterRef) -> None:
        """Store what `--set` gives, before any worker reads it."""
        if self._options.settings:
            async with members.etcd_of(ref, wait_s=SERVER_READY_S) as etcd:
                for text in self._options.settings:
                    key, _, value = text.partition("=")
                    await store_setting(etcd, ref.namespace, key, value)

    async def _start_server(
        self,
        name: str,
        scheme: str,
        command: Callable[[Path, int], list[str]],
        problem: Callable[[str], str | None],
    ) -> None:
        """Start a server, unless the user has one. Try other ports if its port is taken."""
        if getattr(self._options, f"{name}_url"):
            return
        for attempt in range(1, SERVER_TRIES + 1):
            port = servers.free_port()
            url = f"{scheme}://127.0.0.1:{port}"
            setattr(self._cluster, f"{name}_url", url)
            argv = command(self._state.path / name, port)
            env = {**os.environ, CLUSTER_ENV: self._cluster_id}
            spec = plan.ProcessSpec(name=name, role=name, argv=argv, env=env)
            self._children.launch(spec, note=url)
            try:
                return await self._server_ready(name, url, problem)
            except StartFailed:
                text = "\n".join(tail(self._state.log_of(name), 50))
                if attempt == SERVER_TRIES or "address already in use" not in text:
                    raise

    async def _server_ready(
        self, name: str, url: str, problem: Callable[[str], str | None]
    ) -> None:
        deadline = time.monotonic() + SERVER_READY_S
        while True:
            self._children.raise_if_dead(name)
            if await asyncio.to_thread(problem, url) is None:
                return self._view.set(name, "ready")
            if time.monotonic() > deadline:
                raise StartFailed(
                    self._children.describe(name, f"was not ready after {SERVER_READY_S:.0f} s")
                )
            await asyncio.sleep(_POLL_S / 2)

    async def _wait_checked(self, ref: ClusterRef, specs: list[plan.ProcessSpec]) -> None:
        """Wait for the self-checks of the decode workers. If they take too long, say so.

        Until a self-check is over, the decode worker prefills every prompt itself."""
        waiting = {str(spec.instance_id): spec.name for spec in specs if spec.role == "decode"}
        with suppress(RegistryUnavailable, TimeoutError):
            async with asyncio.timeout(SELF_CHECKS_S), members.etcd_of(ref) as etcd:
                while waiting:
                    for worker in await members.workers(etcd, ref.namespace):
                        if worker.instance_id in waiting:
                            report = await asyncio.to_thread(members.ask_worker, worker)
                            if report is not None and report.self_checks_over:
                                del waiting[worker.instance_id]
                    await asyncio.sleep(_POLL_S)
        if waiting:
            self._view.say(
                f"{', '.join(waiting.values())}: the self-checks are not over yet; until they are, "
                "every prompt is prefilled there",
                "yellow",
            )
