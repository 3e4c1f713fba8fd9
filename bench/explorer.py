"""How fast the explorer follows its controls: `python -m bench.explorer`.

The page is written as `echelon explore` writes it and opened from a file in headless Chromium
without a network. Told are, for models from small to 405B on 16,384 devices:

- first paint: from the start of the navigation to the first contentful paint, as the browser has
  it, and to the verdict with its numbers; medians of `--opens` new pages.
- a change: every control is moved by real input events (keys, or text that is typed) to another
  value and back. Its time is from the event, as the browser stamps it, to the end of the frame
  after the numbers stand; medians of `--rounds` there and back, by model and by control, those
  that come to a plan apart from those that break a rule. Between two changes what comes after the
  numbers (guides, neighbours, what works) is waited for, and told as such.
- fifty changes of one key that is held, without waiting.

Exit 1 where a median is over its target, or the page without data over 500 KB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from echelon.page.explorer.document import explorer_page
from echelon.page.html import write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

PAINT_MS, CHANGE_MS, PAGE_BYTES = 300.0, 50.0, 500_000
"""Targets: the first paint, a change, and the page without its data."""
RUNS = (
    ("nano", "laptop"),
    ("llama3-8b", "64xh100"),
    ("mixtral-8x7b", "1024xh100"),
    ("deepseek-v3", "16384xh100"),
    ("llama3.1-405b", "16384xh100"),
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HELD = 50
"""Changes of a key that is held."""
WATCH = """
window.bench = { changes: [], verdict: 0 };
const seen = new MutationObserver(() => {
  if (!window.bench.verdict && document.getElementById("verdict")?.textContent) {
    window.bench.verdict = performance.now();
  }
});
seen.observe(document, { subtree: true, childList: true, characterData: true });
for (const kind of ["input", "change"]) {
  addEventListener(kind, (event) => {
    if ((event.target.tagName === "SELECT") !== (kind === "change")) return;
    const began = performance.now();
    const one = { control: event.target.name, stamp: event.timeStamp, trusted: event.isTrusted };
    requestAnimationFrame(() => {
      one.handled = performance.now() - began;
      const after = new MessageChannel();
      after.port1.onmessage = () => {
        one.ms = performance.now() - one.stamp;
        one.plan = document.getElementById("verdict").textContent.startsWith("The plan");
        window.bench.changes.push(one);
      };
      after.port2.postMessage(0);
    });
  }, true);
}
"""
"""What takes the times, in the page: before its own listeners, and behind the frame."""
SETTLED = "() => !document.querySelector('#page [aria-busy]')"


@dataclass(frozen=True, kw_only=True)
class Change:
    """Hold one change: its control, its milliseconds, and whether it came to a plan."""

    control: str
    ms: float
    plan: bool


@dataclass(kw_only=True)
class ModelTimes:
    """Hold what was measured of one model, in milliseconds."""

    model: str
    cluster: str
    file_bytes: int
    paints: list[float] = field(default_factory=list)
    verdicts: list[float] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    settled: list[float] = field(default_factory=list)

    def of(self, *, plan: bool) -> list[float]:
        """Return the milliseconds of changes that came to a plan, or that broke a rule."""
        return [one.ms for one in self.changes if one.plan == plan]


def main(words: Sequence[str] | None = None) -> int:
    """Measure all models; print the tables and the verdict."""
    options = _options(words)
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        print("error: no Chromium: apt-get install chromium", file=sys.stderr)
        return 3
    from playwright.sync_api import sync_playwright

    before = os.getloadavg()[0]
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        times = [
            _measure(browser, Path(folder), model, cluster, options) for model, cluster in RUNS
        ]
        version = browser.version
        browser.close()
    bare = len((files("echelon.page") / "page.html").read_bytes())
    print(
        f"{_machine()}, Chromium {version}; load {before:.1f} before, {os.getloadavg()[0]:.1f} "
        f"after, {os.cpu_count()} cores; page without data {bare:,} bytes\n"
    )
    print("\n".join(report(times)))
    if options.json:
        rows = [{**vars(one), "changes": [vars(each) for each in one.changes]} for one in times]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    missed = misses(times, bare)
    print("\n" + ("; ".join(missed) if missed else "all targets are met"))
    return 1 if missed else 0


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--opens", type=int, default=9, help="pages opened for each model")
    parser.add_argument("--rounds", type=int, default=2, help="moves there and back of a control")
    parser.add_argument("--json", type=Path, help="write all times here")
    return parser.parse_args(words)


def _machine() -> str:
    cpu = Path("/proc/cpuinfo")
    if not cpu.exists():
        return platform.machine()
    lines = cpu.read_text(encoding="utf-8").splitlines()
    return next((one.partition(": ")[2] for one in lines if one.startswith("model name")), "?")


def _measure(
    browser: Browser, folder: Path, model: str, cluster: str, options: argparse.Namespace
) -> ModelTimes:
    """Open the page of a model again and again, then move its controls."""
    path = folder / f"{model}.html"
    document = explorer_page(model, cluster)
    write_page(document, path)
    times = ModelTimes(model=model, cluster=cluster, file_bytes=path.stat().st_size)
    for _ in range(options.opens):
        with _opened(browser, path) as page:
            paints = page.evaluate(
                "performance.getEntriesByName('first-contentful-paint').map((e) => e.startTime)"
            )
            times.paints += paints
            times.verdicts.append(page.evaluate("window.bench.verdict"))
    with _opened(browser, path) as page:
        state = roomy(document.start)
        page.evaluate("(text) => { location.hash = text; }", urlencode(state))
        page.wait_for_function(SETTLED)
        names = page.locator("form.explorer [name]").evaluate_all("(all) => all.map((e) => e.name)")
        for _ in range(options.rounds):
            for name in names:
                _there_and_back(page, name, times)
        times.held = _held(page)
    return times


class _opened:
    """Open a page of a new context without a network, and close both."""

    def __init__(self, browser: Browser, path: Path) -> None:
        self.context = browser.new_context(viewport={"width": 1200, "height": 900}, offline=True)
        self.path = path

    def __enter__(self) -> Page:
        page = self.context.new_page()
        page.add_init_script(WATCH)
        page.goto(self.path.as_uri())
        page.wait_for_function("() => window.bench.verdict > 0")
        page.wait_for_function(SETTLED)
        return page

    def __exit__(self, *_: object) -> None:
        self.context.close()


def roomy(start: Mapping[str, Any]) -> dict[str, str]:
    """Return the start with an eighth of the data ranks, so that other degrees can be raised."""
    shards = max(1, int(start["dp_shard"]) // 8)
    free = {"dp_shard": shards, "sequences": 8 * shards, "zero": 3 if shards > 1 else 0}
    state = {**start, **free}
    return {name: str(v).lower() if isinstance(v, bool) else str(v) for name, v in state.items()}


def _there_and_back(page: Page, name: str, times: ModelTimes) -> None:
    """Move a control to another value and back; nothing where it has no effect."""
    control = page.locator(f"#control-{name}")
    if control.is_disabled():
        return
    for move in _moves(control):
        count = page.evaluate("window.bench.changes.length")
        move()
        page.wait_for_function("(count) => window.bench.changes.length > count", arg=count)
        one = page.evaluate("window.bench.changes.at(-1)")
        assert one["trusted"], "no input event of a person"
        assert one["control"] == name
        times.changes.append(Change(control=name, ms=one["ms"], plan=one["plan"]))
        page.wait_for_function(SETTLED)
        times.settled.append(page.evaluate(f"performance.now() - {one['stamp']}"))


def _moves(control: Locator) -> Iterator[Any]:
    """Yield what moves a control there, and back."""
    kind = control.evaluate("(e) => e.tagName === 'SELECT' ? 'select' : e.type")
    if kind == "checkbox":
        yield lambda: control.press("Space")
        yield lambda: control.press("Space")
    elif kind == "select":
        place, count = control.evaluate("(e) => [e.selectedIndex, e.options.length]")
        keys = ("ArrowDown", "ArrowUp") if place + 1 < count else ("ArrowUp", "ArrowDown")
        for key in keys:
            yield lambda key=key: control.press(key)
    else:
        value = int(control.input_value())
        yield lambda: control.fill(str(max(1, 2 * value)))
        yield lambda: control.fill(str(value))


def _held(page: Page) -> list[float]:
    """Return the milliseconds of changes by a key that repeats, without waiting."""
    count = page.evaluate("window.bench.changes.length")
    control = page.locator("#control-sequences")
    control.focus()
    for _ in range(HELD):
        page.keyboard.press("ArrowUp")
    page.wait_for_function("(all) => window.bench.changes.length >= all", arg=count + HELD)
    return page.evaluate(f"window.bench.changes.slice({count}).map((one) => one.ms)")


def report(times: Sequence[ModelTimes]) -> Iterator[str]:
    """Yield both tables: by model, and by control."""
    heads = ("to a plan", "to a broken rule", "key held")
    yield (
        "| model | cluster | file, KB | first paint, ms | verdict, ms | "
        f"{' | '.join(f'{one}, ms (95 %)' for one in heads)} | all that follows, ms |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in times:
        yield (
            f"| {one.model} | {one.cluster} | {one.file_bytes / 1e3:.0f} | "
            f"{median(one.paints):.0f} | {median(one.verdicts):.0f} | {_cell(one.of(plan=True))} | "
            f"{_cell(one.of(plan=False))} | {_cell(one.held)} | {median(one.settled):.0f} |"
        )
    yield ""
    yield "| control | to a plan, ms | changes | to a broken rule, ms | changes |"
    yield "|---|---|---|---|---|"
    every = [change for one in times for change in one.changes]
    for name in dict.fromkeys(change.control for change in every):
        cells: list[str] = []
        for plan in (True, False):
            own = [one.ms for one in every if one.control == name and one.plan == plan]
            cells += [f"{median(own):.1f}" if own else "-", str(len(own))]
        yield f"| {name} | {' | '.join(cells)} |"


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{median(values):.1f} ({sorted(values)[int(0.95 * len(values))]:.1f})"


def misses(times: Sequence[ModelTimes], bare: int) -> list[str]:
    """Return the targets that were missed, in words."""
    found: list[str] = []
    for one in times:
        paint, change = median(one.paints), median([each.ms for each in one.changes])
        if paint >= PAINT_MS:
            found.append(f"{one.model}: first paint after {paint:.0f} ms")
        if change >= CHANGE_MS:
            found.append(f"{one.model}: a change takes {change:.0f} ms")
    if bare > PAGE_BYTES:
        found.append(f"the page has {bare:,} bytes without data")
    return found


if __name__ == "__main__":
    sys.exit(main())
