"""The pages that are generated: the reference, the families of models, the list of decisions.

``python -m tests.docs.doc_pages`` writes them; `test_doc_pages.py` compares. Units and examples of
settings stand in `settings.toml` beside this file, those of cluster files in `cluster_file.toml`.
"""

from __future__ import annotations

import contextlib
import io
import re
import tomllib
from collections.abc import Mapping
from inspect import cleandoc
from pathlib import Path

from echelon.cli.app import COMMANDS
from echelon.cli.main import main
from echelon.config.cluster.file import CALIBRATION_SETTINGS, CLUSTER_SETTINGS, LINK_SETTINGS
from echelon.config.cluster.links import link_presets
from echelon.config.schema import SETTINGS, tables
from echelon.core.rulebook import areas
from echelon.core.rules import Rule
from echelon.core.settings.value_types import Setting, toml_text
from tests.docs.reference.api import api_page
from tests.docs.reference.decisions import decisions_page
from tests.docs.reference.families import families_page
from tests.docs.reference.glossary import glossary_page

HERE = Path(__file__).parent
REFERENCE = HERE.parents[1] / "docs" / "reference"
WRITTEN_BY = "Written by `python -m tests.docs.doc_pages`."
EXAMPLE_CLUSTER = HERE.parents[1] / "examples" / "cluster.toml"
CLUSTER_TABLES = {
    "": "At the top of the file",
    "device": "[device]",
    "device.peak_flops": "[device.peak_flops]",
    "device.efficiency": "[device.efficiency]",
    "links": "[[links]], the fastest tier first",
    "trainer": "[trainer]: our trainer as it was measured there",
}
FRAME = re.compile("[\u2500-\u257f]")


def units_and_examples() -> Mapping[str, tuple[str, object]]:
    """Return key -> its unit and a value that it takes."""
    table = tomllib.loads((HERE / "settings.toml").read_text(encoding="utf-8"))
    return {key: (unit, example) for key, (unit, example) in table.items()}


def rules_page() -> str:
    """Return the page of every rule, area after area."""
    found = areas()
    count = sum(map(len, found.values()))
    parts = [
        "# Rules\n",
        f"{WRITTEN_BY} There are {count} rules. The id of one stands in the brackets of each error,"
        "\nand `echelon explain ID` prints what stands here.\n",
    ]
    for area, rules in found.items():
        if rules:
            parts.append(f"## {area.replace('_', ' ')}\n")
            parts.extend(map(_rule, rules))
    return "\n".join(parts)


def settings_page() -> str:
    """Return the page of every setting, table after table."""
    known = units_and_examples()
    parts = [
        "# Settings\n",
        f"{WRITTEN_BY} Each key of run.toml is also a flag, `--set table.key=value`.\n"
        "`echelon config show run.toml` prints every setting of a run, and where its value came\n"
        "from. A default of - means that there is none: another setting or the model gives it.\n",
    ]
    for table in ("", *tables()):
        own = [setting for setting in SETTINGS.values() if setting.table == table]
        if not own:
            continue
        parts.append(f"## [{table}]\n" if table else "## At the top of the file\n")
        rows = ["| key | default | unit | takes | what it is | example |", "|---" * 6 + "|"]
        rows.extend(_setting(setting, *known[setting.key]) for setting in own)
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def cluster_fields() -> Mapping[str, tuple[str, str]]:
    """Return each field of a cluster file -> its unit, and what it is."""
    table = tomllib.loads((HERE / "cluster_file.toml").read_text(encoding="utf-8"))
    return {key: (unit, about) for key, (unit, about) in table.items()}


def cluster_settings() -> Mapping[str, Setting]:
    """Return the settings that a person writes into a cluster file, those of links too."""
    own = {key: one for key, one in CLUSTER_SETTINGS.items() if key not in CALIBRATION_SETTINGS}
    return own | {f"links.{key}": one for key, one in LINK_SETTINGS.items()}


def cluster_page() -> str:
    """Return the page of a cluster file: a full example, every field, the links by name."""
    known, settings = cluster_fields(), cluster_settings()
    example = EXAMPLE_CLUSTER.read_text(encoding="utf-8").rstrip()
    parts = [
        "# Cluster files\n",
        f"{WRITTEN_BY} A cluster that is no preset is described in a file:\n"
        "`--cluster FILE` or `cluster.file` uses it. `echelon config show --cluster 8xh100\n"
        "--toml` prints one to edit, and `echelon calibrate` writes one of the machine at hand,\n"
        "with a table [calibration] that says when and how it was measured.\n",
        "## An example with every field\n",
        "This is `examples/cluster.toml`. A size, a rate or a time is a number, or a text with\n"
        'its unit: `"24 GB"` (10^9 bytes), `"80 GiB"` (2^30), `"400 Gb/s"` (bits), `"8 us"`.\n',
        f"```toml\n{example}\n```\n",
    ]
    for table, title in CLUSTER_TABLES.items():
        own = [key for key in settings if key.rpartition(".")[0] == table]
        rows = ["| field | default | unit | takes | what it is |", "|---" * 5 + "|"]
        rows.extend(_cluster_field(key, settings[key], *known[key]) for key in own)
        parts.append(f"## {title}\n\n" + "\n".join(rows) + "\n")
    rows = ["| link | name | one way, a device | latency |", "|---" * 4 + "|"]
    rows.extend(
        f"| `{key}` | {link.name} | {link.bandwidth / 1e9:g} GB/s | {1e6 * link.latency_s:g} us |"
        for key, link in link_presets().items()
    )
    parts.append("## The catalogue of links\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def commands_page() -> str:
    """Return the page of every command, with its flags."""
    parts = [
        "# Commands\n",
        f"{WRITTEN_BY} Results go to stdout and all else to stderr; `--json` prints one object\n"
        "with a version. What the exit codes mean stands in [Getting started]"
        "(../getting-started.md#exit-codes).\n",
    ]
    for name, (_, about) in COMMANDS.items():
        parts.append(f"## echelon {name}\n\n{about}\n\n```text\n{_help(name)}\n```\n")
    return "\n".join(parts)


GUIDES = REFERENCE.parent / "guides"

PAGES = {
    GUIDES / "interop" / "families.md": families_page,
    REFERENCE.parent / "decisions" / "README.md": decisions_page,
    REFERENCE / "api.md": api_page,
    REFERENCE / "rules.md": rules_page,
    REFERENCE / "settings.md": settings_page,
    REFERENCE / "cluster-file.md": cluster_page,
    REFERENCE / "commands.md": commands_page,
    REFERENCE / "glossary.md": glossary_page,
}


def write() -> None:
    """Write the pages."""
    for file, text in PAGES.items():
        file.write_text(text(), encoding="utf-8")


def _rule(rule: Rule) -> str:
    return (
        f"### {rule.id}\n\n{_prose(cleandoc(rule.why))}\n\n"
        f"Refused:\n\n```text\n{rule.bad}\n```\n\nWorks:\n\n```text\n{rule.fixed}\n```\n"
    )


def _prose(text: str) -> str:
    """Return plain text as Markdown: indented lines stay as they are, signs mean themselves."""
    return "\n\n".join(
        f"```text\n{cleandoc(paragraph)}\n```"
        if paragraph.startswith("    ")
        else _plain(paragraph)
        for paragraph in text.split("\n\n")
    )


def _plain(paragraph: str) -> str:
    """Return a paragraph whose signs mean themselves, but for words in backticks."""
    parts = re.split(r"(`[^`]*`)", paragraph)
    parts[::2] = (
        re.sub(r"([*\[\]$]|(?<!\w)_|_(?!\w))", r"\\\1", part).replace("<", "&lt;")
        for part in parts[::2]
    )
    return "".join(parts)


def _setting(setting: Setting, unit: str, example: object) -> str:
    name = setting.key.rpartition(".")[2]
    default = "-" if setting.default is None else f"`{toml_text(setting.default)}`"
    takes = setting.kind.describe().replace("|", "or")
    about = setting.about.replace("|", "or")
    return f"| `{name}` | {default} | {unit} | {takes} | {about} | `{toml_text(example)}` |"


def _cluster_field(key: str, setting: Setting, unit: str, about: str) -> str:
    default = "-" if setting.default is None else f"`{toml_text(setting.default)}`"
    return (
        f"| `{key.rpartition('.')[2]}` | {default} | {unit} | {setting.kind.describe()} | {about} |"
    )


def _help(name: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main([*name.split(), "--help"])
    lines = (FRAME.sub(" ", line).rstrip() for line in output.getvalue().splitlines())
    shown = "\n".join(line for line in lines).strip("\n")
    return re.sub(r"\n{2,}", "\n\n", shown)


if __name__ == "__main__":
    write()
