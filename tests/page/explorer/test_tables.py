"""Tables have each record once, and each place that is named is there."""

from __future__ import annotations

from tests.page.explorer.random_controls import CLUSTERS, MODELS, tables


def test_each_record_stands_once_and_each_place_is_there() -> None:
    found = tables()
    assert [one["name"] for one in found["models"]] == list(MODELS)
    assert [one["name"] for one in found["clusters"]] == list(CLUSTERS)
    for name in ("machines", "machine_rows", "software"):
        assert len({repr(one) for one in found[name]}) == len(found[name])
    for cluster in found["clusters"]:
        assert set(cluster["software"].values()) <= set(range(len(found["software"])))
        for places in cluster["machines"].values():
            assert set(places.values()) <= set(range(len(found["machine_rows"])))
    for rows in found["machine_rows"]:
        assert {row["place"] for row in rows} <= set(range(len(found["machines"])))
