"""The groups of the explorer's mesh are those of a plan's."""

from __future__ import annotations

from echelon.config.cluster.settings import read_typed_cluster
from echelon.core.mesh import Mesh
from echelon.planner.view.mesh_map import axis_facts
from tests.page.explorer.random_controls import legal_settings
from web.formulas.mesh import mesh_axes


def test_axes_have_the_degrees_links_and_places_of_the_map() -> None:
    for controls, _, cluster in legal_settings(31, 60):
        mesh = Mesh(
            pp=controls.pp,
            dp_replicate=controls.dp_replicate,
            dp_shard=controls.dp_shard,
            cp=controls.cp,
            tp=controls.tp,
            ep=controls.ep,
        )
        facts = {
            fact.axis.value: fact
            for fact in axis_facts(
                mesh, read_typed_cluster(cluster["name"], ""), expert_tp=controls.expert_tp
            )
        }
        axes = {axis.name: axis for axis in mesh_axes(controls, cluster)}
        assert set(axes) == set(facts)
        for name, axis in axes.items():
            fact, link = facts[name], facts[name].link
            assert (axis.degree, axis.where) == (fact.degree, fact.where)
            assert axis.link.startswith("no link" if link is None else f"{link.name}, ")
            (digit,) = axis.digits
            group = mesh.group(0, fact.axis)
            if name == "ep":
                group = mesh.expert_groups(expert_tp=controls.expert_tp)[0]
            assert tuple(range(0, digit.degree * digit.stride, digit.stride)) == tuple(group)
