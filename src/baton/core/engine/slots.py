"""Slots on the worker. A slot is taken from admission until the worker has acknowledged its drop."""

from __future__ import annotations

from baton.core.engine.phase import ON_WORKER, Phase
from baton.core.engine.request import Sequence
from baton.errors import InvariantBroken
from baton.protocol.ids import Incarnation, Slot
from baton.protocol.step import StepResult


class SlotTable:
    __slots__ = ("_free", "incarnations", "slot_owners")

    def __init__(self, slots: int) -> None:
        self.slot_owners: list[Sequence | None] = [None] * slots
        self.incarnations = [0] * slots
        """Incarnation of the slot's present or last sequence. Never decreases, so a late row of an earlier sequence is
        recognised."""
        self._free = [Slot(slot) for slot in reversed(range(slots))]

    @property
    def total(self) -> int:
        return len(self.slot_owners)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def taken(self) -> int:
        return len(self.slot_owners) - len(self._free)

    def assign_slot(self, sequence: Sequence) -> None:
        slot = self._free.pop()
        self.incarnations[slot] += 1
        self.slot_owners[slot] = sequence
        sequence.slot = slot
        sequence.incarnation = Incarnation(self.incarnations[slot])

    def vacate(self, sequence: Sequence) -> None:
        slot = sequence.slot
        if self.slot_owners[slot] is not sequence:
            raise InvariantBroken(f"{sequence!r} leaves a slot that it does not have", invariant=25)
        self.slot_owners[slot] = None
        self._free.append(slot)
        sequence.slot = Slot(-1)

    def rows_match(self, rows: tuple[Slot, ...], result: StepResult) -> bool:
        """Whether the result's first rows are for the present sequences, and its further rows for none of them."""
        count, incarnations = len(rows), self.incarnations
        if list(result.incarnations[:count]) != [incarnations[slot] for slot in rows]:
            return False
        return not any(map(self.occupant_of, result.slots[count:], result.incarnations[count:]))

    def occupant_of(self, slot: Slot, incarnation: Incarnation) -> Sequence | None:
        """The sequence of a row. None: it has left the slot."""
        present = 0 <= slot < len(self.incarnations) and self.incarnations[slot] == incarnation
        return self.slot_owners[slot] if present else None

    def slot_owner(self, slot: Slot) -> Sequence:
        """The sequence in the slot. The caller has checked that the row is for the present one."""
        sequence = self.slot_owners[slot]
        if sequence is None:
            raise InvariantBroken(f"slot {slot} was planned for and is empty", invariant=25)
        return sequence

    def check(self) -> None:
        """25: a sequence in a slot knows it and may have one. 30: the number of free slots is right."""
        seated = [sequence for sequence in self.slot_owners if sequence is not None]
        if len(seated) != self.taken:
            raise InvariantBroken(f"{len(seated)} sequences in {self.taken} taken slots", invariant=30)
        for slot, sequence in enumerate(self.slot_owners):
            if sequence is None:
                continue
            if sequence.slot != slot or sequence.incarnation != self.incarnations[slot]:
                raise InvariantBroken(f"{sequence!r} has slot {slot} and thinks otherwise", invariant=25)
            if sequence.phase not in (*ON_WORKER, Phase.PREEMPTING, Phase.CLOSING):
                raise InvariantBroken(f"{sequence!r} has a slot", invariant=25)
