"""Where extents go: by measured rate, within a prompt and over prompts; what a directory may hold; what is carried over."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headstart.policy.placement import Candidate, Estimate, Room, order, rates, split_evenly, split_total, worth_moving

MIB = 1 << 20


def spread(
    device_rates: list[float | None], extents: int, *, nbytes: int = 16 * MIB, new_prompts: bool = False
) -> Counter[int]:
    """Return how many extents each device gets, of one prompt or of prompts of one extent each."""
    chain = [0] * len(device_rates)
    ahead = [0.0] * len(device_rates)
    got: Counter[int] = Counter()
    for _ in range(extents):
        candidates = [
            Candidate(read_rate=rate, chain_bytes=0 if new_prompts else chain[i], ahead_s=ahead[i])
            for i, rate in enumerate(device_rates)
        ]
        best = order(candidates, nbytes)[0]
        got[best] += 1
        chain[best] += nbytes
        ahead[best] += nbytes / rates(candidates)[best]
        ahead = [one - min(ahead) for one in ahead]
    return got


def test_devices_alike_take_turns() -> None:
    assert spread([2e8, 2e8], 10) == {0: 5, 1: 5}
    assert spread([2e8, 1.9e8, 1.7e8], 9) == {0: 3, 1: 3, 2: 3}  # measured, so never quite equal


def test_a_device_at_half_the_rate_gets_half_as_much_of_a_prompt() -> None:
    assert spread([2e8, 1e8], 30) == {0: 20, 1: 10}


def test_prompts_of_one_extent_are_spread_by_rate_as_well() -> None:
    assert spread([2e8, 1e8], 30, new_prompts=True) == {0: 20, 1: 10}


def test_before_anything_is_measured_all_count_alike() -> None:
    assert spread([None, None, None], 9) == {0: 3, 1: 3, 2: 3}


def test_what_was_never_read_counts_by_how_fast_it_is_written() -> None:
    both, written = Candidate(read_rate=4e8, write_rate=2e8), Candidate(write_rate=1e8)
    assert rates([both, written]) == [4e8, 2e8]
    assert rates([Candidate(write_rate=2e8), Candidate(write_rate=1e8)]) == [2e8, 1e8]
    assert rates([both, Candidate()]) == [4e8, 4e8]


def test_a_bad_measurement_never_shuts_a_device_out() -> None:
    assert spread([1e9, 1.0], 200)[1] > 0


def test_a_device_without_room_is_used_less_and_still_used() -> None:
    full, free = Candidate(has_room=False), Candidate()
    assert order([full, free], MIB) == [1, 0]
    assert order([full, Candidate(chain_bytes=10 * MIB)], MIB) == [0, 1]


def test_a_prompt_is_evened_out_even_by_a_device_that_got_more_lately() -> None:
    behind = Candidate(read_rate=1e8, chain_bytes=64 * MIB)
    ahead = Candidate(read_rate=1e8, ahead_s=1000.0)
    assert order([behind, ahead], MIB) == [1, 0]


@given(st.lists(st.floats(1e7, 1e10), min_size=2, max_size=8))
def test_reading_a_long_prompt_takes_all_devices_nearly_equally_long(device_rates: list[float]) -> None:
    got = spread(list(device_rates), 400)
    counted = rates([Candidate(read_rate=rate) for rate in device_rates])
    times = [got[i] / rate for i, rate in enumerate(counted)]
    assert max(times) <= 400 / sum(counted) + 2 / min(counted)


def test_an_estimate_follows_what_is_measured_and_not_at_once() -> None:
    assert Estimate().with_sample(100, 0.1).bytes_per_s is None  # the first requests may be a burst
    one = Estimate().with_sample(100, 1.0)
    assert one.bytes_per_s == 100
    slower = one.with_sample(50, 1.0).bytes_per_s
    assert slower is not None
    assert 50 < slower < 100
    much_later = one.with_sample(50 * 100, 100.0).bytes_per_s
    assert much_later is not None
    assert 50 <= much_later < 52
    assert one.with_sample(0, 0.0) == one


def test_a_prompt_of_many_extents_is_even_whatever_was_written_before() -> None:
    first = [Candidate(ahead_s=1000.0), Candidate()]
    chain = [0, 0]
    for _ in range(20):
        best = order([Candidate(chain_bytes=n, ahead_s=c.ahead_s) for n, c in zip(chain, first, strict=True)], MIB)[0]
        chain[best] += MIB
    assert chain[1] - chain[0] <= 2 * MIB


def test_a_share_is_of_each_file_system_and_counts_it_once() -> None:
    assert split_evenly([Room(1, 1000), Room(2, 500), Room(1, 1000)], 0.1) == [50, 50, 50]


def test_a_size_is_the_total_and_goes_by_the_size_of_the_file_systems() -> None:
    assert split_total([Room(1, 300), Room(2, 100)], 80) == [60, 20]
    assert split_total([Room(1, 300), Room(1, 300)], 80) == [40, 40]
    assert split_total([Room(-1, 0), Room(-2, 0)], 80) == [40, 40]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 40)), min_size=1, max_size=6), st.integers(0, 1 << 40))
def test_the_parts_never_exceed_the_total(rooms: list[tuple[int, int]], total: int) -> None:
    assert sum(split_total([Room(*room) for room in rooms], total)) <= total


def test_what_is_carried_over_is_what_one_cache_would_still_hold() -> None:
    leaving, staying = [(10, 5), (6, 5), (2, 5)], [(9, 5), (7, 5), (1, 5)]
    assert worth_moving(leaving, staying, 100) == 2
    assert worth_moving(leaving, staying, 20) == 6
    assert worth_moving(leaving, staying, 4) is None
