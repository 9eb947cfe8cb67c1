"""The figures of the data, counted by hand."""

import json

import numpy as np
import pytest

from kimi_jax.data import statistics
from kimi_jax.data.mixture import combine, make_schedule
from kimi_jax.data.parts import make_cells
from tests import tiny
from tests.data.stores import counting_documents

SIZES = [[3, 9, 12, 35], [2, 2, 7]]


def measured(*overrides: str) -> list[statistics.Statistics]:
    data = tiny.make(*overrides).data
    sources = [counting_documents(sizes) for sizes in SIZES]
    cells = make_cells(sources, ["books", "web"], data, length=10)
    schedule = make_schedule(combine(data.mixture, data.strata_mixture), 640)
    return statistics.measure(cells, schedule, 640, length=10)


def test_figures_of_sources() -> None:
    books, web = measured("data.packing=best_fit")
    # Inputs 8 + 2, 10, 10, 10, 10 and 4 + 1 in rows of 10.
    assert books._asdict() == {
        "source": "books",
        "stratum": "all lengths",
        "documents": 4,
        "tokens": 59,
        "windows": 6,
        "share": pytest.approx(6 / 7),
        "epochs": pytest.approx(640 / 7),
        "padding": pytest.approx(1 - 55 / 60),
        "cut": 0.5,
        "lengths": [0, 1, 0, 2, 0, 1],
    }
    assert web.lengths == [0, 2, 1] and web.cut == 0
    assert web.padding == pytest.approx(0.2)
    assert json.loads(json.dumps([books._asdict()]))[0]["lengths"] == books.lengths


def test_split_cuts_documents_and_wastes_nothing() -> None:
    books, web = measured()
    # The stream of 59: cuts at 10, 20, ... lie in documents 1 (3..12), 2, and 3.
    assert books.cut == 0.75 and books.windows == 6
    assert books.padding == pytest.approx(1 - 58 / 60)
    # 11 tokens, of which the last is a target only: one full row.
    assert web.padding == 0.0 and web.cut == 0.0


def test_weights_decide_about_shares_and_epochs() -> None:
    books, web = measured("data.packing=best_fit", "data.mixture=((0.0, 1, 3),)")
    assert (books.share, web.share) == (0.25, 0.75)
    assert (books.epochs, web.epochs) == (pytest.approx(160 / 6), 480)
    changing = "data.mixture=((0.0, 1, 3), (0.5, 1, 0))"
    books, web = measured(changing)
    assert (books.share, web.share) == (0.625, 0.375)
    strata = measured("data.strata=8", "data.strata_mixture=((0.0, 1, 3),)")
    assert [(cell.source, cell.stratum) for cell in strata] == [
        (source, stratum)
        for source in ("books", "web")
        for stratum in ("0 to 7 tokens", "8 tokens and more")
    ]
    assert strata[0].share + strata[2].share == pytest.approx(0.25)
    assert strata[3].documents == strata[3].share == strata[3].epochs == 0
    assert sum(cell.tokens for cell in strata) == sum(map(sum, SIZES))


def test_powers_of_two_are_counted_exactly() -> None:
    sizes_D = np.array([1, 2, 3, 4, 2**40 - 1, 2**40])
    want = [1, 2, 1] + [0] * 36 + [1, 1]
    assert statistics.length_histogram(sizes_D) == want


def test_warning_names_the_length_and_the_worst() -> None:
    found = measured("data.packing=best_fit", "data.mixture=((0.0, 1, 9),)")
    assert statistics.total_padding(found) == pytest.approx(0.1 / 12 + 0.9 * 0.2)
    (line,) = statistics.warnings(found, 10)
    assert "config.train.seq_len=10: 18.8% of the positions" in line
    assert "web, all lengths (20.0%)" in line and "config.data.packing=split" in line
    full = [cell._replace(padding=0.05) for cell in found]
    assert statistics.warnings(full, 10) == []


def test_rows_for_the_first_screen() -> None:
    found = measured("data.packing=best_fit")
    in_strata = measured("data.strata=8")
    assert statistics.length_rows(in_strata) == statistics.length_rows(found)
    head, books, _ = statistics.summary_rows(found)
    assert len(head) == len(books)
    assert books == (
        "books",
        "all lengths",
        4,
        59,
        6,
        "85.7%",
        "91.43",
        "8.3%",
        "50.0%",
    )
    assert statistics.length_rows(found) == [
        ("tokens a document", "books", "web"),
        ("2 to 3", 1, 2),
        ("4 to 7", 0, 1),
        ("8 to 15", 2, 0),
        ("16 to 31", 0, 0),
        ("32 to 63", 1, 0),
    ]


def test_names_of_columns_are_as_short_as_they_differ() -> None:
    assert statistics.short_names(["tree:/a/b/jax", "/c/plays"]) == ["jax", "plays"]
    assert statistics.short_names(["/a/x/1", "/b/x/1"]) == ["a/x/1", "b/x/1"]
    assert statistics.short_names(["gs://x/1", "task:needle"]) == ["1", "task:needle"]
    assert statistics.short_names(["/x", "x"]) == ["/x", "x"]
    assert statistics.short_names(["a"]) == ["a"]
