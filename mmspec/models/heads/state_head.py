"""Base classes of heads that predict hidden states of a target autoregressively.

Such a head reads a sequence of slots. Slot t holds the embedding of token t + 1 and a *state* of
token t, and outputs the state of token t + 1, which gives the distribution of token t + 2:

    features of the target --fuse--> state of slot t --head--> state of slot t + 1 --head again ..
                                                       '--> logits of token t + 2

The configuration selects the tapped features, the treatment of image slots, and the position ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mmspec.models.llama_layers import FULL, SLIDING, AttentionMask, Layers, LlamaHead
from mmspec.targets.fixed import BlockPlan, FixedCache

_SHAPE = (  # fields that a head shares with the layers of its target
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "attention_bias", "initializer_range", "max_position_embeddings"),
)
_THETA = 10_000.0
_SECTIONS = ("mrope_section", "mrope_interleaved")
_BY_LENGTH = ("dynamic", "longrope")  # rope types whose frequencies depend on the length
VISUAL_SLOTS = ("fused", "placeholder", "raw", "hidden", "compressed")
ALL_FUSED = ("fused", "placeholder", "hidden")  # of heads without a path around the fusion
POSITIONS = ("keep", "compact", "mrope")
CHOICES = frozenset(
    ("tapped_layers", "visual_slots", "positions", "num_steps", "visual_keep", "sliding_window")
)


class StateHeadConfig(LlamaConfig):
    """`hidden_size` is that of the head's states, `vocab_size` the target's vocabulary.

    - `tapped_layers`: Hugging Face indices of the hidden states that are concatenated as its
      features
      (0 = embeddings, i = after layer i - 1, un-normed; the last index is after the final norm).
      None = the default of the class.
    - `visual_slots`, for slots of image embeddings: "fused", like text; "placeholder", with the
      embedding of the placeholder token; "raw", the embedding without the feature; "hidden",
      dropped; "compressed", replaced by fewer slots that the head computes.
    - `positions`: "keep", the slot's index in the prompt; "compact", counted over the slots that
      are read; "mrope", the target's position ids on three axes (of token t for slot t).
    - `num_steps`: number of learned residuals, one per draft step of a self-fed state.
    - `visual_keep`: share of image slots that is read: those that the question attends to most in
      the target's last layer. 1 = all.
    - `sliding_window`: number of slots that a layer attends to, its own included; None = all. It is
      that of the layers with "sliding_attention" in `layer_types` (None = of all layers).

    Classes list the fields that they support in `supported_choices`, and values of `visual_slots`
    in `supported_slots`; others raise ValueError.
    """

    supported_choices: ClassVar[frozenset[str]] = CHOICES
    supported_slots: ClassVar[tuple[str, ...]] = VISUAL_SLOTS

    tapped_layers: list[int] | tuple[int, ...] | None = None
    visual_slots: str = "fused"
    positions: str = "keep"
    num_steps: int = 0
    visual_keep: float = 1.0
    sliding_window: int | None = None
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        if self.layer_types is None and self.sliding_window is not None:
            self.layer_types = [SLIDING] * self.num_hidden_layers
        self._check_windows()
        for name in sorted(CHOICES - self.supported_choices):
            given = getattr(self, name)
            if given != getattr(StateHeadConfig, name):
                raise ValueError(
                    f"{name}={given!r} has no effect in {type(self).__name__}; leave it out"
                )
        choices = (("visual_slots", self.supported_slots), ("positions", POSITIONS))
        for name, known in choices:
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not possible in {type(self).__name__}; "
                    f"choose one of {', '.join(known)}"
                )
        if not 0 < self.visual_keep <= 1:
            raise ValueError(f"visual_keep={self.visual_keep} must be in (0, 1]")
        if self.visual_keep < 1 and self.visual_slots in ("hidden", "compressed"):
            raise ValueError(
                f"visual_slots={self.visual_slots!r} leaves no image slots for visual_keep="
                f"{self.visual_keep} to select from; give visual_keep=1, or other visual_slots"
            )
        self._check_rope()

    def _check_rope(self) -> None:
        rope: Any = self.rope_parameters or {}
        known = ("default", *ROPE_INIT_FUNCTIONS)
        if rope.get("rope_type", "default") not in known:
            raise ValueError(
                f"rope_type={rope['rope_type']!r} is not known; choose one of {', '.join(known)}"
            )
        if self.positions != "mrope":
            return
        if not rope.get("mrope_section"):
            raise ValueError(
                "positions='mrope' needs an mrope_section in rope_parameters; make the "
                "configuration with .of() of a target with M-RoPE, or give 'keep'"
            )
        count = int(self.head_dim or self.hidden_size // self.num_attention_heads) // 2
        if not has_axis_per_frequency(rope, count):
            raise ValueError(
                f"mrope_section={list(rope['mrope_section'])} does not divide the {count} "
                "frequencies of a head; give sections of that sum, or positions='keep'"
            )

    def _check_windows(self) -> None:
        kinds = self.layer_types or [FULL] * self.num_hidden_layers
        if len(kinds) != self.num_hidden_layers or set(kinds) - {FULL, SLIDING}:
            raise ValueError(
                f"layer_types={kinds} must have one of {FULL!r} and {SLIDING!r} for each of the "
                f"{self.num_hidden_layers} layers"
            )
        if (SLIDING in kinds) != (self.sliding_window is not None):
            raise ValueError(
                f"layer_types={kinds} and sliding_window={self.sliding_window} disagree; give a "
                f"sliding_window together with layers of {SLIDING!r}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window} must be at least 1")

    @classmethod
    def of(cls, config: Any, vocabulary: int, **changes: Any) -> Any:
        """Make the configuration of a head for a decoder with this text configuration.

        `vocabulary` is the target's output vocabulary: codes, for image models.
        """
        shared = {name: getattr(config, name, None) for name in _SHAPE}
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or _THETA
        sections = {name: rope[name] for name in _SECTIONS if rope.get(name)}
        if changes.get("positions") != "mrope":
            sections = {}
        own = {
            **{name: value for name, value in shared.items() if value is not None},
            "hidden_size": config.hidden_size,
            "vocab_size": vocabulary,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta, **sections},
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        return cls(**{**own, **changes})


@dataclass(frozen=True)
class SlotMarks:
    """Special properties of slots (R, q); defaults for ordinary ones."""

    steps: Tensor | int = 0  # (1 or R, q): number of self-fed steps of the state; 0 = none
    raw: Tensor | None = None  # (R, q) bool: input is the embedding alone
    global_vector: Tensor | None = None  # (R, q or 1, D) of the last image before
    stateless: Tensor | None = None  # (R, q) bool: the slot has no state


@dataclass(frozen=True)
class ImageSlots:
    """An image in a prompt: n slots, each with an embedding and the state before."""

    embeds: Tensor  # (n, D)
    features: Tensor  # (n, k * H) of the same tokens
    before: Tensor  # (n, k * H) of the tokens before, as in the slots
    attention: Mapping[str, Tensor]  # (n,) each: as requested by `StateHead.attention`
    question: Tensor  # (T, D) embeddings of the text after the last image, or of all text
    grid: tuple[int, int] | None = None  # rows, columns; None = unknown


@dataclass(frozen=True)
class CompressedImage:
    """An image of n slots, compressed by a head."""

    inputs: Tensor  # (m, D), m <= n
    at: Tensor  # (m,) indices of the n slots that they take, ascending
    vector: Tensor | None = None  # (D,) for all later slots


class StateHead(LlamaHead, ABC):
    """Maps embeddings of next tokens and the states before them to states of these tokens."""

    config: StateHeadConfig
    config_class: type[StateHeadConfig]

    def taps(self, layers: int) -> tuple[int, ...] | None:
        """Hugging Face indices of the tapped features of a target with this many layers.

        None = the last hidden states, after the final norm.
        """
        own = self.config.tapped_layers
        return None if own is None else tuple(own)

    @property
    def embeddings(self) -> nn.Module | None:
        """The head's own embedding table; None = the target's is used."""
        return None

    @property
    def has_first_slot(self) -> bool:
        """Whether the first token has a slot, too, without a state."""
        return False

    @property
    def attention(self) -> frozenset[str]:
        """Kinds of target attention that select image slots (`targets.attention_tap`)."""
        return frozenset({"last-layer-attention"} if self.config.visual_keep < 1 else ())

    def fuse(self, features: Tensor) -> Tensor:  # (..., k * H) -> (..., D)
        """Fuse the target's features into states."""
        return features

    def check(self) -> None:
        """Refuse invalid parameters. Raises ValueError."""

    def compress_image(self, picture: ImageSlots) -> CompressedImage:
        """Compress an image to fewer inputs. Raises ValueError if unsupported."""
        raise ValueError(
            f"{type(self).__name__} cannot compress an image; give visual_slots= "
            "'fused', 'placeholder', 'raw' or 'hidden'"
        )

    @abstractmethod
    def prepare_inputs(
        self, embeds: Tensor, states: Tensor, marks: SlotMarks
    ) -> tuple[Layers, Tensor]:
        """Return the layers, and the inputs (B, q, D) of the first one."""

    def forward(
        self,
        embeds: Tensor,
        states: Tensor,
        attention_mask: AttentionMask = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        marks: SlotMarks | None = None,
    ) -> Tensor:
        """States (B, q, D) of tokens, from their `embeds` and the `states` before them.

        `attention_mask` is (B, L), or (1 or B, 1, q, L) and additive, or those of `mask_by_kind`
        with a sliding window; `position_ids` (1 or B, q), or (3, B, q) with M-RoPE.
        """
        layers, inputs = self.prepare_inputs(embeds, states, marks or SlotMarks())
        out = self.run_layers(layers, inputs, attention_mask, position_ids, past_key_values)
        return self.finish_states(out)

    def finish_states(self, states: Tensor) -> Tensor:
        """Return the head's states from the outputs of its layers (B, q, D)."""
        return states

    def logits(self, states: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits of states (..., D) over the draft vocabulary: (..., V')."""
        return target_head(states)

    def expand_logits(self, logits: Tensor) -> Tensor:  # (..., V') -> (..., V)
        """Expand logits to the target's vocabulary; other tokens get -inf."""
        return logits


def make_compiled_step(head: StateHead, embed: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A function of tensors alone that reads a block: the head's states (R, q, D)."""

    window = head.config.sliding_window

    def step(
        tokens: Tensor,  # (R, q)
        more: Sequence[Tensor],  # states (R, q, D), steps (R, q), and image vectors if any
        depths: Tensor,
        corner: Tensor,
        columns: Tensor,
        base: Tensor,
        offsets: Tensor | None,
        parts: Sequence[Tensor],
    ) -> tuple[Tensor]:
        plan = BlockPlan(depths, corner, columns, base, offsets)
        states, steps, *vectors = more
        masks: AttentionMask = plan.mask
        if window is not None:
            masks = {FULL: plan.mask, SLIDING: plan.mask_window(window)}
        marks = SlotMarks(steps, None, vectors[0] if vectors else None)
        cache = FixedCache(parts, plan.slots)
        how: Any = {"past_key_values": cache, "marks": marks}
        return (head(embed(tokens), states, masks, plan.positions, **how),)

    return step


def add_step_residual(inputs: Tensor, table: Tensor | None, steps: Tensor | int) -> Tensor:
    """Add the residual of their step to inputs (B, q, D); unchanged at step 0.

    Row s - 1 of the table (S, D) is for states self-fed s times, the last row also for more.
    """
    if table is None or isinstance(steps, int):
        return inputs
    rows = torch.cat((torch.zeros_like(table[:1]), table))
    return inputs + rows[steps.clamp(max=len(table))]


def step_table(config: StateHeadConfig) -> nn.Parameter | None:
    """Make a table of residuals by step, initialised to zero; None without `num_steps`."""
    rows = config.num_steps
    return nn.Parameter(torch.zeros(rows, config.hidden_size)) if rows else None


class SlotRotaryEmbedding(LlamaRotaryEmbedding):
    """Cosines and sines of positions (B, q), or of three axes (3, B, q) by sections (M-RoPE).

    Frequencies are assigned to axes in blocks (Qwen2-VL), or interleaved (`mrope_interleaved`,
    Qwen3-VL). It uses fewer operations than Llama's own, which matters for heads of one layer.
    """

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.rope_type in _BY_LENGTH and position_ids.dim() == 2:
            cos, sin = super().forward(x, position_ids)
            return cos, sin
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device, torch.float)
        if position_ids.dim() > 2:
            axis = rope_axes(self.config.rope_parameters, angles.shape[-1]).to(x.device)
            angles = angles.gather(0, axis.expand(1, *angles.shape[1:]))[0]
        both = torch.cat((angles, angles), -1)
        cos, sin = both.cos(), both.sin()
        if self.attention_scaling != 1:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def has_axis_per_frequency(rope: Any, count: int) -> bool:
    """Whether the three sections of M-RoPE assign an axis to each of `count` frequencies."""
    sections = rope["mrope_section"]
    if len(sections) != 3:
        return False
    return bool(rope.get("mrope_interleaved")) or sum(sections) == count


def rope_axes(rope: Any, count: int) -> Tensor:  # (count,)
    """Return the axis (0, 1, 2) of each frequency."""
    sections = rope["mrope_section"]
    if not rope.get("mrope_interleaved"):
        runs = [torch.full((size,), axis) for axis, size in enumerate(sections)]
        return torch.cat(runs)[:count]
    axis = torch.zeros(count, dtype=torch.int64)
    for at in (1, 2):
        axis[at : 3 * sections[at] : 3] = at
    return axis
