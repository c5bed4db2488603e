"""Forward hooks that record hidden states of a target: of the last layer and of others."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.targets.cache import cross_attention_layers
from mmspec.targets.memory import Memory
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.reader import Reader, layer_list_name, without_layers

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


class HiddenStateHook:
    """Context manager that records the decoder's inputs and hidden states after the final norm.

    Images are included as embeddings; a guided backbone reads both branches, so B is 2B there. The
    hooks are removed at exit. Raises ValueError at construction for a model without a separate
    decoder.
    """

    def __init__(self, backbone: Reader) -> None:
        check_states(backbone)
        self.backbone = backbone
        self.embeds: Tensor  # (B, L, D) inputs
        self.hidden: Tensor  # (B, L, D) outputs
        self.positions: Tensor | None  # (B, L), or (axes, B, L) with M-RoPE; None = not given
        self._hook: Any = None

    def __enter__(self) -> HiddenStateHook:
        self._hook = self.backbone.decoder.register_forward_hook(self._note, with_kwargs=True)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()

    def _note(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        embeds = kwargs.get("inputs_embeds")
        ids: Any = args[0] if args else kwargs.get("input_ids")
        self.embeds = self.backbone.embed(ids) if embeds is None else embeds
        self.hidden = out.last_hidden_state
        self.positions = kwargs.get("position_ids")


class LayerStatesHook:
    """Context manager that records the hidden states of some layers, by their Hugging Face index.

    0 is the input of the first layer, i the output of layer i - 1; the last index is after the
    final norm, unless `normed` is False. Raises ValueError at construction for a model without a
    separate decoder, and for an index out of range.
    """

    def __init__(self, backbone: Reader, layers: Sequence[int], normed: bool = True) -> None:
        check_states(backbone)
        stack = list(backbone.layers)
        wrong = [layer for layer in layers if not 0 <= layer <= len(stack)]
        if wrong:
            raise ValueError(
                f"hidden states {wrong} are required, but {type(backbone.model).__name__} has "
                f"{len(stack)} layers, whose states are 0 to {len(stack)}; give others"
            )
        self.layers = tuple(layers)
        crossed = cross_attention_layers(backbone.config)
        before = [at for layer in layers for at in _read_before(layer, crossed)]
        self.noted: dict[int, list[Tensor]] = {layer: [] for layer in (*layers, *before)}
        self.places = {layer: stack[max(layer - 1, 0)] for layer in self.noted}
        if normed and len(stack) in self.places:
            self.places[len(stack)] = backbone.decoder
        self._hooks: list[Any] = []

    def __enter__(self) -> LayerStatesHook:
        for layer, module in self.places.items():
            self._hooks.append(
                module.register_forward_hook(partial(self._after, layer))
                if layer
                else module.register_forward_pre_hook(self._before, with_kwargs=True)
            )
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def offer(self, last: int = 0) -> Tensor:  # (B, L, k * D)
        """Concatenated states of all layers, of the `last` positions; 0 = of all."""
        rows = [torch.cat([one[:, -last:] for one in self._states(at)]) for at in self.layers]
        return torch.cat(rows, -1)

    def _states(self, layer: int) -> list[Tensor]:
        """The states of a layer; of a skipped one, its input."""
        return self.noted[layer] or self._states(layer - 1)

    def _before(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.noted[0].append(args[0] if args else kwargs["hidden_states"])

    def _after(self, layer: int, module: torch.nn.Module, args: Any, out: Any) -> None:
        if not isinstance(out, Tensor):
            out = out[0]  # a tuple, or the output of a whole decoder
        self.noted[layer].append(out)


def fill_states(hooks: Iterable[LayerStatesHook], memory: Any) -> None:
    """Record the states of a compiled forward after a memory, which calls no hooks."""
    if not isinstance(memory, Memory) or memory.fixed is None:
        return
    for hook in hooks:
        for layer, noted in hook.noted.items():
            if not noted and layer in memory.fixed.states:
                noted.append(memory.fixed.states[layer])


def list_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules with all inside them, as `nn.Module.modules`, which takes ten times as long."""
    found = list(modules)
    for one in found:
        found += [part for part in one._modules.values() if part is not None]
    return found


def find_recorders(decoder: nn.Module) -> list[LayerStatesHook] | None:
    """The recorders on the layers of a decoder; None where there are other hooks."""
    found = dict[int, LayerStatesHook]()
    for module in list_modules([decoder]):
        own = vars(module)
        hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
        for hook in () if module is decoder else hooks:
            recorder = getattr(getattr(hook, "func", hook), "__self__", None)
            if not isinstance(recorder, LayerStatesHook):
                return None
            found[id(recorder)] = recorder
    return list(found.values())


def note_states(
    recorders: Iterable[LayerStatesHook], decoder: nn.Module, states: Mapping[int, Tensor]
) -> None:
    """Record the states of layers after a forward of `decoder` that called no hooks of theirs."""
    for recorder in recorders:
        for layer, noted in recorder.noted.items():
            if recorder.places[layer] is not decoder:
                noted.append(states[layer])


def _read_before(layer: int, crossed: Sequence[int]) -> list[int]:
    """Layers whose states replace those of a layer that may be skipped, the nearest first."""
    found = []
    while layer and layer - 1 in crossed:
        layer -= 1
        found.append(layer)
    return found


_LAYERS = "layers:"  # prefix of the feature name: "layers:2,16,29"


def layer_states(layers: Sequence[int]) -> str:
    """The feature name of the hidden states of these layers (Hugging Face indices)."""
    return _LAYERS + ",".join(map(str, layers))


def wanted_layers(required_features: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The names in `required_features` that are hidden states of layers, and these layers."""
    named = [name for name in sorted(required_features) if name.startswith(_LAYERS)]
    return {name: tuple(map(int, name.removeprefix(_LAYERS).split(","))) for name in named}


def check_states(backbone: Reader) -> None:
    """Check that a model has a separate decoder. Raises ValueError."""
    if isinstance(backbone, EncoderDecoder):
        raise ValueError(
            f"{type(backbone.model).__name__} hides the states of its decoder behind an "
            "encoder, and a feature head or a judge needs them; use a draft model, and a recipe "
            "such as speculative-sampling"
        )


class SnapshotHook:
    """Context manager that records the input of the first layer and the output of an early one.

    The early layer is at a quarter of the depth, at least the second (ParallelVLM; reconstructed).
    Raises ValueError at construction for a model without a separate decoder.
    """

    def __init__(self, backbone: Reader) -> None:
        if isinstance(backbone, EncoderDecoder):
            raise ValueError(
                f"{type(backbone.model).__name__} hides the states of its decoder behind an "
                "encoder; choose a compressor that needs no hidden states"
            )
        layers = backbone.layers
        self.first, self.early = layers[0], layers[min(max(2, len(layers) // 4), len(layers)) - 1]
        self.states: list[Tensor] = []  # (B, L, D) each
        self._hooks: list[Any] = []

    def __enter__(self) -> SnapshotHook:
        self._hooks = [
            self.first.register_forward_pre_hook(self._before, with_kwargs=True),
            self.early.register_forward_hook(self._after),
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def offer(self) -> Tensor:  # (2, B, L, D)
        return torch.stack(self.states)

    def _before(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.states.append(args[0] if args else kwargs["hidden_states"])

    def _after(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        self.states.append(out[0] if isinstance(out, tuple) else out)


def record_layers(decoder: Any, layers: Sequence[int]) -> tuple[Any, list[list[Tensor] | None]]:
    """A shallow copy of a decoder that appends the states of layers to lists.

    Layers are Hugging Face indices: 0 is the input of the first one, i the output of layer i - 1.
    The last one is after the final norm: None, the decoder's own output.
    """
    twin: Any = _without_hooks(without_layers(decoder, ()))
    stack = list(twin.get_submodule(layer_list_name(twin)))
    copies = dict[int, Any]()
    sinks: list[list[Tensor] | None] = []
    for layer in layers:
        if layer == len(stack):
            sinks.append(None)
            continue
        sink: list[Tensor] = []
        sinks.append(sink)
        at = max(layer - 1, 0)
        own = copies.setdefault(at, _without_hooks(copy.copy(stack[at])))
        if layer:
            own.register_forward_hook(partial(_append_output, sink))
        else:
            own.register_forward_pre_hook(partial(_append_input, sink), with_kwargs=True)
    left = [copies.get(at, layer) for at, layer in enumerate(stack)]
    twin._modules[layer_list_name(twin)] = nn.ModuleList(left)
    return twin, sinks


def _without_hooks(module: nn.Module) -> nn.Module:
    """A shallow copy shares the hooks of its original, which others add and remove."""
    for name in _HOOKS:
        setattr(module, name, OrderedDict())
    return module


def _append_output(sink: list[Tensor], module: nn.Module, args: Any, out: Any) -> None:
    sink.append(out if isinstance(out, Tensor) else out[0])


def _append_input(sink: list[Tensor], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    sink.append(args[0] if args else kwargs["hidden_states"])
