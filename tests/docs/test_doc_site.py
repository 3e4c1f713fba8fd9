"""The check of the built site finds what must not be there, and staging leaves no link behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import doc_site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(doc_site, "SITE", tmp_path)
    return tmp_path


def test_a_site_whose_links_lead_somewhere_has_no_problem(site: Path) -> None:
    (site / "index.html").write_text('<a href="b.html#x">b</a><img src="a.svg">')
    (site / "b.html").write_text('<p id="x">x</p><a href="https://example.org">out</a>')
    (site / "a.svg").write_text("<svg/>")
    assert doc_site.problems() == []


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ('<a href="nowhere.html">x</a>', "nowhere.html leads nowhere"),
        ('<a href="#nothing">x</a>', "#nothing names what is not on that page"),
        ('<img src="none.svg">', "none.svg leads nowhere"),
        ('<script src="https://example.org/x.js"></script>', "fetches https://example.org/x.js"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "fetches //example.org/x.css"),
    ],
)
def test_each_fault_is_found(site: Path, page: str, problem: str) -> None:
    (site / "index.html").write_text(page)
    (found,) = doc_site.problems()
    assert problem in found


def test_a_page_that_nothing_leads_to_is_found(site: Path) -> None:
    (site / "index.html").write_text("<p>x</p>")
    (site / "alone.html").write_text("<p>x</p>")
    (found,) = doc_site.problems()
    assert found.endswith("alone.html: no page leads to it")


def test_no_site_is_a_problem(site: Path) -> None:
    assert len(doc_site.problems()) == 1


def test_staged_links_lead_to_staged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doc_site, "STAGED", tmp_path)
    doc_site.stage()
    pages = list(tmp_path.rglob("*.md"))
    assert tmp_path / "source" / "CONTRIBUTING.md" in pages
    for page in pages:
        if (
            page.is_relative_to(tmp_path / "source")
            and not (doc_site.ROOT / page.relative_to(tmp_path / "source")).exists()
        ):
            continue  # A listing: what looks like a link in it is code.
        for link in doc_site.links(page.read_text(encoding="utf-8")):
            there = doc_site.target(page, link)
            assert there is None or there.exists(), (page, link)
