"""What drafters and recipes may ask of a model that is read, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmspec import _hf
from mmspec.targets.readers import visual
from mmspec.targets.readers.family import Family
from mmspec.targets.readers.thinned import layer_list

if TYPE_CHECKING:
    from mmspec.codes.image_family import ImageFamily
    from mmspec.targets.memory import Memory, TokenBlock

KERNELS = ("sdpa", "eager")  # kernels of attention that take any mask
USES = ("chain", "ragged")  # what may be read in steps: one row, several


class Reader(ABC):
    """A model behind two calls: `prefill` reads a prompt, `read` a block behind it.

    Holds no state of any request. `reader_maker` makes readers of other models, such as a draft
    model of this one; the modality that made this reader fills it in.
    """

    model: Any
    family: Family
    config: Any  # of the decoder
    cache_config: Any  # what its memory is laid out by
    configuration: str  # the model's whole one
    decoder: Any  # between `embed` and `head`; an encoder-decoder model has none to itself
    head: Any  # hidden states (..., D) -> logits (..., V)
    can_branch: bool  # whether trees can be read
    obstacle: str | None = None  # why not, in words behind the name of its class
    window: int | None = None  # of layers that attend to the last so many slots only
    stepwise: set[str]  # of `USES`: what is read as the model's own steps, see `step`
    words_prompts: bool = True  # whether prompts are of its vocabulary, so their end is read again
    bare: bool = False  # whether blocks that see everything go without a mask
    reader_maker: Callable[[Any], Reader] | None = None

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def vocabulary(self) -> int:
        """Tokens that it speaks."""
        return int(self.config.vocab_size)

    @abstractmethod
    def prefill(self, inputs: Mapping[str, Any], room: int) -> tuple[Any, Tensor, Any]:
        """Read a prompt: its memory, the logits (B, V) behind it, and the model's output."""

    @abstractmethod
    def read(self, memory: Any, block: Any, hidden: bool = False) -> tuple[Tensor, Tensor | None]:
        """Read a block: logits of its places, and hidden states where asked for."""

    def read_rows(self, rows: Any, block: Any, hidden: bool) -> tuple[Tensor, Tensor | None]:
        """Read a block row by row, behind `RowMemories`."""
        pieces = [self.read(row, block.row(index), hidden) for index, row in enumerate(rows.rows)]
        states = [state for _, state in pieces if state is not None]
        return torch.cat([logits for logits, _ in pieces]), torch.cat(states) if hidden else None

    def divided(self, logits: Tensor) -> Tensor:  # (..., V) -> (..., V)
        """Logits of the distribution that the model was trained for, where its class forgets a division."""
        name = self.family.undivided
        return logits if name is None else logits / getattr(self.config, name)

    def own_steps(self, inputs: Mapping[str, Any], behind: Tensor) -> Tensor:  # (B, 1 + n, V)
        """What the model itself says behind a prompt and each of the tokens (B, n), divided."""
        return self.divided(_hf.own_steps(self.model, inputs, behind))

    @property
    def networks(self) -> Sequence[nn.Module]:
        """What it calls, for recordings; none where these cannot be made again."""
        return ()

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers of its decoder. Raises ValueError where they are not in a list."""
        return list(self.decoder.get_submodule(layer_list(self.decoder)))

    def embed(self, tokens: Tensor) -> Tensor:  # (B, q) -> (B, q, D)
        """What the decoder reads for tokens. Raises ValueError where that is not at hand."""
        raise ValueError(
            f"{type(self.model).__name__} reads its decoder's tokens behind an encoder and takes "
            "no embeddings in their place"
        )

    @abstractmethod
    def thinned(self, skip: Sequence[int], depth: int | None = None) -> Reader:
        """The same weights with some decoder layers left out. Raises ValueError if they cannot."""

    def reader_of(self, model: Any) -> Reader:
        """What reads another model. Raises ValueError for what cannot work."""
        if self.reader_maker is None:
            raise ValueError(
                f"this reader of a {type(self.model).__name__} was made by hand and cannot tell "
                f"how a {type(model).__name__} is read; set its reader_maker"
            )
        return self.reader_maker(model)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Ids that stand for visual features in a prompt."""
        return visual.placeholder_ids(self.model, self.family)

    @property
    def visual_ids(self) -> tuple[int, ...]:
        """All ids that only make sense beside a picture: placeholders and their frame."""
        return visual.visual_ids(self.model, self.family)

    @property
    def tower_width(self) -> int | None:
        """Width of the vision tower's features; None where it has not one per placeholder."""
        tower = self.family.tower
        return None if tower is None else tower.width(self.model.config)

    def feature_layout(self, tower: bool = False) -> visual.FeatureLayout:
        """How encoder outputs lie over the prompt; before the projector with `tower`."""
        return visual.feature_layout(self.model, self.family, tower)

    def check_features(self) -> None:
        """Refuse to be asked for vision features it cannot hand out. Raises ValueError."""
        visual.check_features(self.model, self.family)

    def check_embeddable(self) -> None:
        """Refuse to be given features as embeddings where that loses some. Raises ValueError."""
        visual.check_embeddable(self.model)

    @cached_property
    def image_family(self) -> ImageFamily | None:
        """How it draws: codebook, grids, decoder; None for a model that speaks no picture tokens.

        Raises ValueError for one that lacks a part of that.
        """
        make = self.family.image_family
        return None if make is None else make(self.model)

    def check_draws(self) -> ImageFamily:
        """How it draws. Raises ValueError for a model that speaks no picture tokens."""
        found = self.image_family
        if found is None:
            raise ValueError(
                f"{type(self.model).__name__} ({self.model.config.model_type}) speaks no picture "
                "tokens; give a model that draws"
            )
        return found


def check_kernel(config: Any) -> None:
    """Refuse attention that takes no mask of a tree. Raises ValueError."""
    kernel = config._attn_implementation
    if kernel not in KERNELS:
        raise ValueError(
            f"attention implementation {kernel!r} takes no tree mask; load the model with "
            "attn_implementation='sdpa', or call model.set_attn_implementation('sdpa')"
        )


def takes_masks(config: Any) -> bool:
    """Whether a kernel takes any mask as it is; others are measured, with one mask per row.

    Raises ValueError for those that are known to take none: flash and paged attention.
    """
    kernel = str(config._attn_implementation)
    if "flash" in kernel or "paged" in kernel:
        check_kernel(config)
    return kernel in KERNELS


def step(memory: Memory, block: TokenBlock) -> tuple[Tensor, Tensor]:
    """Plan where a chain of one row goes, behind what is kept, as `generate()` would place it.

    For classes that take no positions, or do otherwise with a mask than a drafted block needs: the
    model's own step of several tokens makes positions and mask itself. Row by row, since rows that
    keep different numbers of tokens would need masks of their own.
    Returns position_ids (1, q) and the mask (1, view) of what is no padding.
    """
    start = memory.kept[0] + block.behind
    memory.cache.plan_uniform(start, block.length)
    positions = block.depths + memory.rope[0]
    if memory.last is not None:
        positions = positions.clamp_max(memory.last)
    seen = torch.ones(1, start + block.length, dtype=torch.int64, device=memory.like.device)
    seen[:, : memory.padding[0]] = 0
    return positions, seen
