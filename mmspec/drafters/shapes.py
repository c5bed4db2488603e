"""The shape of a draft that a user asks for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mmspec.drafters.growth import Chain, Shape, StaticTree
from mmspec.drafters.lengths.goodput import parse
from mmspec.trees import Tree

_NAMED = {  # a shape by its name, loaded when it is asked for
    "auto": "auto_tree.AutoTree",
    "dynamic": "dynamic_tree.DynamicTree",
    "best-first": "best_first.BestFirstTree",
    "entropy": "entropy_tree.EntropyTree",
    "parallel": "parallel_tree.ParallelTree",
}


def shape_of(default: Any, tree: Any, length: Any) -> Any:
    """The shape a user asks for: `tree=` a topology, `length=` a draft length, or neither."""
    if tree is not None and length is not None:
        raise ValueError("tree= and length= both say how far to draft; give one of them")
    if length is not None:
        return Chain(parse(length))
    if tree is None:
        return default
    if isinstance(tree, Tree):
        return StaticTree(tree)
    if isinstance(tree, Shape):
        return tree
    if isinstance(tree, str) and tree in _NAMED:
        home, _, name = _NAMED[tree].partition(".")
        return getattr(import_module(f"mmspec.drafters.trees.{home}"), name)()
    if isinstance(tree, list | tuple) and tree:
        return StaticTree(Tree.branching(tree))
    raise ValueError(
        f"tree={tree!r} is not a topology; give branching widths such as [3, 2, 1], a Tree, a "
        f"mmspec.drafters.growth.Shape, or one of {', '.join(map(repr, _NAMED))}"
    )
