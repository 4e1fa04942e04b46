"""SlotTable: the requests that all ranks have agreed on, and the plans made of them.

A slot belongs to (process set, collective, name) and holds the last agreed Request. Two ranks that both have
the slot pending with that very Request need exchange only one bit.

*Guarantees*: slots are assigned, refreshed and evicted only by ``apply``, with the same Agreement on every
rank, and touched only in plan order; so the table is equal on all ranks after every cycle. It holds at most
``capacity`` slots beside those that some rank has pending.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from hvdlite.fusion import Plan
from hvdlite.message import Agreement, Key, Request

#: How many compiled plans are kept. Chosen: a training loop has a handful of recurring sets of slots.
PLAN_CAPACITY = 256


class SlotTable:
    """Slots by number and by key, least recently used first.

    *Threads*: the background thread only.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.requests: list[Request | None] = []
        self.compilations = 0
        self._layout = (0, 0, 0)
        self._keys: list[Key | None] = []
        self._by_key: dict[Key, int] = {}
        self._free: set[int] = set()
        self._recency: OrderedDict[int, None] = OrderedDict()
        self._plans: OrderedDict[int, Plan] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def layout(self) -> tuple[int, int, int]:
        """How one bit per slot is laid out: 64-bit words, bits in them, and all of those set; equal on all ranks."""
        return self._layout

    def find(self, key: Key) -> int | None:
        """The slot of ``key``, or None."""
        return self._by_key.get(key)

    def key_of(self, slot: int) -> Key:
        """The key of an assigned slot."""
        key = self._keys[slot]
        assert key is not None, slot
        return key

    def assigned(self) -> Iterator[tuple[int, Key]]:
        """Every slot with its key."""
        return ((slot, key) for slot, key in enumerate(self._keys) if key is not None)

    def matches(self, request: Request) -> int | None:
        """The slot that holds exactly ``request``, or None."""
        slot = self._by_key.get(request.key)
        return slot if slot is not None and self.requests[slot] == request else None

    def apply(self, agreement: Agreement) -> None:
        """Evict, then assign and refresh, as agreed."""
        changed = 0
        for slot in agreement.evicted:
            self._remove(slot)
            changed |= 1 << slot
        for slot, request, key in agreement.assigned:
            self._set(slot, request, key)
            changed |= 1 << slot
        if changed:
            for mask in [mask for mask in self._plans if mask & changed]:
                del self._plans[mask]

    def remove_process_set(self, process_set_id: int) -> None:
        """Give up all slots of a process set."""
        gone = tuple(slot for slot, key in self.assigned() if key.process_set_id == process_set_id)
        self.apply(Agreement(gone, (), (), (), ""))

    def next_free(self) -> Iterator[int]:
        """Number the slots that the next assignments take, the lowest first; changes nothing."""
        yield from sorted(self._free)
        slot = len(self.requests)
        while True:
            yield slot
            slot += 1

    def evictable(self, is_pending: Callable[[Key], bool]) -> Iterator[int]:
        """The slots that may go, least recently used first."""
        return (slot for slot in self._recency if not is_pending(self.key_of(slot)))

    def plan(self, ready: int, compile_plan: Callable[[list[tuple[int, Request]]], Plan]) -> Plan:
        """The plan for the slots in bit mask ``ready``, compiled at most once while those slots stay."""
        plan = self._plans.get(ready)
        if plan is None:
            self.compilations += 1
            slots = list(bits(ready))
            requests = [(slot, request) for slot in slots if (request := self.requests[slot]) is not None]
            plan = self._plans[ready] = compile_plan(requests)
            if len(self._plans) > PLAN_CAPACITY:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(ready)
        return plan

    def touch(self, slots: Iterable[int]) -> None:
        """Mark slots as just used, in plan order."""
        for slot in slots:
            self._recency.move_to_end(slot)

    def _set(self, slot: int, request: Request | None, key: Key) -> None:
        if slot == len(self.requests):
            self.requests.append(None)
            self._keys.append(None)
            num_words = (len(self.requests) + 63) >> 6
            self._layout = (num_words, 64 * num_words, (1 << 64 * num_words) - 1)
        self._free.discard(slot)
        self.requests[slot] = request
        self._keys[slot] = key
        self._by_key[key] = slot
        self._recency[slot] = None
        self._recency.move_to_end(slot)

    def _remove(self, slot: int) -> None:
        del self._by_key[self.key_of(slot)]
        del self._recency[slot]
        self.requests[slot] = None
        self._keys[slot] = None
        self._free.add(slot)


def bits(mask: int) -> Iterator[int]:
    """The positions of the bits set in ``mask``, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
