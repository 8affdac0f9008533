"""`pullfill plan`: says how many workers of each role are right, and why.

With `--apply` it orders changes of role, as `pullfill role` does. Before each order it writes a
RoleMove to etcd. Other planners find it there, and so does this one after a restart. So several
planners together make as long pauses as one. If a planner dies between RoleMove and order, no role
changes, and the pause passes."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pullfill.config import ClusterRef
from pullfill.deploy import role, scaling
from pullfill.deploy.members import ask_etcd
from pullfill.deploy.scaling import DECODE, PREFILL, Move, Observation, Plan, Settings, State
from pullfill.deploy.status import ask
from pullfill.errors import PullfillError, UnavailableError
from pullfill.registry.client import EtcdClient
from pullfill.registry.orders import last_move, note_move
from pullfill.runtime.log import complain
from pullfill.wire import RoleMove, WorkerRole

LOOK_S = 5.0
"""How often `--apply` looks, unless told otherwise."""
ABSENT_S = 30.0
"""How long to wait for a worker that was ordered and is not registered. It may have died."""


def plan(
    ref: ClusterRef,
    settings: Settings,
    *,
    as_json: bool = False,
    watch_s: float = 0.0,
    apply: bool = False,
) -> int:
    """Print the plan. Return the exit code.

    watch_s: look again every so many seconds, until interrupted. 0: once.
    apply: order what is planned, one change of role at a time. It implies a watch.

    Raises PullfillError if the first look fails, e.g. because no decode worker tells its demand."""
    console, state, looked = Console(), State(), False
    watch_s = watch_s or (LOOK_S if apply else 0.0)
    while True:
        try:
            found = step(ref, settings, state) if apply else look(ref, settings, state)
        except PullfillError as exc:
            if not looked:
                raise
            complain(exc)
        else:
            looked = True
            # Without --apply nobody has made the move, so it must not start a pause.
            state = found.state if apply or not found.moves else state
            if as_json:
                print(json.dumps(told(found)), flush=True)
            else:
                console.print(shown(found))
        if not watch_s:
            return 0
        time.sleep(watch_s)


def look(ref: ClusterRef, settings: Settings, state: State) -> Plan:
    """Ask the cluster, and plan."""
    return scaling.plan(_seen(ref), state, settings)


def step(ref: ClusterRef, settings: Settings, state: State) -> Plan:
    """Ask the cluster, plan, and order the move if there is one."""
    last, revision = ask_etcd(ref, last_move)
    seen = _seen(ref)
    if last is not None:
        seen, state = remembered(last, revision, time.time() - last.at, seen, state)
    found = scaling.plan(seen, state, settings)
    for move in found.moves:

        async def carry_out(etcd: EtcdClient, namespace: str, move: Move = move) -> bool:
            return await _carry_out(etcd, namespace, move, revision)

        if not ask_etcd(ref, carry_out):
            why = "another planner has ordered a change of role at this moment"
            return replace(found, moves=(), reasons=(why,), state=state)
    return found


def remembered(
    last: RoleMove, revision: int, age_s: float, seen: Observation, state: State
) -> tuple[Observation, State]:
    """Add the last order of any planner to what is known.

    revision: of its key in etcd. age_s: how old it is by the wall clocks of two machines."""
    # Clocks differ and are set. So each order is dated once, then its age is by our own clock.
    if revision != state.noted:
        state = replace(state, noted=revision)
        if (at := seen.at - max(0.0, age_s)) > state.moved_at:
            state = replace(state, moved_to=str(last.after), moved_at=at)
    age_s = seen.at - state.moved_at
    arrived = any(
        (member.instance_id, member.role) == (last.instance_id, last.after)
        for member in seen.members
    )
    # Between its two roles a worker is registered in none.
    if not arrived and age_s < ABSENT_S and last.instance_id not in seen.changing:
        seen = replace(seen, changing=(*seen.changing, last.instance_id))
    return seen, state


async def _carry_out(etcd: EtcdClient, namespace: str, move: Move, revision: int) -> bool:
    """Order the move. False: another planner was faster."""
    after = WorkerRole(move.after)
    noted = RoleMove(instance_id=move.instance_id, after=after, at=time.time())
    if not await note_move(etcd, namespace, noted, revision):
        return False
    await role.order(etcd, namespace, move.instance_id, after)
    return True


def _seen(ref: ClusterRef) -> Observation:
    seen = scaling.observe(ask(ref), time.monotonic())
    # Without a decode worker no request is served, so a prefill worker must become one.
    rescue = not seen.of(DECODE) and any(member.elastic for member in seen.of(PREFILL))
    if not seen.demands and not rescue:
        raise UnavailableError(
            "no decode worker says how much it has to do: see `pullfill status`, or start one with "
            "`pullfill decode`"
        )
    return seen


def told(found: Plan) -> dict[str, Any]:
    """Return the plan for JSON. moves: with `--apply`, those that were ordered in this look."""
    roles = {need.role: asdict(need) for need in (found.prefill, found.decode)}
    for need in roles.values():
        del need["role"]
    return {
        **roles,
        "backlog_s": found.backlog_s,
        "missed": found.missed,
        "moves": [
            {"instance_id": move.instance_id, "from": move.before, "to": move.after}
            for move in found.moves
        ],
        "reasons": list(found.reasons),
    }


def shown(found: Plan) -> Group:
    """Return a table with a line for each role, and what to do."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("role", "now", "needed", "right", "why"):
        table.add_column(column, justify="left" if column in ("role", "why") else "right")
    for need in (found.prefill, found.decode):
        style = "" if need.right == need.now else "yellow"
        right = Text(str(need.right), style=style)
        table.add_row(need.role, str(need.now), f"{need.need:.2f}", right, need.why)
    return Group(table, *(Text(f"change of role: {why}") for why in found.reasons))
