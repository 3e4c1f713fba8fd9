"""Links of pages lead somewhere, names of docstrings exist, and a built site is checked whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import echelon
from tests.docs import doc_site
from tests.docs.reference.api import GROUPS, RECORDS, api_page, home, resolve


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


def test_every_link_of_every_page_leads_to_a_file_and_an_anchor() -> None:
    pages = doc_site.page_files()
    assert {doc_site.ROOT / "CHANGELOG.md", doc_site.ROOT / "README.md"} < set(pages)
    assert {str(page): dead for page in pages if (dead := doc_site.dead_links(page))} == {}


def test_every_page_is_reached_from_the_first_or_from_the_navigation() -> None:
    named = re.findall(
        r": ([\w/.-]+\.md)$", (doc_site.ROOT / "mkdocs.yml").read_text("utf-8"), re.M
    )
    waiting, reached = [doc_site.DOCS / page for page in named], set[Path]()
    while waiting:
        page = waiting.pop()
        if page not in reached and page.exists():
            reached.add(page)
            targets = (
                doc_site.target(page, link) for link in doc_site.links(page.read_text("utf-8"))
            )
            waiting += [path for path in targets if path is not None and path.suffix == ".md"]
    assert [page for page in doc_site.DOCS.rglob("*.md") if page not in reached] == []


@pytest.mark.parametrize(
    ("link", "dead"),
    [
        ("b.md", False),
        ("b.md#two-words", False),
        ("b.md#kept-code", False),
        ("b.md#echelon.core.plan.Plan", False),
        ("#here", False),
        ("https://example.org/x#y", False),
        ("c.md", True),
        ("b.md#three-words", True),
        ("b.md#in-a-block", True),
        ("#there", True),
        # The site makes a-b of this heading, and GitHub a---b.
        ("b.md#a-b", True),
    ],
)
def test_a_dead_link_is_found(tmp_path: Path, link: str, dead: bool) -> None:
    headings = "# Two words\n\n## `kept` [code](x.md)\n\n## A - b\n"
    (tmp_path / "b.md").write_text(
        f"{headings}\n```sh\n# in a block\n```\n\n::: echelon.core.plan.Plan\n"
    )
    page = tmp_path / "a.md"
    page.write_text(f"# Here\n\n[x]({link}) `[y](none.md)`\n")
    assert doc_site.dead_links(page) == ([link] if dead else [])


def test_every_docstring_that_a_page_shows_is_there() -> None:
    shown = [
        path
        for page in doc_site.DOCS.rglob("*.md")
        for path in doc_site.directives(page.read_text("utf-8"))
    ]
    assert len(shown) > len(echelon.__all__)
    assert [path for path in shown if not getattr(resolve(path), "__doc__", None)] == []


@pytest.mark.parametrize("path", ["echelon.api.planning.compare", "echelon.no.such", "no_such.x"])
def test_a_name_that_moved_is_not_there(path: str) -> None:
    with pytest.raises(AttributeError):
        resolve(path)


def test_the_page_of_the_api_has_every_public_name_once() -> None:
    shown = doc_site.directives(api_page())
    public = [home(name) for names in GROUPS.values() for name in names]
    assert sorted(public) == sorted(map(home, echelon.__all__))
    assert shown == [*public, *(path for paths in RECORDS.values() for path in paths)]


def test_a_public_name_without_a_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echelon, "__all__", [*echelon.__all__, "predict"])
    with pytest.raises(ValueError, match="predict"):
        api_page()


def test_no_two_pages_have_one_title() -> None:
    """Neither by their first line nor by their name in the list of pages."""
    pages = [page for page in doc_site.DOCS.rglob("*.md") if "assets" not in page.parts]
    titles = [page.read_text(encoding="utf-8").partition("\n")[0] for page in pages]
    names = re.findall(
        r"^ +- ([^:\n]+): [\w/.-]+\.md$", (doc_site.ROOT / "mkdocs.yml").read_text("utf-8"), re.M
    )
    assert len(pages) > 100
    assert len(names) > 40
    for words in (titles, names):
        assert sorted({one for one in words if words.count(one) > 1}) == []
