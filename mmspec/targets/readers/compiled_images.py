"""Image encoders run as compiled graphs: `accelerate(model, compile=True)`.

A graph is the model's own `get_image_features` (or `get_video_features`): tower and projector, for
one shape of pixels. What the encoder reads on the host, such as grids, is constant in a graph, so
pixels of one shape with other grids have another one. The features of a new graph are compared
with the eager ones of two images: those of the request, and the same mirrored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from mmspec import _hf
from mmspec.targets.graphs import Function, GraphSet, ModuleFingerprint, copy_plain
from mmspec.targets.readers.hooks import list_modules
from mmspec.targets.readers.reader import replace_module
from mmspec.targets.readers.rounding import rounding_margin

MAX_GRAPHS = 4  # shapes of images
MAX_VALUES = 2**21  # of the pixels of a request: more are bound by arithmetic
MAX_CONSTANTS = 1024  # numbers of a tensor that is constant in a graph
_MAX_SEEN = 256  # shapes that are known to have occurred
_ENCODERS = ("get_image_features", "get_video_features")


class CompiledImages:
    """The compiled image encoders of a model.

    Images of a model without grids are compiled at once; those with grids, which may all be of
    other sizes, when a size occurs again.
    """

    def __init__(self, graphs: GraphSet) -> None:
        self.graphs = graphs
        self.seen: set[Any] = set()
        self.results: dict[Any, tuple[list[Any], Any]] = {}  # leaves and layout, by graph
        self.settings: list[Any] = []  # of the configurations

    def attach(self, model: Any, own: Any, decoder: Any) -> Any:
        """A shallow copy of `model` whose image encoders run as graphs; itself where it has none.

        `own` is the user's model, of which `model` may be a copy, and `decoder` is its decoder.
        """
        names = [name for name in _ENCODERS if callable(getattr(own.base_model, name, None))]
        if not names or self.graphs.is_refused or _hf.unwrap_compiled(own) is not own:
            return model
        base, whole = model.base_model, own.base_model
        twin = copy.copy(base)
        for name in names:
            vars(twin)[name] = self._wrap(whole, name, decoder)
        return replace_module(model, base, twin)

    def _wrap(self, whole: Any, name: str, decoder: Any) -> Callable[..., Any]:
        eager = getattr(whole, name)

        @wraps(eager)
        def encode(*args: Any, **given: Any) -> Any:
            call = _Call(name, eager, args, given)
            if call.key is None or torch.is_grad_enabled() or not self._follow(whole, decoder):
                return eager(*args, **given)
            if call.key in self.graphs.graphs:
                out = self._run(call, call.pixels, lambda out: None)
                assert out is not None
                return self._restore(call.key, out)
            found = eager(*args, **given)
            if self._is_due(call):
                self._follow(whole, decoder)  # the first forward installs hooks of transformers
                self._compile(call, found)
            return found

        return encode

    def _follow(self, whole: Any, decoder: Any) -> bool:
        """Compile anew if the encoders have changed; False where they must run eager."""
        parts = [one for one in whole._modules.values() if one is not None and one is not decoder]
        modules = list_modules(parts)
        if (reason := _find_obstacle(modules)) is not None:
            self.graphs.note(reason)
            return False
        configs = {id(one): one for one in (whole.config, *map(_config_of, modules)) if one}
        settings = [copy_plain(vars(one)) for one in configs.values()]
        if settings != self.settings:
            self.settings = settings
            self.graphs.clear()
        self.graphs.follow(ModuleFingerprint(parts))
        return not self.graphs.is_refused

    def _is_due(self, call: _Call) -> bool:
        """Whether images of a new shape are compiled."""
        if sum(one.numel() for one in call.pixels) > MAX_VALUES:
            self.graphs.note(f"images of more than {MAX_VALUES} values are bound by arithmetic")
            return False
        if call.has_constants and call.key not in self.seen:
            if len(self.seen) == _MAX_SEEN:
                self.seen.clear()
            self.seen.add(call.key)
            return False
        if len(self.graphs.graphs) >= MAX_GRAPHS:
            self.graphs.note(f"more than {MAX_GRAPHS} shapes of images")
            return False
        return True

    def _compile(self, call: _Call, found: Any) -> None:
        """Compile a graph, and compare it with the results `found` of the same images."""
        leaves, layout = tree_flatten(found)
        own = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.results[call.key] = [_TENSOR if isinstance(x, Tensor) else x for x in leaves], layout
        mirrored = [one.flip(-1).contiguous() for one in call.pixels]
        expected = call.encode(*mirrored)
        if self._run(call, mirrored, lambda out: _find_gap(out, expected)) is None:
            return
        out = self._run(call, call.pixels, lambda out: None)
        if out is not None and (gap := _find_gap(out, own)) is not None:
            self.graphs.graphs.pop(call.key)
            self.graphs.refuse(f"its features differ when compiled (by {gap:.2g} of their spread)")

    def _run(
        self,
        call: _Call,
        pixels: Sequence[Tensor],
        compare: Callable[[Sequence[Tensor]], float | None],
    ) -> Sequence[Tensor] | None:
        return self.graphs.run(call.key, call.make_function, pixels, tuple, compare)

    def _restore(self, key: Any, out: Sequence[Tensor]) -> Any:
        """The results of a graph in the form of the eager ones."""
        leaves, layout = self.results[key]
        tensors = iter(out)
        return tree_unflatten([next(tensors) if x is _TENSOR else x for x in leaves], layout)


_TENSOR = object()  # in place of a tensor among results


class _Call:
    """A call of an encoder: its pixels, and a key of all that a graph keeps.

    `key` is None where a graph cannot keep it: an argument that is no tensor and no plain value.
    """

    def __init__(
        self, name: str, eager: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]
    ) -> None:
        self.eager = eager
        self.leaves, self.layout = tree_flatten((tuple(args), dict(given)))
        places = [at for at, leaf in enumerate(self.leaves) if _is_read_by_graph(leaf)]
        self.pixels = [self.leaves[at] for at in places]
        for at in places:
            self.leaves[at] = _TENSOR  # no graph keeps the images of a request
        kept = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.has_constants = bool(kept)
        plain = [
            leaf for leaf in self.leaves if leaf is not _TENSOR and not isinstance(leaf, Tensor)
        ]
        self.key: Any = None
        if self.pixels and all(isinstance(leaf, _PLAIN) for leaf in plain):
            shapes = [(one.shape, one.dtype, one.device) for one in (*self.pixels, *kept)]
            values = [tuple(one.flatten().tolist()) for one in kept]
            self.key = (name, str(self.layout), *plain, *shapes, *values)

    def encode(self, *pixels: Tensor) -> list[Tensor]:
        """The tensors among the results of the model's own encoder."""
        tensors = iter(pixels)
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self.leaves]
        args, given = tree_unflatten(leaves, self.layout)
        found, _ = tree_flatten(self.eager(*args, **given))
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    def make_function(self) -> Function:
        """`encode` as a function of its own."""

        def encode(*pixels: Tensor) -> list[Tensor]:
            return self.encode(*pixels)

        return encode


_PLAIN = (bool, int, float, str, type(None))


def _is_read_by_graph(leaf: Any) -> bool:
    """Whether an argument is an input of a graph: pixels, and masks of them."""
    is_tensor = isinstance(leaf, Tensor)
    return is_tensor and (leaf.is_floating_point() or leaf.numel() > MAX_CONSTANTS)


def _find_obstacle(modules: Iterable[nn.Module]) -> str | None:
    """Why encoders run eager, if they do."""
    for own in map(vars, modules):
        if "_hf_hook" in own:
            return "accelerate moves its inputs or weights between devices"
        for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"]):
            # transformers collects hidden states, which are results of a graph
            if hooks and not all(_is_of_transformers(one) for one in hooks.values()):
                return "its image encoder has forward hooks"
    return None


def _is_of_transformers(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def _config_of(module: nn.Module) -> Any:
    found = vars(module).get("config")
    return found if hasattr(found, "__dict__") else None


def _find_gap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float | None:
    """How far results are from the eager ones, in units of their spread; None if by rounding."""
    for own, one in zip(ours, theirs, strict=True):
        apart = (own.float() - one.float()).square().mean().sqrt()
        gap = float((apart / one.float().std().clamp_min(1e-6)).nan_to_num(torch.inf))
        if gap > rounding_margin(one.dtype):
            return gap
    return None
