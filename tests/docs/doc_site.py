"""The site: what Zensical is given, and what its pages must not do.

``python -m tests.docs.doc_site stage`` copies docs/ into build/docs and, as pages under source/,
each file beyond docs/ that a page links to, so that no link leads out of the site. ``python -m
tests.docs.doc_site check`` reads what was built: each link, figure, script and style must be there,
none may come from elsewhere, and every page must be reached from the index.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
STAGED = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"

LINK = re.compile(r"(\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))")
FENCE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^(`{3,}).*?^\1", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "sh", ".yml": "yaml"}
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
FETCHED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src")}


def prose(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a page, and whether each is prose (and not code)."""
    for index, part in enumerate(FENCE.split(text)):
        yield part, index % 2 == 0


def links(text: str) -> list[str]:
    """Return what the links and figures of a page point to, code left out."""
    return [match[2] for part, plain in prose(text) if plain for match in LINK.finditer(part)]


def target(page: Path, link: str) -> Path | None:
    """Return the file of the repository that a link of a page leads to; None out of it."""
    split = urlsplit(link)
    if split.scheme or not split.path:
        return None
    return Path(os.path.normpath(page.parent / unquote(split.path)))


def directives(text: str) -> list[str]:
    """Return the paths of the Python names whose docstrings a page shows."""
    return DIRECTIVE.findall(BLOCK.sub("", text))


def anchors(text: str) -> set[str]:
    """Return what links into a page may name: in the site and, but for docstrings, on GitHub too.

    The two make the anchor of a heading in different ways: one where these differ is left out.
    """
    text = BLOCK.sub("", text)
    found = {*directives(text), *ANCHOR.findall(text)}
    for heading in HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        words = re.sub(r"[^\w\s-]", "", words.replace("`", "")).strip()
        of_site, of_github = re.sub(r"[-\s]+", "-", words), re.sub(r"\s", "-", words)
        found |= {of_site} & {of_github}
    return found


def dead_links(page: Path) -> list[str]:
    """Return the links of a page, a file of the repository, that lead to no file or anchor."""
    text = _read(page)
    dead = list[str]()
    for link in links(text):
        split = urlsplit(link)
        there = page if not split.path and not split.scheme else target(page, link)
        if there is None:
            continue
        known = there.suffix != ".md" or not split.fragment
        if not there.exists() or not (known or unquote(split.fragment) in anchors(_read(there))):
            dead.append(link)
    return dead


def page_files() -> list[Path]:
    """Return the Markdown files of the repository that the site has or GitHub shows first."""
    waiting, done = (
        [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md")],
        set[Path](),
    )
    while waiting:
        page = waiting.pop()
        if page not in done:
            done.add(page)
            targets = (target(page, link) for link in links(_read(page)))
            waiting.extend(
                path for path in targets if path and path.suffix == ".md" and path.exists()
            )
    return sorted(done)


def stage() -> None:
    """Write build/docs."""
    shutil.rmtree(STAGED, ignore_errors=True)
    shutil.copytree(DOCS, STAGED, ignore=shutil.ignore_patterns("*.md"))
    waiting, done = sorted(DOCS.rglob("*.md")), set[Path]()
    while waiting:
        file = waiting.pop()
        if file in done:
            continue
        done.add(file)
        text = file.read_text(encoding="utf-8")
        place = STAGED / _place(file)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            found = (target(file, link) for link in links(text))
            waiting.extend(path for path in found if path is not None and _is_text(path))
            text = _with_staged_links(file, text)
        else:
            text = _listing(file, text)
        place.write_text(text, encoding="utf-8")


def problems() -> list[str]:
    """Return what is wrong with build/site, a line for each."""
    pages = {path: _Page(path) for path in SITE.rglob("*.html") if path.name != "404.html"}
    found = [problem for page in pages.values() for problem in page.problems(pages)]
    reached, waiting = set[Path](), [SITE / "index.html"]
    while waiting:
        path = waiting.pop()
        if path in pages and path not in reached:
            reached.add(path)
            waiting.extend(pages[path].leads_to)
    found.extend(f"{path}: no page leads to it" for path in sorted(set(pages) - reached))
    if not pages:
        found.append(f"{SITE}: there are no pages")
    return found


class _Page(HTMLParser):
    """What one page of the site names, fetches and links to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.leads_to = path, list[Path]()
        self._ids, self._links, self._fetched = set[str](), list[str](), list[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the ids and links of a tag."""
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self._ids.add(given["id"])
        for name in ("src", "href"):
            if name in given and not (tag == "link" and given.get("rel") == "canonical"):
                (self._fetched if (tag, name) in FETCHED else self._links).append(given[name])

    def problems(self, pages: dict[Path, _Page]) -> Iterator[str]:
        """Yield what is wrong; fill `leads_to`."""
        for link in self._fetched:
            if urlsplit(link).scheme not in ("", "data") or link.startswith("//"):
                yield f"{self.path}: fetches {link} from elsewhere"
        for link in (*self._links, *self._fetched):
            split = urlsplit(link)
            if split.scheme or link.startswith("//"):
                continue
            there = Path(os.path.normpath(self.path.parent / unquote(split.path)))
            there = self.path if not split.path else there
            if there.is_dir():
                there /= "index.html"
            if not there.exists():
                yield f"{self.path}: {link} leads nowhere"
            self.leads_to.append(there)
            name = unquote(split.fragment)
            if name and there in pages and name not in pages[there]._ids | {"__skip"}:
                yield f"{self.path}: {link} names what is not on that page"


def _place(file: Path) -> Path:
    """Return where a file of the repository is staged, relative to build/docs."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS)
    path = Path("source") / file.relative_to(ROOT)
    return path if path.suffix == ".md" else path.with_name(f"{path.name}.md")


@cache
def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _is_text(path: Path) -> bool:
    return path.is_file() and not (path.is_relative_to(DOCS) and path.suffix != ".md")


def _with_staged_links(file: Path, text: str) -> str:
    def moved(match: re.Match[str]) -> str:
        path = target(file, match[2])
        if path is None or not _is_text(path):
            return match[0]
        fragment = urlsplit(match[2]).fragment
        there = os.path.relpath(_place(path), _place(file).parent)
        return f"{match[1]}{there}{'#' if fragment else ''}{fragment}{match[3]}"

    return "".join(LINK.sub(moved, part) if plain else part for part, plain in prose(text))


def _listing(file: Path, text: str) -> str:
    name, language = file.relative_to(ROOT), LANGUAGES.get(file.suffix, "text")
    return f"{HIDDEN}# {name}\n\n````{language}\n{text.rstrip()}\n````\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["stage"]:
        stage()
    elif sys.argv[1:] == ["check"]:
        wrong = problems()
        print("\n".join(wrong) or f"{SITE.relative_to(ROOT)}: every link leads somewhere")
        sys.exit(1 if wrong else 0)
    else:
        sys.exit("usage: python -m tests.docs.doc_site stage|check")
