"""Whom the others wait for, from where each rank is."""

from hyperbatch.comm.place import Place, ranges, told, who_hangs

BUSY = Place(phase="forward pass", step=5, must_go_on=True)
WAITS = Place(phase="gradient exchange", step=5, group=2, waits=True, must_go_on=True)


def test_a_rank_that_waits_for_nobody_is_named():
    assert who_hangs({0: (WAITS, 6.0), 1: (BUSY, 6.1), 2: (WAITS, 5.9)}) == (
        1,
        "rank 1 has made no progress for 6.1 s (step and phase: step 5, forward pass)",
    )


def test_a_rank_that_is_behind_is_named_although_it_waits():
    """Others wait for it in a later step."""
    behind = Place(phase="gradient exchange", step=4, group=0, waits=True)
    rank, line = who_hangs({0: (WAITS, 6.0), 3: (behind, 7.0)})
    assert rank == 3
    assert line.startswith("rank 3 has made no progress for 7.0 s (step and phase: st")


def test_ranks_that_wait_for_each_other_are_all_named():
    rank, line = who_hangs(dict.fromkeys(range(10), (WAITS, 6.0)))
    assert rank == 0
    assert line.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7, ...: the first of them has made no progress for 6.0 s")
    assert "gradient exchange, group 2" in line


def test_a_place_survives_its_way_through_the_store():
    assert Place.from_dict(WAITS.to_dict()) == WAITS
    assert told({1: (BUSY, 1.0), 0: (Place(phase="set-up"), 2.0)}) == [
        "rank 0: set-up, for 2.0 s",
        "rank 1: step 5, forward pass, for 1.0 s",
    ]


def test_many_ranks_at_the_same_place_are_told_in_one_line():
    """After a failure every rank reads these lines through the store, and a terminal shows them."""
    places = {rank: (WAITS, 5.0 + rank % 4 / 10) for rank in range(2048)}
    places[7] = BUSY, 6.0
    places[9] = Place(phase="gradient exchange", step=5, group=2, waits=True, must_go_on=True, collective="waits"), 5.0
    assert told(places) == [
        "2,046 ranks (0-6, 8, 10-2047): step 5, gradient exchange, group 2, for 5.0 to 5.3 s",
        "rank 7: step 5, forward pass, for 6.0 s",
        "rank 9: step 5, gradient exchange, group 2, for 5.0 s; waits",
    ]


def test_ranges_of_numbers_are_short():
    assert ranges([0, 1, 2, 5]) == "0-2, 5"
    assert ranges(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, ..."
