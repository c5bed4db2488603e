"""Drafting with an autoregressive model: any draft model, any shape."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CONFIG_MAPPING, PreTrainedModel

from mmspec.declared import answered_by
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.sampling import Prefix
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.chosen_kind import ChoosesKind
from mmspec.drafters.growth import (
    Chain,
    DraftModel,
    News,
    Nodes,
    Shape,
    Sprout,
    nothing,
    read_path,
)
from mmspec.drafters.neural.sight import SIGHTS, Sight, sight
from mmspec.models.loading import load_causal, model_type
from mmspec.models.random_weights import random_model
from mmspec.models.words import check_sizes, check_words
from mmspec.recipe import LINEAR, DraftModelKind, Kit
from mmspec.targets.memory import Memory, RowMemories, TokenBlock, block
from mmspec.targets.readers.backbone import FULL
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class OfModel(Drafter):
    """Sees, wants and reads what its draft model does."""

    model: DraftModel

    sees = answered_by("model.sees")
    wants = answered_by("model.wants")
    reads = answered_by("model.reads")


@dataclass(frozen=True)
class Autoregressive(ChoosesKind, OfModel):
    """Grows `shape` out of the distributions of `model`, drawing siblings as `kind` says.

    `kind` must be one the verifier accepts; `mmspec.recipe.pair` chooses it when it is None.
    Lossless with every lossless verifier: the draft's distribution is recorded exactly as it was
    drawn from.
    """

    shape: Shape
    kind: Kind | None = None
    opens: bool = False  # whether it proposes the first token, too

    choices = answered_by("shape.kinds")

    def __post_init__(self) -> None:
        self.shape.check(self.model)

    @property
    def trees(self) -> bool:
        """Whether it proposes anything but chains."""
        return self.shape.walk != LINEAR

    def begin(self, context: Context) -> _State:
        return _State(self.model.begin(context), self.shape.begin())

    def propose(self, context: Context, state: _State) -> Draft:
        kind = self.kinds[0]
        state.sprout = self.shape.grow(self.model, context, state.model, state.shape, kind)
        return state.sprout.draft

    def holds(self, state: _State) -> int | None:
        return self.model.holds(state.model)

    def silent(self, context: Context, state: _State, rows: Sequence[bool] | None = None) -> _State:
        """The state where somebody else drafted for some `rows` of this round, or for all."""
        if rows is None:
            return replace(state, sprout=nothing(context))
        assert state.sprout is not None
        own = state.sprout.places
        whose = [own[row] if len(own) > 1 else own[0] for row in range(context.batch)]
        places = [() if other else mine for other, mine in zip(rows, whose, strict=True)]
        return replace(state, sprout=replace(state.sprout, places=places))

    def observe(
        self, context: Context, state: _State, draft: Draft, scores: Scores, kept: Round
    ) -> _State:
        assert state.sprout is not None
        read = read_path(state.sprout.places, kept) if draft.nodes else ((),) * draft.batch
        nodes_read = max(max(row, default=-1) for row in state.sprout.places) + 1
        news = News(draft, scores, kept, read, nodes_read, state.sprout.distributions)
        return _State(
            self.model.keep(context, state.model, news), self.shape.observe(state.shape, news)
        )


@dataclass
class _State:
    model: Any
    shape: Any
    sprout: Sprout | None = None


@dataclass(frozen=True)
class SmallModel(DraftModel):
    """An independent draft model with its own memory (Leviathan et al. 2023; Chen et al. 2023)."""

    backbone: Reader
    sight: Sight
    reads: ClassVar[bool] = True

    sees = answered_by("sight.name")
    wants = answered_by("sight.wants")

    def begin(self, context: Context) -> _Reading:
        inputs = self.sight.inputs(context, self.backbone)
        memory, logits, _ = self.backbone.prefill(inputs, room=context.request.room + 64)
        return _Reading(memory, [context.prompt[row] for row in range(context.batch)], logits)

    def predict_first(self, context: Context, state: _Reading) -> Categorical:
        told, state.told = state.told, None
        if told is not None and state.read == [len(row) for row in context.history]:
            return draft_distribution(context, told[:, None], committed(context))
        back = [
            -1 if read == len(row) and not finished else 0  # nothing new: its last token, again
            for read, row, finished in zip(
                state.read, context.history, context.finished, strict=True
            )
        ]
        if any(back):
            state.memory.advance(back)
            state.read = [read + step for read, step in zip(state.read, back, strict=True)]
        layout, counts = waiting_block(context, state.read, state.memory.like)
        logits, _ = self.backbone.read(state.memory, layout)
        state.memory.advance(counts)
        state.read = [len(row) for row in context.history]
        return draft_distribution(context, logits, committed(context))

    def predict(self, context: Context, state: _Reading, nodes: Nodes) -> Categorical:
        logits, _ = self.backbone.read(state.memory, nodes.block(state.memory.like))
        return draft_distribution(context, logits, nodes.prefix(context), nodes.layout.depths + 1)

    def keep(self, context: Context, state: _Reading, news: News) -> _Reading:
        kept = state.memory.commit([0] * context.batch, news.read, news.nodes_read)
        state.read = [read + new for read, new in zip(state.read, kept, strict=True)]
        return state

    def holds(self, state: _Reading) -> int:
        memory = state.memory
        rows = memory.rows if isinstance(memory, RowMemories) else [memory]
        return sum(row.cache.bytes(max(row.kept)) for row in rows)


@dataclass
class _Reading:
    """A draft model's memory and how many committed tokens of each row are in it."""

    memory: Memory | RowMemories
    read: list[int]
    told: Tensor | None = None  # (B, V) logits behind the prompt, for who drafts its first token


def waiting_block(
    context: Context, read: Sequence[int], like: Tensor
) -> tuple[TokenBlock, list[int]]:
    """The committed tokens behind the first `read[b]` of each row, and how many they are.

    A finished row repeats its last token.
    """
    counts = [len(row) - done for row, done in zip(context.history, read, strict=True)]
    waiting = [
        row[len(row) - max(count, 1) :] for row, count in zip(context.history, counts, strict=True)
    ]
    return block(waiting, None, like), counts


def draft_distribution(
    context: Context, logits: Tensor, prefix: Prefix | None, ahead: Tensor | int = 0
) -> Categorical:
    """The drafter's logits (B, n, V') become its distribution by the very settings of the target.

    `ahead` (1 or B, n) tokens of the draft lie between the context and the token that a
    distribution speaks of. Vocabularies that differ by padding only are brought to the target's
    size; what the drafter lacks is impossible under q.
    """
    missing = context.vocabulary - logits.shape[-1]
    if missing:
        logits = functional.pad(logits, (0, missing), value=-torch.inf)  # negative = cut
    position = context.position() + ahead if context.sampling.places else None
    return context.sampling.distribution(logits, prefix, position)


def committed(context: Context) -> Prefix | None:
    """The committed tokens, for processors that look at them."""
    if not context.sampling.needs_prefix:
        return None
    return lambda row, _: context.prefix(row)


def unread_block(context: Context) -> TokenBlock:
    """The tokens that wait to be read, for draft models that read behind what the target keeps.

    Raises ValueError where rows wait for different numbers of them.
    """
    waiting = context.waiting()
    if len({len(row) for row in waiting}) > 1:
        raise ValueError("rows wait for different numbers of tokens; a gate needs a draft model")
    return block(waiting, None, context.memory.like)


def small_model(kit: Kit) -> Drafter:
    """An independent draft model that sees what the recipe says, or a head on the target."""
    if isinstance(kit.drafter, Reader):
        return grown(kit, SmallModel(kit.drafter, sight(kit)))
    return head_of_target(kit)


def head_of_target(kit: Kit) -> Drafter:
    """A draft model that came bound to the target: it sees what the target has seen."""
    if not isinstance(kit.drafter, DraftModel):
        raise ValueError(
            f"a {type(kit.drafter).__name__} is no source of draft distributions; let the `read` of its "
            "sort give what inherits mmspec.drafters.growth.DraftModel"
        )
    if kit.compressor is not None:
        raise ValueError(
            f"a draft model that sees {kit.sees!r} knows the picture through the target, so there "
            f"is nothing for compressor={kit.compressor!r} to thin; drop it"
        )
    reach = kit.drafter.reach
    shape = kit.shape if reach is None else kit.shape.within(reach)
    if reach is not None and shape.longest > reach:
        raise ValueError(
            f"the draft is up to {shape.longest} tokens deep, but this "
            f"{type(kit.drafter).__name__} speaks of the next {reach} only; give length={reach}, "
            "or a tree of that depth"
        )
    return Autoregressive(kit.drafter, shape)


def grown(kit: Kit, model: DraftModel) -> Autoregressive:
    """Grow the recipe's shape out of `model`. Raises ValueError for a tree that it cannot read."""
    assert kit.drafter is not None
    if not (kit.drafter.can_branch or isinstance(kit.shape, Chain)):
        raise ValueError(
            f"{type(kit.drafter.model).__name__} {kit.drafter.obstacle}, so as a draft model it "
            f"grows chains only, and {type(kit.shape).__name__} is none; give length=, or choose "
            "another recipe, such as coupled"
        )
    return Autoregressive(model, kit.shape)


def check_pair(target: Reader, drafter: Reader, sees: str) -> None:
    """Refuse a draft model that cannot read this target's prompts.

    Raises ValueError: a picture for a draft model without an encoder, another image token, a prompt
    that is not of the tokens it knows.
    """
    if sees in ("nothing", "placeholders") and target.family.draws and not target.family.writes:
        raise ValueError(
            f"sees={sees!r} reads the prompt as tokens, but {type(target.model).__name__} draws "
            "behind a prompt that is not of the vocabulary of its codes; give sees='prompt', or a "
            "recipe for models that draw, such as 'coupled'"
        )
    if sees == "pixels" and not drafter.family.media:
        raise ValueError(
            "sees='pixels' needs a draft model with a vision encoder, but "
            f"{type(drafter.model).__name__} reads text only; give sees='nothing' or a "
            "vision-language draft model"
        )
    if sees == "pixels":
        mine, other = target.placeholder_ids[:1], drafter.placeholder_ids[:1]
        if mine != other:
            raise ValueError(
                f"the image token is {mine} for the target but {other} for the draft "
                "model; choose a pair that shares its processor"
            )
    if sees == "target-features":
        target.check_features()
        drafter.check_embeddable()
        frame, theirs = max(target.visual_ids, default=0), drafter.vocabulary
        if not drafter.family.media and frame >= theirs:
            raise ValueError(
                f"the prompt frames pictures with token {frame}, but the draft model knows "
                f"{theirs} tokens only; give sees='nothing' or resize its embeddings"
            )


def check_same_size(target: Reader, drafter: Reader) -> None:
    """Refuse a draft model that draws pictures of another size only. Raises ValueError."""
    size = drafter.family.only_size
    if not target.family.draws or size is None:
        return
    theirs, sizes = size(drafter.model.config), target.family.only_size
    ours = None if sizes is None else sizes(target.model.config)
    if ours != theirs:
        raise ValueError(
            f"the draft model draws pictures of {theirs[0]} x {theirs[1]} codes, the target "
            f"{'any size' if ours is None else f'{ours[0]} x {ours[1]}'}, so its codes stand "
            "elsewhere; use recipe='mulo-sd', which enlarges smaller pictures, or a draft model of "
            "the target's size"
        )


@dataclass(frozen=True)
class SmallModelKind(DraftModelKind):
    """Whole models that read a prompt of their own and speak the target's tokens.

    `check` says what else a pair must have, `beside` writes what is learned beside the weights, and
    `marks` are files or folders by which a folder is told from others of whole models. One that
    `translates` has codes of its own, which something turns into the target's.
    """

    words: str = "draft model"
    check: Callable[[Reader, Reader], None] | None = None  # (target, draft model)
    beside: Callable[[Any, Path], None] | None = None  # (drafter, folder)
    marks: tuple[str, ...] = ()
    translates: bool = False

    def accepts(self, model: Any) -> bool:
        """Whether it has a table of tokens, as causal models of transformers have."""
        if not isinstance(model, nn.Module):
            return False
        inner = next((one for one in model.modules() if isinstance(one, PreTrainedModel)), None)
        try:
            return inner is not None and inner.get_input_embeddings() is not None
        except NotImplementedError:
            return False

    def owns(self, folder: Path) -> bool:
        if not (folder / "config.json").exists() or model_type(folder) not in CONFIG_MAPPING:
            return False
        return all((folder / mark).exists() for mark in self.marks)

    def load(self, source: str | Path, target: Reader, dtype: torch.dtype | None = None) -> Any:
        """By the target's own class where it is of the same type, as transformers files it else."""
        found = model_type(source)
        same = isinstance(target.model, PreTrainedModel) and found == target.model.config.model_type
        if not same and found not in CONFIG_MAPPING:
            raise ValueError(
                f"{source} holds a {found}, which is no {self.words}; give drafter= a whole model, "
                "or use a recipe for what it is"
            )
        return load_causal(source, dtype or "auto", type(target.model) if same else None)

    def default_sees(self, model: Any, target: Reader, asked: str) -> str:
        """The picture itself, where both read some; the prompt, where one draws or both encode."""
        if asked not in ("auto", *SIGHTS):
            raise ValueError(
                f"sees={asked!r} does not fit: a draft model reads a prompt of its own and sees "
                f"one of {', '.join(SIGHTS)}; drop sees=, or use another recipe"
            )
        if asked != "auto":
            return asked
        pair, draws = (target, target.reader_of(model)), target.family.draws
        if not draws and all(one.family.media for one in pair):
            return "pixels"
        encode = all(isinstance(one, EncoderDecoder) for one in pair)
        return "prompt" if draws or encode else "nothing"

    def read(self, model: Any, target: Reader, sees: str) -> Reader:
        reader = target.reader_of(model)
        if not self.translates:
            check_sizes(target.vocabulary, reader.vocabulary)
        if target.family.writes:
            check_words(*(str(one.model.config._name_or_path) for one in (target, reader)))
        check_pair(target, reader, sees)
        if self.check is not None:
            self.check(target, reader)
        return reader

    def random(self, target: Reader, seed: int) -> Any:
        """As the target, with one decoder layer."""
        config = copy.deepcopy(target.model.config)
        text = config.get_text_config(decoder=True)
        kinds = vars(text).get("layer_types")
        if kinds:
            text.layer_types = [FULL if FULL in kinds else kinds[0]]
        text.num_hidden_layers = 1
        return random_model(lambda: type(target.model)(config), seed)

    def save(self, model: Any, folder: Path, target: Any, drafter: Any) -> None:
        model.save_pretrained(folder)
        if self.beside is not None:
            self.beside(drafter, folder)


SMALL_MODEL = SmallModelKind(check=check_same_size)
