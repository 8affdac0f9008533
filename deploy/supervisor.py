"""`pullfill up`: starts everything, waits until it is ready, then watches or lets go.

Life: check → lock the state directory → servers → workers and frontends in parallel → ready →
(detached: return) or (foreground: wait for Ctrl-C, SIGTERM, or the end of every process) → drain.
Each child is recorded in cluster.json right after it was started, so `pullfill down` finds it also
when this process is killed. A failed start stops what was started and leaves nothing running.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from pullfill.config import ClusterFile, ClusterRef, ProcessEntry
from pullfill.deploy import membership, plan, servers
from pullfill.deploy.procs import (
    CLUSTER_ENV,
    confine,
    exit_words,
    spawn,
    start_time,
    tail,
    wait_exit,
)
from pullfill.deploy.state import Launch, Locked, StateDir, new_cluster_id
from pullfill.deploy.teardown import take_down
from pullfill.deploy.view import ProcessView
from pullfill.errors import UnavailableError

START_FAILED_DRAIN_S = 5.0
SERVER_READY_S = 30.0
SERVER_TRIES = 3
_POLL_S = 0.1


class StartFailed(UnavailableError):
    """A process died or was not ready in time while the cluster started."""


class Interrupted(Exception):
    """SIGINT or SIGTERM while the cluster started."""


class Supervisor:
    """One run of `up` over one state directory. Owns its children until they are let go."""

    def __init__(self, options: plan.UpOptions, state: StateDir, view: ProcessView) -> None:
        self._options = options
        self._state = state
        self._view = view
        self._cluster_id = new_cluster_id()
        self._cluster = ClusterFile(
            namespace=options.namespace,
            nats_url=options.nats_url or "",
            etcd_url=options.etcd_url or "",
            frontend_url=options.frontend_url,
        )
        if options.security.path:
            self._cluster.security = options.security.path
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._signals = 0
        self._stop = asyncio.Event()

    async def start(self) -> None:
        """Bring everything up. Raises ConfigError, StartFailed or Interrupted with nothing left
        running."""
        self._catch_signals()
        with self._state.locked():
            self._state.refuse_if_live()
            plan.check(self._options)
            self._cluster.frontend_url = self._options.frontend_url  # --port 0 is chosen by now
            self._state.prepare()
            own = os.getpid()
            self._state.write_launch(
                Launch(
                    cluster_id=self._cluster_id,
                    model=self._options.model,
                    engine_args=plan.engine_arguments(self._options),
                    role_args=self._options.role_args,
                    supervisor_pid=own,
                    supervisor_started=start_time(own) or 0,
                )
            )
            self._state.write_cluster(self._cluster)
            try:
                await self._interruptible(self._start_all())
            except BaseException:
                await take_down(
                    self._state,
                    self._cluster.processes,
                    self._view,
                    drain_s=START_FAILED_DRAIN_S,
                    force=lambda: self._signals > 1,
                )
                self._reap()
                raise

    async def watch(self) -> None:
        """Foreground: report children that end, until a signal or until none is left; then drain
        the rest. Returns when nothing runs any more."""
        loop = asyncio.get_running_loop()
        watches = [loop.create_task(self._watch_child(name)) for name in self._children]
        stop = loop.create_task(self._stop.wait())
        everyone = loop.create_task(asyncio.wait(watches))
        await asyncio.wait([stop, everyone], return_when=asyncio.FIRST_COMPLETED)
        if self._stop.is_set() and not self._stopped_by_down():
            self._view.say("stopping: workers finish their streams (again to force)", "yellow")
            await self._drain()
        else:
            # `pullfill down` is at work, or everything died.
            await everyone
            if not self._stopped_by_down():
                await self._drain()
        for task in (stop, everyone, *watches):
            task.cancel()
        await asyncio.gather(stop, everyone, *watches, return_exceptions=True)
        self._reap()

    def let_go(self) -> None:
        """Detached: the children go on without us."""
        for child in self._children.values():
            # They are init's from now on; do not warn that they still run.
            child.returncode = child.poll() or 0

    # ------------------------------------------------------------------ start

    async def _start_all(self) -> None:
        view, options = self._view, self._options
        if options.decode + options.prefill + options.frontends and options.model == "demo":
            view.set("demo model", "starting", "made on first use, about a minute")
            await asyncio.gather(self._make_demo_model(), self._start_nats(), self._start_etcd())
            view.set("demo model", "ready", str(plan.demo_directory()))
        else:
            await asyncio.gather(self._start_nats(), self._start_etcd())
        ref = ClusterRef(
            self._cluster.namespace,
            self._cluster.etcd_url,
            self._cluster.nats_url,
            self._state.path,
        )
        specs = plan.worker_specs(options, ref, self._cluster_id)
        for spec in specs:
            self._launch(spec)
        if specs:
            await self._wait_ready(ref, specs)
            self._make_room()

    def _make_room(self) -> None:
        """Frontends keep off the prefill workers' cores, now that they no longer compete with the
        workers for a quick start. NATS and etcd use little and stay where they find room."""
        if cores := plan.other_cores(self._options):
            for entry in self._cluster.processes:
                if entry.role == "frontend":
                    confine(entry.pid, cores)

    async def _make_demo_model(self) -> None:
        log = self._state.log_of("demo-model")
        maker = plan.start_demo_model(log, {**os.environ, CLUSTER_ENV: self._cluster_id})
        try:
            plan.check_demo_model(await wait_exit(maker), log)
        finally:
            maker.kill()
            maker.wait()

    async def _start_nats(self) -> None:
        if self._options.nats_url:
            return

        async def once() -> None:
            port = servers.free_port()
            url = f"nats://127.0.0.1:{port}"
            argv = servers.nats_command(self._state.path / "nats", port)
            self._cluster.nats_url = url
            self._launch(self._server_spec("nats", argv), note=url)
            await self._server_ready("nats", lambda: servers.nats_ready(url))

        await self._with_tries("nats", once)

    async def _start_etcd(self) -> None:
        if self._options.etcd_url:
            return

        async def once() -> None:
            port, peer = servers.free_port(), servers.free_port()
            url = f"http://127.0.0.1:{port}"
            argv = servers.etcd_command(self._state.path / "etcd", port, peer)
            self._cluster.etcd_url = url
            self._launch(self._server_spec("etcd", argv), note=url)
            await self._server_ready("etcd", lambda: servers.etcd_ready(url))

        await self._with_tries("etcd", once)

    async def _with_tries(self, name: str, once: Callable[[], Awaitable[None]]) -> None:
        """A free port can be taken between the look and the bind: then try another."""
        for attempt in range(1, SERVER_TRIES + 1):
            try:
                return await once()
            except StartFailed:
                text = "\n".join(tail(self._state.log_of(name), 50))
                if attempt == SERVER_TRIES or "address already in use" not in text:
                    raise

    def _server_spec(self, name: str, argv: list[str]) -> plan.ProcessSpec:
        env = {**os.environ, CLUSTER_ENV: self._cluster_id}
        return plan.ProcessSpec(name=name, role=name, argv=argv, env=env)

    def _launch(self, spec: plan.ProcessSpec, note: str = "") -> None:
        log = self._state.log_of(spec.name)
        try:
            child = spawn(spec.argv, log=log, env=spec.env)
        except OSError as exc:
            raise StartFailed(f"cannot start {spec.name} ({spec.argv[0]}): {exc.strerror}") from exc
        self._children[spec.name] = child
        entry = ProcessEntry(
            name=spec.name,
            role=spec.role,
            instance_id=spec.instance_id,
            pid=child.pid,
            log=str(log),
            started=start_time(child.pid) or 0,
            url=spec.url,
        )
        others = [e for e in self._cluster.processes if e.name != spec.name]
        self._cluster.processes = [*others, entry]
        self._state.write_cluster(self._cluster)
        self._view.set(spec.name, "starting", note or spec.url or f"pid {child.pid}")

    async def _server_ready(self, name: str, problem: Callable[[], str | None]) -> None:
        deadline = time.monotonic() + SERVER_READY_S
        while True:
            self._raise_if_dead(name)
            why = await asyncio.to_thread(problem)
            if why is None:
                self._view.set(name, "ready")
                return
            if time.monotonic() > deadline:
                raise StartFailed(
                    self._describe(name, f"was not ready after {SERVER_READY_S:.0f} s")
                )
            await asyncio.sleep(_POLL_S / 2)

    async def _wait_ready(self, ref: ClusterRef, specs: list[plan.ProcessSpec]) -> None:
        waiting = {spec.name: spec for spec in specs}
        deadline = time.monotonic() + self._options.ready_timeout_s
        async with membership.Members(ref) as members:
            while waiting:
                ready = await members.ready_instances()
                for name, spec in list(waiting.items()):
                    self._raise_if_dead(name)
                    if spec.url:
                        done = await asyncio.to_thread(membership.frontend_ready, spec.url)
                    else:
                        done = spec.instance_id in ready
                    if done:
                        self._view.set(name, "ready", spec.url)
                        del waiting[name]
                if waiting and time.monotonic() > deadline:
                    name = next(iter(waiting))
                    why = f"was not ready after {self._options.ready_timeout_s:.0f} s"
                    raise StartFailed(self._describe(name, why))
                await asyncio.sleep(2 * _POLL_S)

    def _raise_if_dead(self, name: str) -> None:
        code = self._children[name].poll()
        if code is not None:
            self._view.set(name, "failed", exit_words(code))
            raise StartFailed(self._describe(name, f"died while starting ({exit_words(code)})"))

    def _describe(self, name: str, what: str) -> str:
        log = self._state.log_of(name)
        lines = "".join(f"\n    {line}" for line in tail(log))
        return f"{name} {what}; its log ends with:{lines}\n  whole log: {log}"

    # ------------------------------------------------------------------ afterwards

    async def _watch_child(self, name: str) -> None:
        code = await wait_exit(self._children[name])
        if self._stop.is_set() or self._stopped_by_down():
            return
        log = self._state.log_of(name)
        if code == 0:
            self._view.say(f"{name} finished (drained)", "yellow")
            return
        self._view.say(f"{name} died ({exit_words(code)}), log: {log}", "bold red")
        if name in ("nats", "etcd"):
            lost = "remote prefill" if name == "nats" else "joining, leaving and settings"
            self._view.say(f"  without {name} serving goes on, but {lost} stops until `up` again")

    def _stopped_by_down(self) -> bool:
        """`pullfill down` is at work, or is done and has removed the record of this cluster."""
        launch = self._state.launch()
        gone = launch is None or launch.cluster_id != self._cluster_id
        return gone or self._state.stopping()

    async def _drain(self) -> None:
        self._view.title = "stopping pullfill"
        # Not ours to stop when `pullfill down` holds the lock already.
        with suppress(Locked), self._state.locked(), self._view:
            await take_down(
                self._state,
                self._cluster.processes,
                self._view,
                drain_s=self._options.drain_timeout_s,
                force=lambda: self._signals > 1,
            )

    def _reap(self) -> None:
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=1)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            self._signals += 1
            self._stop.set()

        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(sig, on_signal)

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
