"""What the next step of an engine computes: one rule for every worker. Pure.

    plan     what the next step computes (asked by step_meter.py)
    quote    what one more prompt adds to the price, and when it is done (decode_worker/cost.py)
    beside   how long a job takes beside streams, and what that costs them (decode_worker/cost.py)

A step has room for the next token of each stream first. Prompts share the rest. Own prompts and
pulled ones are one list.

Times are seconds of one monotonic clock. What is passed and returned are msgspec structs, because a
frozen dataclass takes ten times as long to make.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Mapping, Sequence

import msgspec

from pullfill.worker.step_cost import Errors, StepCost

# How long the step may take is decided anew for each one. A few lengths are tried (SHARES), and the
# cheapest is taken. The price is the number of requests that are expected to miss a target: prompts
# whose first token would be late, and streams that may meet a step that takes longer than their
# target of the time between tokens. How often steps take so much longer than predicted was measured
# (`Errors`). So there is no fixed margin: with few prompts the steps are short, and with many that
# would be late they are long.
#
# A stream keeps its target if 99 of 100 gaps between its tokens are within it. So a long answer can
# spare some longer gaps. Beside such answers a whole prompt in one step may be the cheapest,
# because each of them then has one long gap, and not dozens.
#
# A request that misses its targets anyway has no vote. It gets the room that others leave. Beside
# streams that all have missed theirs, steps are nearly as full as vLLM's own. Without streams
# nothing limits a step: that is a prefill worker. A worker that gets no jobs is a decode worker.
#
# A step ends early if another prompt in it would delay those that it completes by more than a step
# of its own takes. So long prompts are computed one after the other, and short ones share a step.

# Step lengths that are tried, as shares of each target of the time between tokens. A full step only
# if some stream can spare it: it spoils the streams that come after it, too, which no price tells.
SHARES = (0.3, 0.5, 0.8)
# Beside streams without a vote, and for late prompts alone, a step takes this share of the smallest
# target of the first token. So a request that comes within one step, and shares the next, is in
# time.
FULL = 0.33
# What it costs, in requests that miss a target, if a first token takes as long as its target. It
# decides between lengths that miss as many.
LATER = 0.3
# What a prompt waits that takes longer than its target on an idle engine, too, counts as this share
# of it: it goes where it is done first, but not at the expense of streams.
LOST = 0.1
# What it costs that one stream has a long gap that it can spare.
GAP = 0.1
# What it costs that one stream waits a second for prompts.
DELAY = 0.1
# A stream meets at most so many of the steps that the prompts take, because answers end.
STEPS = 32
# The first prompt of a step gets so many tokens at least, so that it ends.
LEAST_TOKENS = 32
# In one step of so many the oldest late prompt comes first, so that none starves. But not before it
# has waited for OLD times its target: it may be long, and those that wait behind it are in time.
LATE_TURN = 4
OLD = 4.0
# So many prompts are looked at. Those that are not late yet come first, by when they are due. The
# others count as late. So a plan beside 1,000 waiting prompts takes no milliseconds.
LOOK = 64


class Streams(msgspec.Struct, frozen=True):
    """The requests that generate.

    targets: number of streams for each pair: their target of the time between tokens, in seconds,
    and how many longer gaps each of them can have. A stream that has missed its target is in
    `count` only."""

    count: int = 0
    kv_tokens: int = 0
    targets: Mapping[tuple[float, int], int] = {}


class Prompt(msgspec.Struct, frozen=True):
    """A prompt, own or pulled.

    at: how many of its tokens are in the KV cache, computed or found. left: how many are not.
    due: when its first token is late. priority: as a client named it. The smallest comes first."""

    name: str
    at: int
    left: int
    due: float
    arrival: float
    priority: int = 0

    @property
    def target(self) -> float:
        """Seconds to its first token."""
        return self.due - self.arrival


class Plan(msgspec.Struct, frozen=True):
    """The next step.

    order: all prompts. The step takes them in this order.
    tokens: how many of each prompt. A prompt that gets none is left out."""

    order: tuple[str, ...]
    tokens: Mapping[str, int]

    @property
    def total(self) -> int:
        """Prompt tokens of the step. Streams come on top."""
        return sum(self.tokens.values())


def plan(
    streams: Streams,
    prompts: Sequence[Prompt],
    cost: StepCost,
    errors: Errors,
    *,
    now: float,
    step_tokens: int,
    turn: int = 1,
) -> Plan:
    """Plan the next step. step_tokens: most prompt tokens in it. turn: its number."""
    if not prompts:
        return Plan((), {})
    by_due, others = _looked_at(prompts, now, LOOK)
    _, limit, missed = _cheapest(streams, by_due, cost, errors, now, step_tokens)
    timely = [prompt for number, prompt in enumerate(by_due) if number not in missed]
    late = sorted(
        [*(by_due[number] for number in missed), *others], key=lambda prompt: prompt.arrival
    )
    ordered = [*timely, *late]
    if late and turn % LATE_TURN == 0 and now - late[0].arrival > OLD * late[0].target:
        ordered = [late[0], *timely, *late[1:]]
    ordered.sort(key=lambda prompt: prompt.priority)
    base = cost.base(streams.count, streams.kv_tokens)
    room_s = limit - base
    if not timely:  # so that who comes meanwhile can be in time
        room_s = min(room_s, max(4.0 * base, FULL * min(prompt.target for prompt in late)))
    tokens, _ = _filled(ordered, cost, base, room_s, step_tokens)
    return Plan(tuple(prompt.name for prompt in ordered), tokens)


def quote(
    one: Prompt,
    streams: Streams,
    prompts: Sequence[Prompt],
    cost: StepCost,
    errors: Errors,
    *,
    now: float,
    step_tokens: int,
) -> tuple[float, float]:
    """Return the cost of one more prompt here, and the seconds to its first token.

    The cost is how many more requests are expected to miss a target. Waiting counts, too: see LATER
    and LOST."""
    by_due, before = _looked_at(prompts, now, LOOK - 1)[0], 0.0
    if by_due:
        before, _, _ = _cheapest(streams, by_due, cost, errors, now, step_tokens)
    bisect.insort(by_due, one, key=lambda prompt: prompt.due)
    after, limit, late = _cheapest(streams, by_due, cost, errors, now, step_tokens)
    base = cost.base(streams.count, streams.kv_tokens)
    works = [cost.work(prompt.at, prompt.left) for prompt in by_due]
    room_s = _room(by_due, cost, base, limit, sum(works), step_tokens)
    mine = next(number for number, prompt in enumerate(by_due) if prompt is one)
    first = [
        number for number, prompt in enumerate(by_due)
        if (number < mine and number not in late)
        or (mine in late and (number not in late or prompt.arrival < one.arrival))
    ]  # fmt: skip
    work = works[mine] + sum(works[number] for number in first if number != mine)
    seconds = max(work * (base + room_s) / room_s, base)
    waits = LOST * _waits(one, now + seconds) if works[mine] > one.target else 0.0
    return after - before + waits, seconds


def beside(
    tokens: int,
    ttft_s: float,
    streams: Streams,
    cost: StepCost,
    errors: Errors,
    *,
    step_tokens: int,
) -> tuple[float, float]:
    """Return how long a job of so many tokens takes beside these streams, in seconds, and what that
    costs them, as of `quote`. ttft_s: its target."""
    work = cost.work(0, tokens)
    if not streams.count:
        return work, 0.0
    one = Prompt("", 0, tokens, ttft_s, 0.0)
    whole, seconds = quote(one, streams, (), cost, errors, now=0.0, step_tokens=step_tokens)
    own = _waits(one, seconds)
    if seconds > ttft_s:
        own = 1.0 if work <= ttft_s else LOST * own
    return seconds, max(0.0, whole - own)


def _looked_at(
    prompts: Sequence[Prompt], now: float, most: int
) -> tuple[list[Prompt], list[Prompt]]:
    """Return at most `most` prompts, sorted by when they are due, and the rest.

    Prompts that are late already are in the rest, unless there is room for them. If they took that
    room, those that can still be in time would be in the rest."""
    others = list[Prompt]()
    if len(prompts) > most:
        ordered = sorted(prompts, key=lambda prompt: (prompt.due <= now, prompt.due))
        prompts, others = ordered[:most], ordered[most:]
    return sorted(prompts, key=lambda prompt: prompt.due), others


def _cheapest(
    streams: Streams,
    by_due: Sequence[Prompt],
    cost: StepCost,
    errors: Errors,
    now: float,
    step_tokens: int,
) -> tuple[float, float, set[int]]:
    """Return the least price, how long a step may take for it, and which prompts are late then."""
    base = cost.base(streams.count, streams.kv_tokens)
    works = [cost.work(prompt.at, prompt.left) for prompt in by_due]
    total = sum(works)
    best, limit, late = math.inf, math.inf, set[int]()
    for candidate in _limits(streams, by_due, base, total):
        room_s = _room(by_due, cost, base, candidate, total, step_tokens)
        found, missed = _prompts_price(by_due, works, now, (base + room_s) / room_s)
        steps = min(math.ceil(total / room_s), STEPS)
        found += _streams_price(streams, errors, base + room_s, steps)
        if found < best:  # of equal ones the shortest step
            best, limit, late = found, candidate, missed
    return best + DELAY * streams.count * total, limit, late


def _room(
    by_due: Sequence[Prompt],
    cost: StepCost,
    base: float,
    limit: float,
    total: float,
    step_tokens: int,
) -> float:
    """Return the seconds that prompts get in a step. total: seconds of all prompts."""
    room_s = limit - base
    if limit == math.inf:
        room_s = _filled(by_due, cost, base, math.inf, step_tokens)[1]
    return max(min(room_s, total), 1e-9)


def _limits(streams: Streams, by_due: Sequence[Prompt], base: float, total: float) -> list[float]:
    """Return the lengths of a step to try, in seconds, the shortest first.

    Infinity: no limit. Such a step takes as long as its prompts need.
    total: seconds of all prompts."""
    if not streams.count:
        return [math.inf]
    if not streams.targets:
        return [max(1.5 * base, FULL * min(prompt.target for prompt in by_due))]
    # A step without prompts takes time as well. One that is hardly longer brings prompts nowhere.
    tried = {share * target for target, _ in streams.targets for share in SHARES}
    ordered = sorted(limit for limit in tried if limit >= 1.25 * base) or [1.5 * base]
    # From where on all prompts fit into one step, longer ones are the same.
    ordered = ordered[: bisect.bisect_left(ordered, base + total) + 1]
    return [*ordered, math.inf] if any(spare for _, spare in streams.targets) else ordered


def _prompts_price(
    by_due: Sequence[Prompt], works: Sequence[float], now: float, slower: float
) -> tuple[float, set[int]]:
    """Return what a pace costs the prompts, and which are late: Moore and Hodgson's rule.

    It keeps as many in time as is possible: where one would be late, the longest so far is put off.
    slower: how many times as long as alone prompts take in steps with streams."""
    taken: list[tuple[float, int]] = []
    late = set[int]()
    end = now
    for number, prompt in enumerate(by_due):
        took = works[number] * slower
        heapq.heappush(taken, (-took, number))
        end += took
        if end > prompt.due:
            longest, which = heapq.heappop(taken)
            end += longest
            late.add(which)
    end, cost = now, 0.0
    for number, prompt in enumerate(by_due):
        if number not in late:
            end += works[number] * slower
            cost += _waits(prompt, end)
        # One that would be late on an idle engine, too, has no vote. How long late ones wait counts
        # for nothing: else ten of them would outvote the streams, and beside more work than can be
        # done nobody would be in time.
        elif now + works[number] <= prompt.due:
            cost += 1.0
    return cost, late


def _waits(prompt: Prompt, end: float) -> float:
    """What it costs that the first token comes at `end`."""
    return LATER * (end - prompt.arrival) / max(prompt.target, 1e-3)


def _streams_price(streams: Streams, errors: Errors, step_s: float, steps: int) -> float:
    """What so many steps cost: the streams that are expected to miss their targets, and GAPs."""
    found = 0.0
    for (target, spare), count in streams.targets.items():
        likely = errors.beyond(target / step_s)
        gaps = min(spare, likely * steps)
        found += count * (_more(spare, steps, likely) + GAP * gaps)
    return found


def _more(spare: int, steps: int, likely: float) -> float:
    """The chance that more than `spare` of the steps are too long (binomial distribution).

    likely: the chance of each step."""
    if likely >= 1.0:
        return float(steps > spare)
    within = term = (1.0 - likely) ** steps
    for number in range(1, min(spare, steps) + 1):
        term *= (steps - number + 1) / number * likely / (1.0 - likely)
        within += term
    return max(0.0, 1.0 - within)


def _filled(
    ordered: Sequence[Prompt], cost: StepCost, base: float, room_s: float, most: int
) -> tuple[dict[str, int], float]:
    """Return how many tokens of each prompt the step computes, and the seconds for all of them.

    base: seconds of a step without prompts."""
    tokens: dict[str, int] = {}
    used = 0.0
    for done, prompt in enumerate(ordered):
        least = 0 if tokens else LEAST_TOKENS
        count = min(prompt.left, most, max(least, cost.fill(prompt.at, room_s - used)))
        more = cost.work(prompt.at, count)
        # A few tokens bring it nowhere, and what has begun cannot be overtaken.
        few = count < min(prompt.left, LEAST_TOKENS)
        # Each prompt before it is done with this step, and would be later by `more`. In a step of
        # its own, it and all behind it would be later by `base`.
        if few or done * more > (len(ordered) - done) * base:
            break
        tokens[prompt.name] = count
        used += more
        most -= count
    return tokens, used
