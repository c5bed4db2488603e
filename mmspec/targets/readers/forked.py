"""Trees on recurrent layers: one state per branch, and replay of the accepted one (STree).

A recurrent layer has one state and reads a sequence, so the branches of a tree need a state each.
Attention layers read all nodes in one row, with the mask of the tree. Where the layer calls its
mixer (the module that updates the state), the nodes are laid out as one row per leaf, and the state
is copied to each:

    block   a  b  c  d  e       parents: a of b and c, b of d, c of e
    rows    a  b  d             states after a, b, d and after a, c, e; a is read twice
            a  c  e

After verification the state is advanced along the accepted path from the activations of this
forward: the outputs of the mixer's projections are not computed again (activation replay; Wu et al.
2025, "STree"). The paper's kernel scans all branches at once in a tree form of its scan; this one
reads shared prefixes once per leaf, with any mixer of transformers, kernels included. Exact.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.targets.cache import SlotCache, held_state, repeat_state
from mmspec.targets.memory import TokenBlock

_UPDATES = {"update_conv_state", "update_recurrent_state"}
_WRITES_KEYS = "update"  # a method of caches that stores keys and values


def find_mixers(decoder: nn.Module) -> dict[int, nn.Module]:
    """The modules that update the state of a recurrent layer, by their index in the cache.

    Found by the methods of the cache that their code calls. A module that stores keys as well
    cannot read one row per leaf without copies of them, and is left out.
    """
    found = {}
    for module in decoder.modules():
        kind: Any = type(module)
        index, called = vars(module).get("layer_idx"), called_names(kind)
        if isinstance(index, int) and called & _UPDATES and _WRITES_KEYS not in called:
            found[index] = module
    return found


def can_fork(mixers: dict[int, nn.Module], cache: SlotCache) -> bool:
    """Whether every state of a cache belongs to one of these mixers, and keys lie in slots."""
    stateful = {index for index, one in enumerate(cache.layers) if one in cache.stateful}
    return cache.is_slotted and stateful <= mixers.keys()


@lru_cache(maxsize=512)
def called_names(kind: type) -> frozenset[str]:
    """The names of attributes in the methods of a module class."""
    own = [base for base in kind.__mro__ if base not in nn.Module.__mro__]
    members = [value for base in own for value in vars(base).values()]
    methods = [inspect.unwrap(value) for value in members if inspect.isfunction(value)]
    return frozenset(name for method in methods for name in method.__code__.co_names)


class ForkedRead:
    """Context manager of one forward over the tree of one row, in which mixers read its paths.

    The states of the cache are unchanged at exit; `replay` advances them along one path.
    """

    def __init__(self, mixers: dict[int, nn.Module], cache: SlotCache, block: TokenBlock) -> None:
        assert len(block.tokens) == 1
        assert not block.num_preceding
        self.mixers, self.cache = mixers, cache
        paths = list_paths(block.corner[0])
        inner = {position for path in paths for position in path[:-1]}
        leaves = [path for path in paths if path[-1] not in inner]
        self.rows, self.width = len(leaves), max(map(len, leaves))
        self.home: dict[int, tuple[int, int]] = {}  # row and place of each position of the block
        for row, path in enumerate(leaves):
            for place, position in enumerate(path):
                self.home.setdefault(position, (row, place))
        filled = [[*path, *[path[-1]] * (self.width - len(path))] for path in leaves]
        flat = [row * self.width + at for row, at in (self.home[i] for i in range(len(paths)))]
        device = block.tokens.device
        self.spread = torch.tensor(filled, device=device).flatten()  # (rows * width,)
        self.gather = torch.tensor(flat, device=device)  # (q,)
        self._held: dict[int, Any] = {}
        self._calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._outputs: dict[nn.Module, list[Tensor | None]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> ForkedRead:
        for mixer in self.mixers.values():
            self._hooks += [
                mixer.register_forward_pre_hook(self._fork, with_kwargs=True),
                mixer.register_forward_hook(self._join),
                *(part.register_forward_hook(self._note) for part in mixer.children()),
            ]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _fork(self, mixer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        layer = self._layer(mixer)
        held = self._held[layer] = held_state(self.cache.layers[layer])
        vars(self.cache.layers[layer]).update(repeat_state(held, self.rows))
        call = _replace_states(args, kwargs, self._lay_out)
        self._calls[mixer] = call
        return call

    def _lay_out(self, states: Tensor) -> Tensor:  # (1, q, D) -> (rows, width, D)
        return states[0].index_select(0, self.spread).view(self.rows, self.width, -1)

    def _join(self, mixer: nn.Module, args: Any, out: Any) -> Any:
        layer = self._layer(mixer)
        vars(self.cache.layers[layer]).update(self._held.pop(layer))
        states = out if isinstance(out, Tensor) else out[0]
        own = states.flatten(0, 1).index_select(0, self.gather)[None]
        return own if isinstance(out, Tensor) else (own, *out[1:])

    def _note(self, part: nn.Module, args: Any, out: Any) -> None:
        laid_out = isinstance(out, Tensor) and out.shape[:2] == (self.rows, self.width)
        is_step = laid_out and not isinstance(part, nn.Conv1d)  # one output per token
        self._outputs.setdefault(part, []).append(out if is_step else None)

    def _layer(self, mixer: nn.Module) -> int:
        index: int = vars(mixer)["layer_idx"]
        return index

    def replay(self, position: int) -> None:
        """Advance the states along the path to a position of the block; -1 = none."""
        if position < 0:
            return
        row, place = self.home[position]

        def cut(states: Tensor) -> Tensor:  # (rows, width, D) -> (1, place + 1, D)
            return states[row : row + 1, : place + 1]

        for mixer, (args, kwargs) in self._calls.items():
            args, kwargs = _replace_states(args, kwargs, cut)
            known = {
                part: [cut(one) for one in outputs if one is not None]
                for part in mixer.children()
                if (outputs := self._outputs.get(part)) and None not in outputs
            }
            with _Outputs(known):
                mixer(*args, **kwargs)


class _Outputs:
    """Context manager in which modules return known outputs, in the order of their calls."""

    def __init__(self, known: dict[nn.Module, list[Tensor]]) -> None:
        self.known, self._replaced = known, dict[nn.Module, Any]()

    def __enter__(self) -> None:
        for part, outputs in self.known.items():
            self._replaced[part] = vars(part).get("forward")
            queue = iter(outputs)
            vars(part)["forward"] = lambda *_, _queue=queue, **__: next(_queue)

    def __exit__(self, *error: Any) -> None:
        for part, forward in self._replaced.items():
            del vars(part)["forward"]
            if forward is not None:  # of hooks of others
                vars(part)["forward"] = forward


def list_paths(corner: Tensor) -> list[list[int]]:  # (q, q) bool
    """The positions on the path to each position of a block, itself last.

    Raises ValueError for a position that attends to others than its ancestors.
    """
    paths = [[at for at, one in enumerate(row) if one] for row in corner.tolist()]
    for position, path in enumerate(paths):
        before = path[:-1]
        if path[-1:] != [position] or (before and paths[before[-1]] != before):
            raise ValueError(
                f"position {position} of a block attends to {path}, which is no path of a tree; "
                "recurrent layers read trees only, so use another recipe"
            )
    return paths


def _replace_states(
    args: Sequence[Any], kwargs: dict[str, Any], change: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a mixer with other hidden states, which come first or by name."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return (), {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
