"""What another tool reads is told under the names of the first."""

from __future__ import annotations

from echelon.interop.import_context import ImportContext, import_context
from echelon.interop.key_reader import COUNT, KeyReader
from echelon.interop.nemo.translated import Translation, read_translated


def read_flags(reader: KeyReader, _: ImportContext) -> None:
    reader.take("--layers", "model.layers", COUNT, "as --layers has it")
    reader.set_or_default("--heads", "model.heads", 8, "default")
    if reader.has("--bad"):
        reader.refuse("--bad", "it is not --layers")
    reader.assume("--heads of the other tool")
    reader.finish()


def test_rows_refusals_and_sources_have_the_first_names() -> None:
    reader = KeyReader(tool="Tool", path="file", given={"m.layers": 2, "m.bad": True})
    translation = Translation(
        flags={"--layers": 2, "--bad": True},
        origins={"--layers": "m.layers", "--bad": "m.bad"},
        names={"--heads": "m.heads"},
    )
    read_translated(reader, translation, read_flags, import_context({}, None))
    assert reader.entries["model.layers"].source == "file: m.layers"
    assert {row.key: row.why for row in reader.rows} == {
        "m.layers": "as m.layers has it",
        "m.heads": "default",
    }
    (refusal,) = reader.refusals
    assert refusal.keys == ("m.bad",)
    assert refusal.problem.message == "m.bad = true: it is not m.layers"
    assert reader.assumptions == ["m.heads of the other tool"]
    assert set(translation.origins.values()) <= set(reader.known)
