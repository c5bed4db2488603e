"""The interface of a model that is read in blocks, and the data that differs between families.

Also shallow copies of models without some layers, and the shared output of CTC encoders.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmspec import _hf
from mmspec._hf_cache import execution_device
from mmspec.targets.readers import visual

if TYPE_CHECKING:
    from mmspec.codes.image_family import ImageFamily
    from mmspec.targets.memory import TokenBlock

KERNELS = ("sdpa", "eager")  # attention kernels that take any mask
USES = ("chain", "ragged")  # block types that may be read stepwise: one row, several


@dataclass(frozen=True)
class CtcHead:
    """The CTC head of a family; filled in by a modality."""

    media: str  # request key of the audio
    encoder: Callable[[Any], Any]  # model -> module of states (B, T, D)
    head: Callable[[Any], Any]  # model -> module of logits (B, T, V)
    make_mask: Callable[
        [Any, Mapping[str, Any], int], Tensor | None
    ]  # model, request, T -> (B, T) bool
    blank: int = 0


@dataclass(frozen=True)
class TowerFeatures:
    """A vision tower that gives one feature per placeholder, before the model's own projector."""

    width: Callable[[Any], int]  # the model's config -> H
    parts: Callable[[Any, Any], Sequence[Tensor]]  # config, tower's output -> (n, H) per image
    class_layer: Callable[
        [Any], int | None
    ]  # config -> layer whose class token is read; None: none


@dataclass(frozen=True)
class Family:
    """Differences between model families in decoding; filled in by a modality."""

    name: str = "text"
    media: tuple[str, ...] = ()  # request keys of images; empty = text only
    rope_axes: int = 1  # rows of `position_ids`; 3 = M-RoPE
    is_direct: bool = False  # logits are head(decoder(...)): skip the multimodal wrapper on blocks
    placeholders: tuple[str, ...] = ()  # config names of the placeholder ids of visual features
    visual_ids: tuple[str, ...] = ()  # config names of further ids around an image
    is_square: bool = False  # the features of an image form a square
    tower: TowerFeatures | None = None  # None = only features after the model's own projector
    image_family: Callable[[Any], ImageFamily] | None = None  # of a model that generates images
    logit_divisor: str | None = None  # name, in the decoder's config, of a divisor of the logits
    # that its class omits: greedy decoding is not affected, but probabilities are
    ctc: CtcHead | None = None  # of a recogniser whose encoder predicts labels
    writes_text: bool = True  # generates text: `generate`
    add_placeholders: Callable[[Any, Mapping[str, Any]], dict[str, Any]] | None = (
        None  # model, request ->
    )
    # the request with placeholders, which a processor may leave out
    # model, request -> positions (axes, B, T) of the tokens after the prompt that it has just read
    next_positions: Callable[[Any, Mapping[str, Any]], Tensor | None] | None = None
    fixed_size: Callable[[Any], tuple[int, int]] | None = None  # config -> rows, columns of images

    @property
    def draws_images(self) -> bool:
        """Whether it generates image tokens: `generate_images`."""
        return self.image_family is not None


class Reader(ABC):
    """A model with two calls: `prefill` reads a prompt, `read` a block after it.

    Holds no state of any request. `reader_maker` makes readers of other models, such as a draft
    model; it is set by the modality that made this reader.
    """

    model: Any
    family: Family
    config: Any  # of the decoder
    cache_config: Any  # of its cache layers
    configuration: str  # of the whole model, as JSON
    decoder: Any  # between `embed` and `head`; not of an encoder-decoder model
    head: Any  # hidden states (..., D) -> logits (..., V)
    can_branch: bool  # whether branches of a tree share the cache: keys at slots, with a mask
    can_fork: bool = False  # whether trees are read with a recurrent state for each branch
    obstacle: str | None = None  # why not, as a phrase after its class name
    window: int | None = None  # of sliding-window layers, in slots
    stepwise: set[str]  # the `USES` that are read as the model's own steps, see `Memory.place_step`
    has_token_prompts: bool = True  # whether prompts are of its vocabulary: can be read again
    is_maskless: bool = False  # whether blocks that attend to everything need no mask
    reader_maker: Callable[[Any], Reader] | None = None

    @property
    def reads_trees(self) -> bool:
        """Whether a block may be a tree."""
        return self.can_branch or self.can_fork

    @property
    def device(self) -> torch.device:
        return execution_device(self.model.get_input_embeddings())

    @property
    def vocabulary(self) -> int:
        """Size of its vocabulary."""
        return int(self.config.vocab_size)

    def compile_blocks(self, make_graphs: Callable[..., Any], layers: Sequence[int] = ()) -> str:
        """As `DraftModel.compile_blocks`; `layers` are hidden states that are recorded."""
        return "only the blocks of decoders without guidance are compiled"

    def prepare_graphs(self, memory: Any, new_tokens: int) -> None:
        """Make the memory of a prompt ready for compiled blocks, where they are."""
        return

    @abstractmethod
    def prefill(self, inputs: Mapping[str, Any], extra_slots: int) -> tuple[Any, Tensor, Any]:
        """Read a prompt; return its memory, the next-token logits (B, V) and the model's output."""

    @abstractmethod
    def read(self, memory: Any, block: Any, hidden: bool = False) -> tuple[Tensor, Tensor | None]:
        """Read a block; return the logits of its positions, and hidden states if requested."""

    def read_rows(self, rows: Any, block: Any, hidden: bool) -> tuple[Tensor, Tensor | None]:
        """Read a block row by row, after `RowMemories`, without what a row cannot keep.

        That may lie beyond the last position. Nodes after `rows.num_useful` have the scores of the
        last one read, finished rows (-1) zeros.
        """
        useful = rows.num_useful or [block.length] * rows.batch
        read: dict[int, Sequence[Tensor]] = {}
        for index, row in enumerate(rows.rows):
            if useful[index] >= 0:
                own = whole = block.row(index)
                if block.is_chain:  # the nodes of a tree are not in the order of their depths
                    own = cut_nodes(whole, useful[index])
                found = [x for x in self.read(row, own, hidden) if x is not None]
                read[index] = [_repeat_last(x, whole.length - own.length) for x in found]
        blank = [torch.zeros_like(x) for x in next(iter(read.values()))]
        columns = zip(*(read.get(index, blank) for index in range(rows.batch)), strict=True)
        logits, *states = map(torch.cat, columns)
        return logits, states[0] if hidden else None

    def divide_logits(self, logits: Tensor) -> Tensor:  # (..., V) -> (..., V)
        """Divide logits as in training, if the model class omits it (`Family.logit_divisor`)."""
        name = self.family.logit_divisor
        return logits if name is None else logits / getattr(self.config, name)

    def score_stepwise(
        self, inputs: Mapping[str, Any], continuation: Tensor
    ) -> Tensor:  # (B, 1 + n, V)
        """Logits of the model's own steps after a prompt and each of the tokens (B, n)."""
        return self.divide_logits(_hf.score_stepwise(self.model, inputs, continuation))

    @property
    def networks(self) -> Sequence[nn.Module]:
        """The modules it calls, for recorders; empty if not supported."""
        return ()

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers of its decoder. Raises ValueError if they are not in a list."""
        return list(self.decoder.get_submodule(layer_list_name(self.decoder)))

    def embed(self, tokens: Tensor) -> Tensor:  # (B, q) -> (B, q, D)
        """Input embeddings of tokens. Raises ValueError if the decoder takes none."""
        raise ValueError(
            f"{type(self.model).__name__} is an encoder-decoder and takes no embeddings of decoder "
            "tokens; use another recipe"
        )

    @abstractmethod
    def skip_layers(self, skip: Sequence[int], depth: int | None = None) -> Reader:
        """The same weights with some decoder layers left out. Raises ValueError if they cannot."""

    def make_reader(self, model: Any) -> Reader:
        """Make the reader of another model. Raises ValueError for an unsupported one."""
        if self.reader_maker is None:
            raise ValueError(
                f"this reader of a {type(self.model).__name__} has no reader_maker for a "
                f"{type(model).__name__}; set its reader_maker"
            )
        return self.reader_maker(model)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Placeholder ids of visual features in a prompt."""
        return visual.placeholder_ids(self.model, self.family)

    @property
    def visual_ids(self) -> tuple[int, ...]:
        """All ids of images: placeholders and the ids around them."""
        return visual.visual_ids(self.model, self.family)

    @property
    def tower_width(self) -> int | None:
        """Width of the vision tower's features; None if there is not one per placeholder."""
        tower = self.family.tower
        return None if tower is None else tower.width(self.model.config)

    def feature_layout(self, tower: bool = False) -> visual.FeatureLayout:
        """Layout of encoder outputs over the prompt; with `tower`, of unprojected features."""
        return visual.feature_layout(self.model, self.family, tower)

    def check_features(self) -> None:
        """Check that the model provides vision features. Raises ValueError."""
        visual.check_features(self.model, self.family)

    def check_embeddable(self) -> None:
        """Check that features can be given as embeddings without loss. Raises ValueError."""
        visual.check_embeddable(self.model)

    @cached_property
    def image_family(self) -> ImageFamily | None:
        """Codebook, grids and decoder of image tokens; None for a model that generates none.

        Raises ValueError if a part is missing.
        """
        make = self.family.image_family
        return None if make is None else make(self.model)

    def require_image_family(self) -> ImageFamily:
        """Return `image_family`. Raises ValueError for a model that generates no image tokens."""
        found = self.image_family
        if found is None:
            raise ValueError(
                f"{type(self.model).__name__} ({self.model.config.model_type}) generates no image "
                "tokens; give a model that does"
            )
        return found


def check_kernel(config: Any) -> None:
    """Check that the attention kernel takes a tree mask. Raises ValueError."""
    kernel = config._attn_implementation
    if kernel not in KERNELS:
        raise ValueError(
            f"attention implementation {kernel!r} takes no tree mask; load the model with "
            "attn_implementation='sdpa', or call model.set_attn_implementation('sdpa')"
        )


def takes_masks(config: Any) -> bool:
    """Whether a kernel takes any mask; others are checked, with one mask per row.

    Raises ValueError for those that take none: flash and paged attention.
    """
    kernel = str(config._attn_implementation)
    if "flash" in kernel or "paged" in kernel:
        check_kernel(config)
    return kernel in KERNELS


def cut_nodes(block: TokenBlock, nodes: int) -> TokenBlock:
    """A block of one row with its first `nodes` draft nodes, and at least one token."""
    length = min(max(block.waiting + max(nodes, 0), 1), block.length)
    corner = block.corner[:, :length, : block.num_preceding + length]
    embeds = None if block.embeds is None else block.embeds[:, : length - block.waiting]
    tokens, depths = block.tokens[:, :length], block.depths[:, :length]
    return replace(block, tokens=tokens, depths=depths, corner=corner, embeds=embeds)


def _repeat_last(x: Tensor, times: int) -> Tensor:  # (1, n, D) -> (1, n + times, D)
    return torch.cat((x, x[:, -1:].expand(-1, times, -1)), 1) if times else x


@dataclass(frozen=True)
class CtcOutput:
    """The output of a CTC encoder and its head for the audio of a request."""

    encoded: Any  # the encoder's output
    log_probs: Tensor  # (B, T, V) float32
    mask: Tensor  # (B, T) bool, False = padding
    blank: int


def run_ctc(model: Any, ctc: CtcHead, inputs: Mapping[str, Any]) -> CtcOutput | None:
    """Run the encoder and its head; None for a request without audio."""
    if (sound := inputs.get(ctc.media)) is None:
        return None
    encoded = ctc.encoder(model)(sound.to(model.dtype))
    states = encoded.last_hidden_state
    log_probs = ctc.head(model)(states).float().log_softmax(-1)
    mask = ctc.make_mask(model, inputs, states.shape[1])
    if mask is None:
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    return CtcOutput(encoded, log_probs, mask, ctc.blank)


@contextmanager
def reuse_encoder_output(
    model: Any, ctc: CtcHead | None, output: CtcOutput | None
) -> Iterator[None]:
    """Within this context the model's encoder returns its earlier output, without a forward."""
    if ctc is None or output is None:
        yield
        return
    attributes = vars(ctc.encoder(model))
    replaced = {name: attributes[name] for name in {"forward"} & attributes.keys()}
    attributes["forward"] = lambda *_, **__: output.encoded
    try:
        yield
    finally:
        del attributes["forward"]
        attributes |= replaced  # of hooks of others


def layer_list_name(decoder: nn.Module) -> str:
    """The name of a decoder's list of layers, its longest one. Raises ValueError without any."""
    lists = {n: part for n, part in decoder.named_children() if isinstance(part, nn.ModuleList)}
    if not lists:
        raise ValueError(
            f"{type(decoder).__name__} has no list of layers, so none can be skipped or hooked; "
            "use a draft model, and no compressor that needs attention or states of the target"
        )
    return max(lists, key=lambda name: len(lists[name]))


def without_layers(decoder: Any, skip: Sequence[int], depth: int | None = None) -> Any:
    """A shallow copy of a decoder without some layers; weights are shared."""
    name = layer_list_name(decoder)
    layers = list(decoder.get_submodule(name))[:depth]
    twin = copy.copy(decoder)
    left = [layer for index, layer in enumerate(layers) if index not in set(skip)]
    twin._modules = {**decoder._modules, name: nn.ModuleList(left)}
    return twin


def replace_module(model: nn.Module, part: nn.Module, other: nn.Module) -> Any:
    """A shallow copy of a model with one module replaced; weights are shared."""
    if model is part:
        return other
    name = next(n for n, child in model.named_children() if any(m is part for m in child.modules()))
    twin = copy.copy(model)
    twin._modules = dict(model._modules)
    twin._modules[name] = replace_module(model.get_submodule(name), part, other)
    return twin


def copy_reader(reader: Any, depth: int | None = None) -> Any:
    """A reader of a shallow copy of the model, so that no prompt state is stored on the model.

    `depth` keeps only the first layers. Returns the reader itself if it has no list of layers.
    """
    try:
        twin = reader.skip_layers((), depth)
    except ValueError:
        return reader
    if twin.model is reader.model:
        twin.model = replace_module(_hf.unwrap_compiled(reader.model), reader.decoder, twin.decoder)
    return twin


def first_layers_reader(reader: Any, slots: Sequence[Any]) -> Any:
    """A reader of the first layers: as many as contain one of each kind, and one more.

    The last one reads the states of the others in the cache `slots`. Layers are of the same kind if
    their modules and settings are equal but for the index. None if no layer is skipped; raises
    ValueError if the layers are not in a list.
    """
    layers = list(reader.layers)
    named = vars(reader.config).get("layer_types") or [None] * len(layers)
    windows = [(type(slot), vars(slot).get("window")) for slot in slots]
    kinds = [(_kind(layer), *other) for layer, *other in zip(layers, named, windows, strict=True)]
    depth = max(kinds.index(kind) for kind in kinds) + 2
    return None if depth >= len(layers) else copy_reader(reader, depth)


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """The classes and plain settings of a layer's modules."""
    return tuple(
        (
            type(part),
            *((n, v) for n, v in vars(part).items() if type(v) in _PLAIN and _is_plain_setting(n)),
        )
        for part in layer.modules()
    )


_PLAIN = frozenset((bool, int, float, str, type(None)))


def _is_plain_setting(name: str) -> bool:
    """Whether a setting is public and no layer index."""
    return not name.startswith("_") and name.rpartition("_")[2] not in ("idx", "index", "id")
