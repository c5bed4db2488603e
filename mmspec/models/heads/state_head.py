"""What all heads have in common that continue the hidden states of a target.

Such a head reads a chain of slots. Slot t holds the embedding of token t + 1 beside a *state* of
token t, and gives the state of token t + 1, from which the distribution of token t + 2 is made:

    features of the target --fuse--> state of slot t --head--> state of slot t + 1 --head again ..
                                                       '--> logits of token t + 2

A configuration says what it is made of: which features it taps, what becomes of slots that would
read a picture, and where slots stand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mmspec.models.llama_layers import Layers, LlamaHead

_SHAPE = (  # what a head has in common with the layers of its target
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "attention_bias", "initializer_range", "max_position_embeddings"),
)
_THETA = 10_000.0
_SECTIONS = ("mrope_section", "mrope_interleaved")
_BY_LENGTH = ("dynamic", "longrope")  # kinds of rotary frequencies that change with the length
VISUAL_SLOTS = ("fused", "placeholder", "raw", "hidden", "compressed")
POSITIONS = ("keep", "compact", "mrope")
CHOICES = frozenset({"tapped_layers", "visual_slots", "positions", "num_steps", "visual_keep"})


class StateHeadConfig(LlamaConfig):
    """`hidden_size` is that of the head's states, `vocab_size` the target's vocabulary.

    - `tapped_layers`: Hugging Face indices of the hidden states that are its features, side by side
      (0 = embeddings, i = behind layer i - 1, un-normed; the last index stands behind the final
      norm). None = the class's own rule.
    - `visual_slots`, of slots that would read a picture's embedding: "fused" like text;
      "placeholder", as the embedding of the placeholder's id; "raw", the embedding alone without
      the feature; "hidden", left out; "compressed", a few in the place of all, which the head makes
      of them.
    - `positions`: "keep", the slot's index in the prompt; "compact", counted over the slots that
      are read; "mrope", the target's own on three axes (of token t for slot t).
    - `num_steps`: so many learned residuals, one for each time that a state was self-fed.
    - `visual_keep`: of slots that would read a picture, the share that is read: those that the
      question attends to most in the target's last layer. 1 = all.

    A kind of head that does not follow one of these names in `chooses` those it does; another than
    the default of the rest raises ValueError.
    """

    chooses: ClassVar[frozenset[str]] = CHOICES

    tapped_layers: list[int] | tuple[int, ...] | None = None
    visual_slots: str = "fused"
    positions: str = "keep"
    num_steps: int = 0
    visual_keep: float = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        for name in sorted(CHOICES - self.chooses):
            given = getattr(self, name)
            if given != getattr(StateHeadConfig, name):
                raise ValueError(
                    f"{name}={given!r} would change nothing in {type(self).__name__}; leave it out"
                )
        for name, known in (("visual_slots", VISUAL_SLOTS), ("positions", POSITIONS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not known; choose one of {', '.join(known)}"
                )
        if not 0 < self.visual_keep <= 1:
            raise ValueError(
                f"visual_keep={self.visual_keep} is no share of a picture; give one in (0, 1]"
            )
        if self.visual_keep < 1 and self.visual_slots in ("hidden", "compressed"):
            raise ValueError(
                f"visual_slots={self.visual_slots!r} leaves no slots of a picture for visual_keep="
                f"{self.visual_keep} to choose from; give visual_keep=1, or other visual_slots"
            )
        if self.positions == "mrope" and not (self.rope_parameters or {}).get("mrope_section"):
            raise ValueError(
                "positions='mrope' turns on three axes, but rope_parameters have no mrope_section; "
                "make the configuration with .of() of a target that has M-RoPE, or give 'keep'"
            )

    @classmethod
    def of(cls, config: Any, vocabulary: int, **changes: Any) -> Any:
        """The configuration of a head for a decoder with this text configuration.

        `vocabulary` is what the target speaks: codes, for a model that draws.
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
    """What is particular about slots (R, q), where anything is."""

    steps: Tensor | int = (
        0  # (1 or R, q), or all of them never: how often the state was fed by the head itself
    )
    raw: Tensor | None = None  # (R, q) bool: the embedding alone goes in
    global_vector: Tensor | None = None  # (R, q or 1, D) of the last picture before
    stateless: Tensor | None = None  # (R, q) bool: no state stands beside the embedding


@dataclass(frozen=True)
class PictureSlots:
    """A picture in a prompt: n slots, each of which reads an embedding beside the state before."""

    embeds: Tensor  # (n, D)
    features: Tensor  # (n, k * H) of the very tokens
    before: Tensor  # (n, k * H) of the tokens before, as the slots have them
    attention: Mapping[str, Tensor]  # (n,) each: what the head asked for by `attention`
    question: Tensor  # (T, D) embeddings of the text behind the last picture, or of all text
    grid: tuple[int, int] | None = None  # rows, columns; None = not known


@dataclass(frozen=True)
class Glance:
    """What a head makes of a picture of n slots."""

    inputs: Tensor  # (m, D), m <= n
    at: Tensor  # (m,) which of its n slots they take, ascending
    vector: Tensor | None = None  # (D,) for all later slots


class StateHead(LlamaHead, ABC):
    """Embeddings of next tokens and states before them to states behind them."""

    config: StateHeadConfig
    config_class: type[StateHeadConfig]

    def taps(self, layers: int) -> tuple[int, ...] | None:
        """Hugging Face indices of the features it reads of a target of so many layers.

        None = the last hidden states, behind the final norm.
        """
        own = self.config.tapped_layers
        return None if own is None else tuple(own)

    @property
    def embeddings(self) -> nn.Module | None:
        """An embedding table of its own; None = the target's is read."""
        return None

    @property
    def reads_first(self) -> bool:
        """Whether the first token has a slot, too, beside which no state stands."""
        return False

    @property
    def attention(self) -> frozenset[str]:
        """Attention of the target that says what is read of pictures (`targets.attention_tap`)."""
        return frozenset({"last-layer-attention"} if self.config.visual_keep < 1 else ())

    def fused(self, features: Tensor) -> Tensor:  # (..., k * H) -> (..., D)
        """States of the target's features."""
        return features

    def check(self) -> None:
        """Refuse parameters that cannot be right. Raises ValueError."""

    def compressed(self, picture: PictureSlots) -> Glance:
        """A picture as fewer inputs. Raises ValueError where it cannot."""
        raise ValueError(
            f"{type(self).__name__} has nothing that compresses a picture; give visual_slots= "
            "'fused', 'placeholder', 'raw' or 'hidden'"
        )

    @abstractmethod
    def entered(self, embeds: Tensor, states: Tensor, marks: SlotMarks) -> tuple[Layers, Tensor]:
        """Its layers, and what the first of them reads (B, q, D)."""

    def forward(
        self,
        embeds: Tensor,
        states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        marks: SlotMarks | None = None,
    ) -> Tensor:
        """States (B, q, D) behind tokens, from their `embeds` and the `states` before, likewise.

        `attention_mask` is (B, L), or (1 or B, 1, q, L) and additive; `position_ids` (1 or B, q),
        or (3, B, q) with M-RoPE.
        """
        layers, inputs = self.entered(embeds, states, marks or SlotMarks())
        return self.behind(layers, inputs, attention_mask, position_ids, past_key_values)

    def logits(self, states: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """What states (..., D) say in the head's own vocabulary: (..., V')."""
        return target_head(states)

    def spread(self, logits: Tensor) -> Tensor:  # (..., V') -> (..., V)
        """Logits over the target's vocabulary; what the head never says is impossible."""
        return logits


def stepped(inputs: Tensor, table: Tensor | None, steps: Tensor | int) -> Tensor:
    """Inputs (B, q, D) with the residual of their step; self-fed never, they stay as they are.

    Row s - 1 of the table (S, D) is for states that were self-fed s times, the last for more.
    """
    if table is None or isinstance(steps, int):
        return inputs
    rows = torch.cat((torch.zeros_like(table[:1]), table))
    return inputs + rows[steps.clamp(max=len(table))]


def step_table(config: StateHeadConfig) -> nn.Parameter | None:
    """Residuals by step, at zero; None where the configuration has none."""
    rows = config.num_steps
    return nn.Parameter(torch.zeros(rows, config.hidden_size)) if rows else None


class SlotRotaryEmbedding(LlamaRotaryEmbedding):
    """Cosines and sines of positions (B, q), or of three axes (3, B, q) by sections (M-RoPE).

    Frequencies go to axes in runs (Qwen2-VL), or in turn (`mrope_interleaved`, Qwen3-VL). A head
    of one layer turns once a token, so this does in few operations what Llama's own does in many.
    """

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.rope_type in _BY_LENGTH and position_ids.dim() == 2:
            cos, sin = super().forward(x, position_ids)
            return cos, sin
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device, torch.float)
        if position_ids.dim() > 2:
            axis = axes_of(self.config.rope_parameters, angles.shape[-1]).to(x.device)
            angles = angles.gather(0, axis.expand(1, *angles.shape[1:]))[0]
        both = torch.cat((angles, angles), -1)
        cos, sin = both.cos(), both.sin()
        if self.attention_scaling != 1:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def axes_of(rope: Any, count: int) -> Tensor:  # (count,)
    """Which of the three axes each frequency turns by."""
    sections = rope["mrope_section"]
    if not rope.get("mrope_interleaved"):
        runs = [torch.full((size,), axis) for axis, size in enumerate(sections)]
        return torch.cat(runs)[:count]
    axis = torch.zeros(count, dtype=torch.int64)
    for at in (1, 2):
        axis[at : 3 * sections[at] : 3] = at
    return axis
