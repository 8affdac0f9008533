"""The process of `pullfill up`: starts everything, waits until it is ready, keeps it running.

Life: lock the state directory → check → servers → workers and frontends in parallel → self-checks →
ready → restart what dies, until Ctrl-C, SIGTERM, `pullfill down`, or the end of every process →
drain. Each child is recorded in cluster.json right after its start, so that
`pullfill down` finds it even if this process was killed. A failed start stops everything and leaves
nothing running.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import secrets
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pullfill.backoff import Backoff
from pullfill.config import RESTARTS_ENV, ClusterFile, ClusterRef, ProcessEntry
from pullfill.deploy import local_servers, members, plan
from pullfill.deploy.down import SERVERS, stop_in_order, take_down
from pullfill.deploy.plan import ProcessSpec
from pullfill.deploy.state import (
    CLUSTER_ENV,
    LOW_DISK,
    Locked,
    StateDir,
    confine,
    exit_words,
    full_disk,
    identify,
    is_alive,
    start_time,
    tail,
    wait_exit,
)
from pullfill.deploy.view import ProcessView
from pullfill.errors import ConfigError, PullfillError, RegistryUnavailable, UnavailableError
from pullfill.ids import new_instance_id
from pullfill.options import UpOptions
from pullfill.registry.client import EtcdClient
from pullfill.registry.live_settings import store as store_setting
from pullfill.runtime.lifecycle import LEAVING_ENV, STEP_FAILED, Tasks, end
from pullfill.wire import WorkerState

# A process that dies this often within WINDOW_S is given up.
MAX_DEATHS = 5
WINDOW_S = 60.0
# How long NATS and etcd may take to answer. Longer than this takes to start them again.
SERVER_S = 30.0
POLL_S = 0.1

# --------------------------------------------------------------------------- children


class StartFailed(UnavailableError):
    """A process could not be started, died while it started, or was not ready in time."""


@dataclass(slots=True)
class Children:
    """The processes of one `up`.

    Who starts one holds the lock of the state directory.

    cluster: the content of cluster.json, which is written after every change. If it cannot be
    written, as on a full disk, one line says so, and the processes run on."""

    cluster: ClusterFile
    state: StateDir
    view: ProcessView
    specs: dict[str, ProcessSpec] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _recorded: bool = True

    def entry(self, name: str) -> ProcessEntry:
        """Return the process's record in cluster.json."""
        return next(entry for entry in self.cluster.processes if entry.name == name)

    def launch(self, spec: ProcessSpec, note: str = "", restarts: int = 0) -> None:
        """Start a process, or start it again, and record it. Raises StartFailed."""
        log = self.state.log_of(spec.name)
        env = {"PYTHONUNBUFFERED": "1", **os.environ, CLUSTER_ENV: self.cluster.cluster_id}
        env |= {**spec.env, RESTARTS_ENV: str(restarts)}
        if spec.instance_id:
            env[LEAVING_ENV] = str(self.state.leaving_of(spec.instance_id))
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                child = subprocess.Popen(
                    spec.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    # Ctrl-C reaches only the supervisor, which stops children in order.
                    start_new_session=True,
                )
        except OSError as exc:
            raise StartFailed(f"cannot start {spec.name} ({spec.argv[0]}): {exc.strerror}") from exc
        self.running[spec.name] = child
        self.specs[spec.name] = spec
        entries = {e.name: e for e in self.cluster.processes}
        # A process that is started again keeps its place.
        entries[spec.name] = ProcessEntry(
            name=spec.name,
            role=spec.role,
            instance_id=spec.instance_id,
            pid=child.pid,
            log=str(log),
            started=start_time(child.pid) or 0,
            url=spec.url,
            restarts=restarts,
            drain_s=spec.drain_s,
        )
        self.cluster.processes = list(entries.values())
        self.record()
        again = f"pid {child.pid}, restarts: {restarts}" if restarts else ""
        self.view.set(spec.name, "starting", again or note or spec.url or f"pid {child.pid}")

    def record(self) -> None:
        """Write cluster.json."""
        try:
            self.state.write_cluster(self.cluster)
        except OSError as exc:
            if self._recorded:
                self.view.say(f"cannot write to {self.state.path} ({exc.strerror}): other commands "
                              "see an old list of processes", "yellow")  # fmt: skip
            self._recorded = False
        else:
            self._recorded = True

    def raise_if_dead(self, name: str) -> None:
        """Raise StartFailed, with the end of its log, if the process has ended."""
        code = self.running[name].poll()
        if code is not None:
            self.view.set(name, "failed", exit_words(code))
            raise StartFailed(self.describe(name, f"died while starting ({exit_words(code)})"))

    def describe(self, name: str, what: str) -> str:
        """Return a message: `what` happened to the process, and the end of its log."""
        log = self.state.log_of(name)
        lines = "".join(f"\n    {line}" for line in tail(log))
        return f"{name} {what}; its log ends with:{lines}\n  whole log: {log}"

    def place_frontends(self, options: UpOptions) -> None:
        """Keep frontends off the cores of prefill workers, if workers are pinned."""
        if cores := plan.frontend_cores(options):
            for name, child in self.running.items():
                if self.specs[name].role == "frontend" and child.poll() is None:
                    confine(child.pid, cores)

    def reap(self) -> None:
        """Reap the children that have ended."""
        for child in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=1)


# --------------------------------------------------------------------------- deaths


class Deaths:
    """The deaths of one process."""

    def __init__(self, first_pause_s: float = 0.5) -> None:
        self._at: deque[float] = deque(maxlen=MAX_DEATHS)
        self._backoff = Backoff(first_pause_s, longest_s=30.0)
        self._ran_from = -math.inf

    def pause(self, now: float, *, blameless: bool = False) -> float | None:
        """Note a death at `now`. Return the seconds to wait before the process is started again.

        None: give it up.
        blameless: a request may have caused the death. Such deaths alone end in no giving up."""
        # Pauses double until the process has run for so long.
        if now - self._ran_from > WINDOW_S:
            self._backoff.reset()
        self._ran_from = now
        if not blameless:
            self._at.append(now)
            if len(self._at) == MAX_DEATHS and now - self._at[0] <= WINDOW_S:
                return None
        pause_s = self._backoff.next()
        self._ran_from += pause_s
        return pause_s


# --------------------------------------------------------------------------- a full disk

_COMPLAINT = os.strerror(errno.ENOSPC).lower().encode()
_MOST = 1 << 20


@dataclass(slots=True)
class DiskWatch:
    """Keeps the cluster going when the disk of its state directory is full. One task runs `watch`.

    What a full disk does, and who mends it when there is room again:

        etcd         ends with a fatal error. Workers keep their leases and serve. `Supervisor`
                     starts etcd again, and counts no such death
        NATS         stores no job, and goes on storing none. Decode workers prefill all prompts
                     themselves. `look` starts NATS again
        cluster.json stays as it was. `look` has it written
        logs         lose lines. No process ends for that
    """

    children: Children
    _full: bool = False
    _nats_failed: bool = False
    _read: int = 0

    async def watch(self, every_s: float = 5.0) -> None:
        """Look until cancelled. Linux tells nobody that a disk is full."""
        while True:
            # `full_disk` tells it while there is still room for the line.
            self.look()
            await asyncio.sleep(every_s)

    def look(self) -> None:
        """Say when the disk has become full, and mend what that broke when it has room again."""
        say, path = self.children.view.say, self.children.state.path
        # The disk may have been full for a moment between two looks.
        self._nats_failed |= self._nats_complains()
        if not self._full and (line := full_disk(path)):
            self._full = self._nats_failed = True
            say(line, "bold red")
        if full_disk(path, 2 * LOW_DISK):
            return
        if self._full:
            say(f"the disk of {path} has room again")
            self.children.record()
        restart = self.children.cluster.restart
        if self._nats_failed and restart and "nats" in self.children.running:
            say("nats starts again: it met a full disk, and stores nothing since then")
            self.children.running["nats"].terminate()
        self._full = self._nats_failed = False

    def _nats_complains(self) -> bool:
        """Whether the log of NATS tells of a full disk since the last look."""
        with suppress(OSError), self.children.state.log_of("nats").open("rb") as file:
            file.seek(self._read)
            new = file.read(_MOST)
            self._read = file.tell()
            return _COMPLAINT in new
        return False


# --------------------------------------------------------------------------- one run of `up`


class Supervisor:
    """One run of `up` over one state directory. Owns its children.

    self_checks_s: longest wait for the self-checks, once all processes are ready.
    first_pause_s: before a process that died is started again."""

    def __init__(
        self,
        options: UpOptions,
        state: StateDir,
        view: ProcessView,
        self_checks_s: float = 10.0,
        first_pause_s: float = 0.5,
    ) -> None:
        self._options = options
        self._self_checks_s = self_checks_s
        self._first_pause_s = first_pause_s
        self._state = state
        self._view = view
        own = identify(os.getpid())
        assert own is not None
        self._cluster = ClusterFile(
            namespace=options.namespace,
            nats_url=options.nats_url or "",
            etcd_url=options.etcd_url or "",
            frontend_url="",
            cluster_id=secrets.token_hex(12),
            supervisor=own,
            restart=options.restart,
            role_args=options.role_args,
            security=options.security.path,
        )
        self._stop, self._force = asyncio.Event(), asyncio.Event()
        self._children = Children(self._cluster, state, view)

    async def start(self) -> bool:
        """Start all processes and wait until they are ready. False: a signal came before that.

        Raises ConfigError or StartFailed. Then, or if it is False, nothing is left running."""
        self._catch_signals()
        with self._state.locked():
            self._state.refuse_if_live()
            await asyncio.to_thread(plan.check, self._options)
            self._cluster.frontend_url = self._options.frontend_url  # --port 0 is chosen by now
            self._state.prepare()
            self._cluster.model = plan.named_model(self._options.model)
            self._cluster.engine_args = plan.engine_arguments(self._options)
            self._state.write_cluster(self._cluster)
            starting = asyncio.create_task(self._start_all())
            stopped = asyncio.create_task(self._stop.wait())
            stopped.add_done_callback(lambda _: starting.cancel())
            try:
                await starting
            except BaseException as exc:
                interrupted = isinstance(exc, asyncio.CancelledError) and self._stop.is_set()
                await self._take_down(5.0)
                self._children.reap()
                if not interrupted:
                    raise
                return False
            finally:
                stopped.cancel()
        return True

    async def watch(self, *, detached: bool) -> None:
        """Restart what dies, until a signal, `pullfill down`, or the end of every process.

        Then drain the rest. Returns when nothing runs any more."""
        tasks = Tasks()  # an error of one is logged, and ends no other
        kept = [tasks.begin(self._keep(name), name) for name in self._children.running]
        disk = tasks.begin(DiskWatch(self._children).watch(), "the disk")
        stop = tasks.begin(self._stop.wait(), "signals")
        # Nothing was started if all servers are others' and there is no worker.
        all_kept = [asyncio.gather(*kept, return_exceptions=True)] if kept else []
        await asyncio.wait([stop, *all_kept], return_when=asyncio.FIRST_COMPLETED)
        # `pullfill status` can show what was given up as long as this process is there.
        if detached and any(entry.gave_up for entry in self._cluster.processes):
            await stop
        if self._stop.is_set() and not self._state.stopping():
            self._view.say("stopping: workers finish their streams (again to force)", "yellow")
        await self._stop_rest()
        await end(*kept, disk, stop)
        self._children.reap()

    async def _stop_rest(self) -> None:
        """Stop what runs and remove the record, unless `pullfill down` is doing that."""
        while True:
            try:
                with self._state.locked():
                    found = self._state.readable()
                    if found is None or found.cluster_id == self._cluster.cluster_id:
                        return await self._take_down()
            except Locked:
                if not any(is_alive(entry) for entry in self._cluster.processes):
                    return
                await asyncio.sleep(POLL_S)
                continue
            except ConfigError as exc:  # the directory is gone, and cannot be made again
                self._view.say(str(exc), "yellow")
            # Our record was deleted. There is none, or it is of another `up`.
            entries = self._cluster.processes
            await stop_in_order(entries, self._view, None, self._force.is_set)
            return

    async def _take_down(self, drain_s: float | None = None) -> None:
        entries, force = self._cluster.processes, self._force.is_set
        await take_down(self._state, entries, self._view, drain_s=drain_s, force=force)

    def _catch_signals(self) -> None:
        def on_signal() -> None:
            (self._force if self._stop.is_set() else self._stop).set()

        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(sig, on_signal)

    # ------------------------------------------------------------------ restart

    def _stopped(self) -> bool:
        """Whether the cluster is being stopped: by a signal, or by a `pullfill down` that runs, or
        has run and removed the record of this cluster."""
        found = self._state.readable()
        gone = found is None or found.cluster_id != self._cluster.cluster_id
        return self._stop.is_set() or gone or self._state.stopping()

    async def _keep(self, name: str) -> None:
        """Restart the process whenever it dies. Returns when it is not started again."""
        # A pidfd tells when it has ended, so nothing polls. Each start happens under the lock of
        # the state directory, so `pullfill down` never misses a process.
        deaths = Deaths(self._first_pause_s)
        while True:
            code = await wait_exit(self._children.running[name])
            if self._stopped():
                return
            instance_id = self._children.entry(name).instance_id  # None: a server
            if instance_id and (code == 0 or self._state.leaves(self._children.entry(name))):
                how = "drained" if code == 0 else f"told to leave, then {exit_words(code)}"
                self._say(f"{name} finished ({how})", "yellow")
                with suppress(OSError):  # for `pullfill status` and `doctor`
                    self._state.leaving_of(instance_id).touch()
                return
            log = self._state.log_of(name)
            self._say(f"{name} died ({exit_words(code)}), log: {log}", "bold red")
            if not self._options.restart:
                self._tell_loss(name)
                return
            # A frontend refuses a request after two deaths. Giving up would punish the worker.
            failed = code == STEP_FAILED and name not in SERVERS
            blameless = failed or full_disk(self._state.path) is not None
            if not await self._revive(name, deaths, blameless=blameless):
                return

    async def _revive(self, name: str, deaths: Deaths, *, blameless: bool) -> bool:
        """Start the process again after a pause. False: it is given up, or the cluster stops."""
        while (pause := deaths.pause(time.monotonic(), blameless=blameless)) is not None:
            await self._sleep(pause)
            while name in SERVERS and full_disk(self._state.path) and not self._stopped():
                await self._sleep(1.0)
            try:
                return await self._locked(lambda: self._start_again(name))
            except (PullfillError, OSError) as exc:
                self._say(f"{name} was not started again: {exc}", "bold red")
                blameless = False
        if not self._stopped():
            await self._give_up(name)
        return False

    def _start_again(self, name: str) -> None:
        old, spec = self._children.entry(name), self._children.specs[name]
        if spec.instance_id is not None:  # a worker or frontend: it gets a new one
            fresh = new_instance_id(spec.role)
            argv = [fresh if part == spec.instance_id else part for part in spec.argv]
            spec = replace(spec, argv=argv, instance_id=fresh)
        self._children.launch(spec, restarts=old.restarts + 1)
        if spec.role == "frontend":
            self._children.place_frontends(self._options)

    async def _give_up(self, name: str) -> None:
        what = f"gave up after {MAX_DEATHS} deaths in {WINDOW_S:.0f} s"
        lines = tail(self._state.log_of(name), 5)
        self._children.entry(name).gave_up = "\n".join([what, *lines])
        self._say(self._children.describe(name, what), "bold red")
        self._tell_loss(name)
        with suppress(PullfillError, OSError):  # a disk that cannot be written to
            await self._locked(self._children.record)

    def _tell_loss(self, name: str) -> None:
        if name in SERVERS:
            lost = "remote prefill" if name == "nats" else "joining, leaving or change of settings"
            self._say(
                f"  serving goes on, but without {name} no {lost} until the next `pullfill up`"
            )

    async def _locked(self, work: Callable[[], None]) -> bool:
        """Do `work` under the lock of the state directory. False: not done, the cluster stops."""
        while not self._stopped():
            try:
                with self._state.locked():
                    if self._stopped():
                        return False
                    work()
                    return True
            except Locked:
                await self._sleep(POLL_S)
        return False

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but end at `stop`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    def _say(self, text: str, style: str = "") -> None:
        self._view.say(f"{time.strftime('%H:%M:%S')} {text}", style)

    # ------------------------------------------------------------------ start

    async def _start_all(self) -> None:
        view, options = self._view, self._options
        await asyncio.gather(
            self._start_server(
                "nats", "nats", local_servers.nats_command, local_servers.nats_ready
            ),
            self._start_server(
                "etcd", "http", local_servers.etcd_command, local_servers.etcd_ready
            ),
        )
        cluster = self._cluster  # it has the addresses of the servers now
        ref = ClusterRef(
            cluster.namespace,
            cluster.etcd_url,
            cluster.nats_url,
            self._state.path,
            options.security,
        )
        async with members.etcd_of(ref, wait_s=SERVER_S) as etcd:
            for text in options.settings:  # stored before any worker reads them
                key, _, value = text.partition("=")
                await store_setting(etcd, ref.namespace, key, value)
            specs = plan.worker_specs(options, ref)
            for spec in specs:
                if spec.after:
                    view.set(spec.name, "waiting", f"for {spec.after}, on the same GPU")
                else:
                    self._children.launch(spec)
            await self._wait_ready(etcd, specs)
            # Only now: until then they start sooner on any core.
            self._children.place_frontends(options)
            await self._wait_checked(etcd, specs)

    async def _wait_ready(self, etcd: EtcdClient, specs: Sequence[ProcessSpec]) -> None:
        """Wait until all are ready: workers and frontends are when etcd says so.

        Start the workers that had to wait for another on their GPU. Raises StartFailed, and
        RegistryUnavailable if etcd does not answer for SERVER_S."""
        children, ready_s = self._children, self._options.ready_timeout_s
        waiting = {spec.name: spec for spec in specs}
        answered = time.monotonic()
        deadline = answered + ready_s
        while waiting:
            ready: dict[str, str] = {}
            try:
                for one in await members.workers(etcd, self._cluster.namespace):
                    if one.state is not WorkerState.DRAINING:
                        ready[one.instance_id] = one.http
                answered = time.monotonic()
            except RegistryUnavailable:  # it may be away for a while
                if time.monotonic() - answered > SERVER_S:
                    raise
            for name, spec in list(waiting.items()):
                if spec.after in waiting:
                    continue
                if name not in children.running:
                    children.launch(spec)
                    deadline = time.monotonic() + ready_s
                children.raise_if_dead(name)
                url = ready.get(str(spec.instance_id))
                if url is not None and await self._serves(spec, url):
                    self._view.set(name, "ready", spec.url)
                    del waiting[name]
            if waiting and time.monotonic() > deadline:
                why = f"was not ready after {ready_s:.0f} s"
                raise StartFailed(children.describe(next(iter(waiting)), why))
            await asyncio.sleep(2 * POLL_S)

    async def _serves(self, spec: ProcessSpec, url: str) -> bool:
        """Whether it can serve. url: where it answers itself."""
        # Stock vLLM servers may come later, by heartbeats for example.
        if spec.role != "frontend" or not self._options.decodes:
            return True
        return not await asyncio.to_thread(members.why_not_ready, url)

    async def _start_server(
        self,
        name: str,
        scheme: str,
        command: Callable[[Path, int], list[str]],
        problem: Callable[[str], str | None],
    ) -> None:
        """Start a server, unless the user has one, and wait for it. Raises StartFailed."""
        if getattr(self._options, f"{name}_url"):
            return
        # A port that was free a moment ago may be taken by now. Then another one is tried.
        for left in (2, 1, 0):
            port = local_servers.free_port()
            url = f"{scheme}://127.0.0.1:{port}"
            setattr(self._cluster, f"{name}_url", url)
            argv = command(self._state.path / name, port)
            spec = ProcessSpec(name=name, role=name, argv=argv, drain_s=10.0)
            self._children.launch(spec, note=url)
            try:
                return await self._server_ready(name, url, problem)
            except StartFailed:
                log = "\n".join(tail(self._state.log_of(name), 50))
                if not left or "address already in use" not in log:
                    raise

    async def _server_ready(
        self, name: str, url: str, problem: Callable[[str], str | None]
    ) -> None:
        deadline = time.monotonic() + SERVER_S
        while True:
            self._children.raise_if_dead(name)  # first: another's server may answer there
            if await asyncio.to_thread(problem, url) is None:
                return self._view.set(name, "ready")
            if time.monotonic() > deadline:
                why = f"was not ready after {SERVER_S:.0f} s"
                raise StartFailed(self._children.describe(name, why))
            await asyncio.sleep(POLL_S / 2)

    async def _wait_checked(self, etcd: EtcdClient, specs: Sequence[ProcessSpec]) -> None:
        """Wait for the self-checks of the workers that decode. If they take too long, say so."""
        # Until a self-check is over, such a worker prefills every prompt itself.
        prefills = self._options.worker + self._options.prefill
        others = {"decode": prefills, "worker": prefills - 1}
        waiting = {str(spec.instance_id): spec.name for spec in specs if others.get(spec.role, 0)}
        with suppress(RegistryUnavailable, TimeoutError):
            async with asyncio.timeout(self._self_checks_s):
                while waiting:
                    for worker in await members.workers(etcd, self._cluster.namespace):
                        if worker.instance_id in waiting:
                            report = await asyncio.to_thread(members.ask_worker, worker)
                            if report is not None and report.self_checks_over:
                                del waiting[worker.instance_id]
                    await asyncio.sleep(POLL_S)
        if waiting:
            self._view.say(
                f"{', '.join(waiting.values())}: the self-checks are not over yet; until they are, "
                "every prompt is prefilled there",
                "yellow",
            )
