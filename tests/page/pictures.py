"""Make the pictures of pages that the guide shows: ``python -m tests.page.pictures``.

It needs Chromium. Each is a part of a real page, as Chromium draws it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

from echelon.config.load import load_job
from echelon.page.documents.plan import plan_page
from echelon.page.explorer.document import explorer_page
from echelon.page.html import write_page

FOLDER = Path(__file__).parents[2] / "docs" / "assets"
PIPELINE = ("mesh.pp=4", "model.layers=16")
CLUSTER = ("cluster.preset=16xh100", "mesh.pp=2", "mesh.dp_shard=4", "mesh.tp=2", "zero.stage=1")
LESSONS = {
    "lesson-pipeline.png": "lesson=pipeline-slots&schedule=1F1B&step=3",
    "lesson-ring.png": "lesson=ring-attention&step=2",
}
"""The file, and the address of a step of a lesson."""
PICTURES = {
    "report-schedule.png": ("nano", PIPELINE, "schedule"),
    "report-mesh.png": ("llama3-8b", CLUSTER, "mesh"),
}
"""The file, the run, its settings, and the part of its page."""


def main() -> None:
    """Draw each picture anew."""
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as driver, TemporaryDirectory() as folder:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 860, "height": 900})
        for name, (run, settings, part) in PICTURES.items():
            path = Path(folder) / f"{name}.html"
            write_page(plan_page(load_job(run, settings).plan), path)
            page.goto(path.as_uri())
            page.locator(f"#{part}").screenshot(path=FOLDER / name)
        page.emulate_media(reduced_motion="reduce")
        path = Path(folder) / "explorer.html"
        write_page(explorer_page(), path)
        for name, address in LESSONS.items():
            page.goto(f"{path.as_uri()}#{address}")
            page.reload()
            page.locator("main.lesson .lesson-figures").screenshot(path=FOLDER / name)
        browser.close()


if __name__ == "__main__":
    main()
