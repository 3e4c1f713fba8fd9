"""Records that a notebook shows: what each gives is its page, and costs nothing before."""

from __future__ import annotations

import subprocess
import sys

from echelon.config.load import load_job
from echelon.core.shown import notebook_html
from echelon.page.drawn.static import static_html
from echelon.page.plan import plan_page


def test_a_plan_is_its_page() -> None:
    plan = load_job("nano").plan
    assert plan._repr_html_() == static_html(plan_page(plan)) == notebook_html("plan_html", plan)


def test_no_page_is_imported_before_a_notebook_asks() -> None:
    code = (
        "import sys; from echelon.core.plan import Plan; "
        "sys.exit(any(one.startswith('echelon.page') for one in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
