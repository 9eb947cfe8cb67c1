"""Pages have as many owners as rows that name them, and return with the last."""

import pytest

from kimi_jax.infer.pages import CacheFull, Pager


def test_forks_share_all_pages_until_they_grow():
    pager = Pager(slots=3, columns=4, num_pages=8, page_size=4)
    assert pager.grow(0, 10) is None
    pager.fork(0, 1, 10)
    pager.fork(0, 2, 8)  # nothing is part full
    assert pager.in_use() == 3 and pager.common(0, 1) == pager.common(0, 2) == 2
    assert (pager.table_BM[1, :3] == pager.table_BM[0, :3]).all()
    assert pager.grow(1, 10) is None  # no token of its own
    page_from, page_to = pager.grow(1, 11)
    assert pager.in_use() == 4 and pager.grow(1, 12) is None
    assert pager.grow(0, 12) is None and pager.grow(2, 8) is None
    assert (pager.table_BM[:, :2] == pager.table_BM[0, :2]).all()
    assert page_from == pager.table_BM[0, 2] != page_to == pager.table_BM[1, 2]
    pager.release(0)
    assert pager.in_use() == 3  # two that are shared, and the copy
    pager.release(1)
    pager.release(2)
    assert pager.in_use() == 0
    pager.grow(0, 16)
    assert sorted(pager.table_BM[0]) == sorted(set(pager.table_BM[0]))


def test_the_last_row_of_a_page_needs_no_copy():
    pager = Pager(slots=3, columns=4, num_pages=8, page_size=4)
    pager.grow(0, 6)
    pager.fork(0, 1, 6)
    pager.fork(1, 2, 6)
    pager.release(0)
    assert pager.in_use() == 2
    assert pager.grow(2, 7) is not None  # row 1 has it too
    assert pager.grow(1, 7) is None and pager.in_use() == 3


def test_a_fork_needs_room_for_the_page_that_it_will_write_to():
    pager = Pager(slots=2, columns=4, num_pages=3, page_size=4)
    pager.grow(0, 10)
    assert not pager.room(1, 11, shared=10)
    pager.fork(0, 1, 10)
    assert not pager.room(1, 11) and not pager.room(1, 12)
    with pytest.raises(CacheFull, match=r"0 pages of 4 tokens left .* needs 1 more"):
        pager.grow(1, 11)
    assert pager.common(0, 1) == 2 and pager.in_use() == 3
    pager.release(0)
    assert pager.grow(1, 12) is None and pager.in_use() == 3


def test_what_does_not_fit_changes_nothing():
    pager = Pager(slots=2, columns=4, num_pages=5, page_size=4)
    pager.grow(0, 16)
    with pytest.raises(CacheFull, match=r"1 pages of 4 tokens left .* needs 2 more"):
        pager.grow(1, 8)
    with pytest.raises(CacheFull, match="20 tokens do not fit into a row"):
        pager.grow(0, 17)
    assert pager.in_use() == 4 and pager.room(1, 4) and not pager.room(1, 5)


def test_pages_of_a_row_are_dealt_over_the_ranks():
    """Two parts of the rows, two ranks each: page i of a row lies on rank i mod 2."""
    pager = Pager(slots=4, columns=4, num_pages=16, page_size=4, parts=(2, 2))
    pager.grow(3, 13)
    assert [pager.where(3, i) // 4 for i in range(4)] == [2, 3, 2, 3]
    assert pager.room(2, 16) and pager.room(0, 16)
    pager.grow(2, 16)
    assert pager.shard(2) == 1 and not pager.room(2, 17) and pager.in_use() == 8
    with pytest.raises(ValueError, match="different devices"):
        pager.fork(3, 0, 13)
