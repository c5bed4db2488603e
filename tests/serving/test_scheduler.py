"""The order in which requests are read, and the limits that let them wait."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mmspec.serving.scheduler import Limits, Scheduler


@dataclass(eq=False)
class Item:
    number: int
    prompt_slots: int = 10
    slots: int = 20
    priority: int = 0

    def __lt__(self, other: Item) -> bool:
        return (-self.priority, self.number) < (-other.priority, other.number)


def make(items: list[Item], **limits: int) -> Scheduler[Item]:
    made = Scheduler[Item](Limits(**limits))
    for item in items:
        made.push(item)
    return made


def take_turn(scheduler: Scheduler[Item]) -> list[int]:
    scheduler.start_turn()
    taken = iter(scheduler.take_next, None)
    return [item.number for item in taken if item is not None]


def test_requests_run_by_priority_and_then_in_their_order() -> None:
    items = [Item(0), Item(1, priority=-1), Item(2, priority=3), Item(3)]
    assert take_turn(make(items)) == [2, 0, 3, 1]


def test_rows_prompts_and_slots_limit_a_turn() -> None:
    items = [Item(number) for number in range(6)]
    assert take_turn(make(items, max_rows=4)) == [0, 1, 2, 3]
    assert take_turn(make(items, max_prompt_slots=25)) == [0, 1]
    assert take_turn(make(items, max_prompt_slots=15)) == [0]  # the second would end beyond 15
    assert take_turn(make(items, max_prompt_slots=1)) == [0]  # a long prompt is read nevertheless
    assert take_turn(make(items, max_slots=60)) == [0, 1, 2]


def test_none_overtakes_the_first_that_waits_for_its_room() -> None:
    large, small = Item(1, slots=50), Item(2, slots=5)
    first = Item(0)
    scheduler = make([first, large, small], max_slots=60)
    assert take_turn(scheduler) == [0]
    assert take_turn(scheduler) == []
    scheduler.leave(first)
    assert take_turn(scheduler) == [1, 2]


def test_what_lacked_memory_waits_until_another_leaves() -> None:
    first, second = Item(0), Item(1)
    scheduler = make([first, second])
    assert take_turn(scheduler) == [0, 1]
    scheduler.put_back(second)
    assert take_turn(scheduler) == []
    scheduler.leave(first)
    assert take_turn(scheduler) == [1]
    assert scheduler.running == {second}


def test_the_queue_takes_free_rows_into_account() -> None:
    scheduler = make([], max_rows=2, max_queue=1)
    for number in range(3):
        assert scheduler.has_place
        scheduler.push(Item(number))
    assert not scheduler.has_place
    assert [item.number for item in scheduler.drop_waiting(lambda item: item.number == 1)] == [1]
    assert scheduler.has_place
    assert take_turn(scheduler) == [0, 2]
    assert len(scheduler.clear()) == 2
    assert scheduler.free_rows == 2


def test_limits_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="max_rows=0 must be"):
        Limits(max_rows=0)
