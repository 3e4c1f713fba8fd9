"""The tree of a live function is that of its own lines."""

from __future__ import annotations

import ast

from tests.web.compiler.programs import Point, loops
from web.formulas.compiler.names import class_tree, function_tree


def test_the_tree_of_a_function_and_of_a_class_is_found() -> None:
    tree = function_tree(loops)
    assert isinstance(tree, ast.FunctionDef)
    assert (tree.name, tree.lineno) == ("loops", loops.__code__.co_firstlineno)
    assert class_tree(Point).name == "Point"
