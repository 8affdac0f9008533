"""The compiled part of `PrefixIndex`: a hash table from block hashes to sets of slots.

A slot is a number below SLOTS that stands for a worker. The owner gives all memory at the start.
Nothing is ever moved as a whole, so no call takes long:

- The table is cut into segments of SEGMENT entries (hash, set). A segment that is full is split in
  two. The directory leads from the first bits of a mixed hash to its segment (extendible hashing).
- A set is one u64. Up to 4 slots stand in it, 16 bits each, as slot + 1; 0 is an empty entry. More
  slots are a row of bits in the pool. Then bit 63 is set, bits 48 to 55 are the row's class (a row
  of class c has 2**c words) and the low bits its first word.

Hashes are mixed with a secret before they choose a place. Otherwise a client could search prompts
whose blocks all fall into one segment.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types

from pullfill.prefix import chain as k
from pullfill.prefix.chain import I64, compiled, helper

SEGMENT = 1024
# A segment is split at FULL entries, or up to 7 STEP earlier, so that not all split at once.
FULL, STEP = 768, 32
# Most workers; most entries that a lookup fetches at once; sizes of rows (1 to 64 words).
SLOTS, FETCH, CLASSES = 4096, 128, 7

# Memory.meta: bits that choose a segment; segments in use; different blocks; most blocks; words
# of the pool ever used; the secret; from FREE on for each class its first free row, -1 if none.
DEPTH, USED, BLOCKS, LIMIT, BUMP, K1, K2, FREE = range(8)
META = FREE + CLASSES


class Memory(NamedTuple):
    """All arrays of a table.

    table: u64 (hash, set) for each entry of each segment, and one segment to work in.
    directory: i64, a power of two. segments: i64 (bits that chose it, entries in use) for each.
    pool: u64, the rows. meta: i64, see DEPTH. slots: u64 (blocks, hashes xored) for each slot."""

    table: Any
    directory: Any
    segments: Any
    pool: Any
    meta: Any
    slots: Any


_MEMORY = types.NamedTuple(
    (k.ARRAY_U64, k.ARRAY_I64, k.ARRAY_I64, k.ARRAY_U64, k.ARRAY_I64, k.ARRAY_U64), Memory
)
_ROW = np.uint64(1 << 63)
_U0, _U1 = np.uint64(0), np.uint64(1)
_FIELD = np.uint64(0xFFFF)


@helper
def _mix(m: Memory, one: Any) -> Any:
    """Where a hash belongs: the first bits choose its segment, others its place in there."""
    mixed = one * np.uint64(m.meta[K1])
    mixed ^= mixed >> np.uint64(32)
    return mixed * np.uint64(m.meta[K2])


@helper
def _front(mixed: Any, bits: Any) -> Any:
    """The first `bits` bits, 0 to 63 of them."""
    return np.int64((mixed >> _U1) >> np.uint64(63 - bits))


@helper
def _home(mixed: Any) -> Any:
    return np.int64((mixed >> np.uint64(20)) & np.uint64(SEGMENT - 1))


@helper
def _find(m: Memory, segment: Any, one: Any, mixed: Any) -> Any:
    """The entry of a hash, or ~(the empty entry where it would be put)."""
    base, place = segment * SEGMENT, _home(mixed)
    while True:
        entry = base + place
        if m.table[2 * entry + 1] == 0:
            return ~entry
        if m.table[2 * entry] == one:
            return entry
        place = (place + 1) & (SEGMENT - 1)


@helper
def _look(m: Memory, one: Any) -> Any:
    """(segment, entry) of a hash, the entry as `_find` says."""
    mixed = _mix(m, one)
    segment = m.directory[_front(mixed, m.meta[DEPTH])]
    return segment, _find(m, segment, one, mixed)


@helper
def _number(bit: Any) -> Any:
    """The number of the only bit that is set."""
    return math.frexp(np.float64(bit))[1] - 1


@helper
def _row(found: Any) -> Any:
    """(first word, class) of a set that is a row."""
    return np.int64(found & np.uint64((1 << 48) - 1)), np.int64(
        (found >> np.uint64(48)) & np.uint64(0xFF)
    )


@helper
def _field(found: Any, number: Any) -> Any:
    """Slot `number` (0 to 3) of a set that is no row, or -1."""
    return np.int64((found >> np.uint64(16 * number)) & _FIELD) - 1


@helper
def _take_row(m: Memory, size: Any) -> Any:
    """The first word of a row of class `size`, zeroed; -1 if there is no room."""
    at = m.meta[FREE + size]
    if at >= 0:
        m.meta[FREE + size] = np.int64(m.pool[at])
    elif m.meta[BUMP] + (1 << size) <= len(m.pool):
        at = m.meta[BUMP]
        m.meta[BUMP] += 1 << size
    else:
        return np.int64(-1)
    for word in range(at, at + (1 << size)):
        m.pool[word] = _U0
    return at


@helper
def _free_row(m: Memory, at: Any, size: Any) -> None:
    m.pool[at] = np.uint64(m.meta[FREE + size])
    m.meta[FREE + size] = at


@helper
def _has(m: Memory, found: Any, slot: Any) -> bool:
    if found & _ROW:
        at, size = _row(found)
        if (slot >> 6) >= (1 << size):
            return False
        return bool((m.pool[at + (slot >> 6)] >> np.uint64(slot & 63)) & _U1)
    for number in range(4):
        if _field(found, number) == slot:
            return True
    return False


@helper
def _wider(m: Memory, found: Any, highest: Any) -> Any:
    """The set as a row that has room for slot `highest`. 0 if the pool is full."""
    size = 0
    while (64 << size) <= highest:
        size += 1
    at = _take_row(m, size)
    if at < 0:
        return _U0
    if found & _ROW:
        old, small = _row(found)
        for word in range(1 << small):
            m.pool[at + word] = m.pool[old + word]
        _free_row(m, old, small)
    else:
        for number in range(4):
            one = _field(found, number)
            m.pool[at + (one >> 6)] |= _U1 << np.uint64(one & 63)
    return _ROW | (np.uint64(size) << np.uint64(48)) | np.uint64(at)


@helper
def _add(m: Memory, found: Any, slot: Any) -> Any:
    """The set with a slot that is not in it. 0 if the pool is full."""
    highest = slot
    if not found & _ROW:
        for number in range(4):
            one = _field(found, number)
            if one < 0:
                return found | (np.uint64(slot + 1) << np.uint64(16 * number))
            highest = max(highest, one)
        found = _wider(m, found, highest)
    elif (slot >> 6) >= (1 << _row(found)[1]):
        found = _wider(m, found, highest)
    if found:
        m.pool[_row(found)[0] + (slot >> 6)] |= _U1 << np.uint64(slot & 63)
    return found


@helper
def _drop(m: Memory, found: Any, slot: Any) -> Any:
    """The set without a slot that is in it. 0 if it is empty now."""
    if found & _ROW:
        at, size = _row(found)
        m.pool[at + (slot >> 6)] &= ~(_U1 << np.uint64(slot & 63))
        # Two slots stand in the set itself again. Four could, too, but then a set that changes
        # between four and five would move each time.
        left, count = _U0, 0
        for word in range(1 << size):
            bits = m.pool[at + word]
            while bits:
                if count == 2:
                    return found
                low = bits & (~bits + _U1)
                left |= np.uint64(64 * word + _number(low) + 1) << np.uint64(16 * count)
                count += 1
                bits ^= low
        _free_row(m, at, size)
        return left
    last = 3
    while _field(found, last) < 0:
        last -= 1
    end = (found >> np.uint64(16 * last)) & _FIELD
    found &= ~(_FIELD << np.uint64(16 * last))
    for number in range(last):
        if _field(found, number) == slot:
            shift = np.uint64(16 * number)
            found = (found & ~(_FIELD << shift)) | (end << shift)
    return found


@helper
def _split(m: Memory, mixed: Any) -> bool:
    """Split the segment of `mixed` in two. False: the memory given does not allow it."""
    depth, new = m.meta[DEPTH], m.meta[USED]
    old = m.directory[_front(mixed, depth)]
    local = m.segments[2 * old]
    if new >= len(m.segments) // 2 or (2 << local) > len(m.directory):
        return False
    if local == depth:
        for at in range((1 << depth) - 1, -1, -1):
            m.directory[2 * at] = m.directory[2 * at + 1] = m.directory[at]
        depth += 1
        m.meta[DEPTH] = depth
    m.meta[USED] += 1
    first, span = _front(mixed, local) << (depth - local), np.int64(1) << (depth - local)
    for at in range(first + span // 2, first + span):
        m.directory[at] = new
    m.segments[2 * old] = m.segments[2 * new] = local + 1
    m.segments[2 * old + 1] = m.segments[2 * new + 1] = 0
    # The entries are put aside behind the last segment, and then into both.
    size = 2 * SEGMENT
    here, there, aside = size * old, size * new, len(m.table) - size
    for at in range(size):
        m.table[aside + at] = m.table[here + at]
        m.table[here + at] = m.table[there + at] = _U0
    for at in range(aside, aside + size, 2):
        if m.table[at + 1]:
            where = _mix(m, m.table[at])
            segment = new if _front(where, local + 1) & 1 else old
            entry = ~_find(m, segment, m.table[at], where)
            m.table[2 * entry], m.table[2 * entry + 1] = m.table[at], m.table[at + 1]
            m.segments[2 * segment + 1] += 1
    return True


@helper
def _store(m: Memory, one: Any, slot: Any) -> bool:
    """Put a slot into the set of a hash. False: no room."""
    segment, entry = _look(m, one)
    if entry >= 0:
        found = m.table[2 * entry + 1]
        if _has(m, found, slot):
            return True
        found = _add(m, found, slot)
        if not found:
            return False
        m.table[2 * entry + 1] = found
    else:
        if m.meta[BLOCKS] >= m.meta[LIMIT]:
            return False
        while m.segments[2 * segment + 1] >= FULL - STEP * (segment & 7):
            if not _split(m, _mix(m, one)):
                return False
            segment, entry = _look(m, one)
        m.table[2 * ~entry], m.table[2 * ~entry + 1] = one, np.uint64(slot + 1)
        m.segments[2 * segment + 1] += 1
        m.meta[BLOCKS] += 1
    m.slots[2 * slot] += _U1
    m.slots[2 * slot + 1] ^= one
    return True


@helper
def _leave(m: Memory, segment: Any, entry: Any, slot: Any) -> None:
    """Take a slot out of an entry's set. After the last one another entry may stand here."""
    m.slots[2 * slot] -= _U1
    m.slots[2 * slot + 1] ^= m.table[2 * entry]
    left = _drop(m, m.table[2 * entry + 1], slot)
    m.table[2 * entry + 1] = left
    if left:
        return
    m.segments[2 * segment + 1] -= 1
    m.meta[BLOCKS] -= 1
    base = segment * SEGMENT
    hole = place = entry - base
    while True:
        place = (place + 1) & (SEGMENT - 1)
        at, to = 2 * (base + place), 2 * (base + hole)
        if m.table[at + 1] == 0:
            return
        home = _home(_mix(m, m.table[at]))
        # An entry may stand anywhere from its home on, so not in a hole that lies before that.
        if ((place - home) & (SEGMENT - 1)) >= ((place - hole) & (SEGMENT - 1)):
            m.table[to], m.table[to + 1] = m.table[at], m.table[at + 1]
            m.table[at + 1] = _U0
            hole = place


@compiled(_MEMORY, k.READ_U64, k.READ_U8, I64, I64)
def change(m: Memory, hashes: Any, ops: Any, op: Any, slot: Any) -> Any:
    """Store (1) or remove (0) the slot's blocks, each as `ops` says, or all as `op` says if `ops`
    is empty. Returns how many found no room."""
    refused = 0
    for number in range(len(hashes)):
        one = hashes[number]
        if (ops[number] if len(ops) else op) == 1:
            refused += not _store(m, one, slot)
        else:
            segment, entry = _look(m, one)
            if entry >= 0 and _has(m, m.table[2 * entry + 1], slot):
                _leave(m, segment, entry, slot)
    return refused


@helper
def _tell(bits: Any, word: Any, count: Any, names: Any, out: Any, told: Any) -> Any:
    """Write (worker, count) for each slot of these bits."""
    while bits:
        low = bits & (~bits + _U1)
        bits ^= low
        out[told], out[told + 1] = names[64 * word + _number(low)], count
        told += 2
    return told


@compiled(_MEMORY, k.READ_U64, k.ARRAY_U64, k.ARRAY_I64, k.ARRAY_I64)
def match(m: Memory, hashes: Any, seen: Any, names: Any, out: Any) -> Any:
    """Write (worker, leading blocks that it holds) to `out`. Returns the numbers written.

    seen: u64[3, words] as one row: which slots are seen, and room to work in. names: i64, the
    worker of each slot. out: i64[2 * SLOTS + 1]."""
    words = len(seen) // 3
    left, here = seen[words : 2 * words], seen[2 * words :]
    for word in range(words):
        left[word] = seen[word]
    told, before, fetched, many = 0, _U0, 0, 8  # most lookups of predicted blocks need one
    for number in range(len(hashes)):
        if number == fetched:
            # Touch the next ones: memory brings them at once. Unused loads would be compiled away.
            fetched, many = min(number + many, len(hashes)), min(4 * many, FETCH)
            for ahead in range(number, fetched):
                mixed = _mix(m, hashes[ahead])
                segment = m.directory[_front(mixed, m.meta[DEPTH])]
                out[2 * SLOTS] += np.int64(m.table[2 * (segment * SEGMENT + _home(mixed))])
        _, entry = _look(m, hashes[number])
        found = m.table[2 * entry + 1] if entry >= 0 else _U0
        if found == before and number:
            continue
        before, rest = found, _U0
        for word in range(words):
            here[word] = _U0
        if found & _ROW:
            at, size = _row(found)
            for word in range(min(words, 1 << size)):
                here[word] = m.pool[at + word]
        else:
            for field in range(4):
                slot = _field(found, field)
                if slot >= 0:
                    here[slot >> 6] |= _U1 << np.uint64(slot & 63)
        for word in range(words):
            lost = left[word] & ~here[word]
            if lost and number:
                told = _tell(lost, word, number, names, out, told)
            left[word] &= here[word]
            rest |= left[word]
        if not rest:
            return told
    for word in range(words):
        told = _tell(left[word], word, len(hashes), names, out, told)
    return told


@compiled(_MEMORY, I64, I64, I64, k.ARRAY_U64)
def collect(m: Memory, slot: Any, first: Any, last: Any, out: Any) -> Any:
    """Write the slot's hashes in segments first .. last - 1 to `out`. Returns how many."""
    told = 0
    for entry in range(first * SEGMENT, last * SEGMENT):
        found = m.table[2 * entry + 1]
        if found and _has(m, found, slot):
            out[told] = m.table[2 * entry]
            told += 1
    return told
