"""Drafting with an autoregressive model: any draft model, any shape."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from mmspec._attributes import delegate_to
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    DraftUpdate,
    FirstBlock,
    GraphSteps,
    GrownDraft,
    ModelDrafter,
    MultiKindDrafter,
    committed_prefix,
    draft_distribution,
    empty_growth,
    move_tensors,
    waiting_block,
)
from mmspec.drafters.neural.draft_inputs import DRAFT_INPUTS, DraftInputs, build_draft_inputs
from mmspec.drafters.shapes import Chain, Shape
from mmspec.errors import check_embedded
from mmspec.models.compatibility import (
    check_pair,
    check_same_size,
    check_vocabularies,
    check_vocabulary_sizes,
)
from mmspec.models.loading import load_causal, model_type, random_model
from mmspec.recipe import LINEAR, DraftModelKind, Kit
from mmspec.targets.memory import Memory, RowMemories, TokenBlock, build_block
from mmspec.targets.readers.backbone import FULL
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.reader import Reader
from mmspec.targets.rows import drop_row, join_memories, join_states, swap_out
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class Autoregressive(MultiKindDrafter, ModelDrafter):
    """Grows a draft of `shape` from the distributions of `model`, drawing siblings as `kind`.

    `kind` must be one that the verifier accepts; `mmspec.recipe.pair` chooses it when it is None.
    Lossless with every lossless verifier: the recorded distribution is the one drawn from.
    """

    shape: Shape
    kind: Kind | None = None
    drafts_first_token: bool = False  # whether it also proposes the first token

    choices = delegate_to("shape.kinds")

    def __post_init__(self) -> None:
        self.shape.check(self.model)

    @property
    def uses_trees(self) -> bool:
        """Whether it may propose other drafts than chains."""
        return self.shape.walk != LINEAR

    def begin(self, context: Context) -> _State:
        return _State(self.model.begin(context), self.shape.begin())

    def propose(self, context: Context, state: _State) -> Draft:
        kind = self.kinds[0]
        state.sprout = self.shape.grow(self.model, context, state.model, state.shape, kind)
        return state.sprout.draft

    def cache_bytes(self, state: _State) -> int | None:
        return self.model.cache_bytes(state.model)

    def token_probs(self, state: _State, draft: Draft) -> Tensor | None:  # (B, N)
        return None if state.sprout is None else state.sprout.token_probs()

    def skip_rows(
        self, context: Context, state: _State, rows: Sequence[bool] | None = None
    ) -> _State:
        """The state where another drafter drafted `rows` of this round, or all of them."""
        if rows is None:
            return replace(state, sprout=empty_growth(context))
        assert state.sprout is not None
        own = state.sprout.rows(context.batch)
        places = [() if other else read for other, read in zip(rows, own, strict=True)]
        return replace(state, sprout=replace(state.sprout, places=places))

    def observe(
        self, context: Context, state: _State, draft: Draft, scores: Scores, round_: Round
    ) -> _State:
        assert state.sprout is not None
        grown = state.sprout
        read = grown.accepted_reads(round_) if draft.nodes else ((),) * draft.batch
        news = DraftUpdate(draft, scores, round_, read, grown.count_read(), grown.distributions)
        return _State(
            self.model.keep(context, state.model, news), self.shape.observe(state.shape, news)
        )


@dataclass
class _State:
    model: Any
    shape: Any
    sprout: GrownDraft | None = None

    def join(self, other: _State) -> None:
        """Append the rows of another request; the shape's statistics stay those of the batch."""
        join_states(self.model, self.model, other.model)
        self.sprout = None

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        if self.model is not None:
            self.model.drop(row)


@dataclass(frozen=True)
class SmallModel(DraftModel):
    """An independent draft model with its own cache (Leviathan et al. 2023; Chen et al. 2023)."""

    backbone: Reader
    inputs: DraftInputs
    reads_prompt: ClassVar[bool] = True

    sees = delegate_to("inputs.name")
    required_features = delegate_to("inputs.required_features")

    def begin(self, context: Context) -> _ModelState:
        inputs = move_tensors(self.inputs.build(context, self.backbone), self.backbone.device)
        check_prompt(self.backbone, context, inputs)
        memory, logits, _ = self.backbone.prefill(
            inputs, extra_slots=context.request.max_new_tokens + 64
        )
        self.backbone.prepare_graphs(memory, context.request.max_new_tokens)
        return _ModelState(memory, [context.prompt[row] for row in range(context.batch)], logits)

    def predict_first(self, context: Context, state: _ModelState) -> Categorical:
        unread = self.first_block(context, state)
        if unread is None:  # the prompt, which was just read
            assert state.prompt_logits is not None
            logits, state.prompt_logits = state.prompt_logits[:, None], None
        else:
            logits, _ = self.backbone.read(state.memory, unread.block)
            unread.commit()
        return draft_distribution(context, logits, committed_prefix(context))

    def first_block(self, context: Context, state: _ModelState) -> FirstBlock | None:
        history = [len(row) for row in context.history]
        if state.prompt_logits is not None and state.read == history:
            return None
        check_unread(self.backbone, context, state.read)
        unread = [  # nothing new: read its last token again
            length - (not finished)
            for length, finished in zip(history, context.finished, strict=True)
        ]
        self.rewind(state, unread)
        layout, counts = waiting_block(context, state.read, state.memory.like)

        def commit() -> None:
            state.memory.advance(counts)
            state.read, state.prompt_logits = history, None

        return FirstBlock(state.memory, layout, (), counts, commit)

    def graph_steps(self) -> GraphSteps | None:
        return steps_of_reader(self.backbone)

    def predict(self, context: Context, state: _ModelState, nodes: DraftNodes) -> Categorical:
        logits, _ = self.backbone.read(state.memory, nodes.block(state.memory.like))
        return draft_distribution(context, logits, nodes.prefix(context), nodes.ahead(context))

    def rewind(self, state: _ModelState, lengths: Sequence[int]) -> None:
        """Drop what was read after the first `lengths[b]` tokens of each row."""
        steps = [min(length - read, 0) for length, read in zip(lengths, state.read, strict=True)]
        if any(steps):
            state.memory.advance(steps)
            state.read = [read + step for read, step in zip(state.read, steps, strict=True)]

    def keep(self, context: Context, state: _ModelState, update: DraftUpdate) -> _ModelState:
        num_committed = state.memory.commit([0] * context.batch, update.read, update.nodes_read)
        state.read = [read + new for read, new in zip(state.read, num_committed, strict=True)]
        return state

    def cache_bytes(self, state: _ModelState) -> int:
        memory = state.memory
        rows = memory.rows if isinstance(memory, RowMemories) else [memory]
        return sum(row.cache.bytes(max(row.lengths)) for row in rows)


def check_prompt(reader: Reader, context: Context, inputs: Mapping[str, Any]) -> None:
    """Refuse prompts with tokens that a draft model has no embedding of. Raises ValueError."""
    ids = inputs.get("input_ids")
    if reader.vocabulary < context.vocabulary and isinstance(ids, Tensor):
        check_embedded(int(ids.max()), reader.vocabulary)


def check_unread(reader: Reader, context: Context, read: Sequence[int]) -> None:
    """The same of what follows the first `read[b]` tokens of each row. Raises ValueError."""
    if reader.vocabulary < context.vocabulary:
        for row, done in zip(context.history, read, strict=True):
            check_embedded(max(row[done:], default=0), reader.vocabulary)


@dataclass
class _ModelState:
    """A draft model's cache and the number of committed tokens of each row in it."""

    memory: Memory | RowMemories
    read: list[int]
    prompt_logits: Tensor | None = None  # (B, V) logits after the prompt, to draft the first token

    def join(self, other: _ModelState) -> None:
        """Append the rows of another request."""
        self.memory = join_memories(self.memory, other.memory)
        self.read += other.read
        self.prompt_logits = None

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        drop_row(self.memory, row)
        swap_out(self.read, row)


def steps_of_reader(reader: Reader) -> GraphSteps | None:
    """The forwards of a decoder that predicts by its own output head, where it is compiled."""
    compiled = vars(reader).get("compiled")
    if compiled is None:
        return None
    return GraphSteps(compiled.graphs, compiled.make_step, itemgetter(0), lambda *given: [])


def unread_block(context: Context) -> TokenBlock:
    """The unread tokens, for draft models that read after the target's cache.

    Raises ValueError where rows have different numbers of them.
    """
    waiting = context.pending_tokens()
    if len({len(row) for row in waiting}) > 1:
        raise ValueError(
            "rows have different numbers of unread tokens; a gate needs a separate draft model"
        )
    return build_block(waiting, None, context.memory.like)


def small_model(kit: Kit) -> Drafter:
    """An independent draft model with the inputs of `sees`, or a head on the target."""
    if isinstance(kit.drafter, Reader):
        return build_autoregressive(kit, SmallModel(kit.drafter, build_draft_inputs(kit)))
    return build_head_drafter(kit)


def build_head_drafter(kit: Kit) -> Drafter:
    """A draft model bound to the target, which reads the target's features."""
    if not isinstance(kit.drafter, DraftModel):
        raise ValueError(
            f"a {type(kit.drafter).__name__} is not a source of draft distributions; let the "
            "`read` of its sort give what inherits mmspec.drafters.draft_model.DraftModel"
        )
    if kit.compressor is not None:
        raise ValueError(
            f"a draft model with sees={kit.sees!r} reads the target's features, so there is "
            f"nothing for compressor={kit.compressor!r} to compress; drop it"
        )
    reach = kit.drafter.max_depth_ahead
    shape = kit.shape if reach is None else kit.shape.limit_depth(reach)
    if reach is not None and shape.max_depth > reach:
        raise ValueError(
            f"the draft is up to {shape.max_depth} tokens deep, but this "
            f"{type(kit.drafter).__name__} predicts the next {reach} only; give length={reach}, "
            "or a tree of that depth"
        )
    return Autoregressive(kit.drafter, shape)


def build_autoregressive(kit: Kit, model: DraftModel) -> Autoregressive:
    """Grow the recipe's shape with `model`. Raises ValueError for a tree that it cannot read."""
    assert kit.drafter is not None
    if not (kit.drafter.can_branch or isinstance(kit.shape, Chain)):
        raise ValueError(
            f"{type(kit.drafter.model).__name__} {kit.drafter.obstacle}, so as a draft model it "
            f"drafts chains only, not a {type(kit.shape).__name__}; give length=, or choose "
            "another recipe, such as coupled"
        )
    return Autoregressive(model, kit.shape)


@dataclass(frozen=True)
class SmallModelKind(DraftModelKind):
    """Whole models that read a prompt of their own and predict the target's tokens.

    `check` is an additional check of the pair, `save_extra` saves what is trained in addition to
    the weights, and `marker_files` are files or folders that identify a folder of this kind. One
    that `has_own_codes` has codes of its own, which are converted to the target's.
    """

    description: str = "draft model"
    check: Callable[[Reader, Reader], None] | None = None  # (target, draft model)
    save_extra: Callable[[Any, Path], None] | None = None  # (drafter, folder)
    marker_files: tuple[str, ...] = ()
    has_own_codes: bool = False

    def accepts(self, model: Any) -> bool:
        """Whether it has input embeddings, as causal models of transformers have."""
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
        return all((folder / mark).exists() for mark in self.marker_files)

    def load(self, source: str | Path, target: Reader, dtype: torch.dtype | None = None) -> Any:
        """Load with the target's class where the model type is the same, else by model type."""
        found = model_type(source)
        same = isinstance(target.model, PreTrainedModel) and found == target.model.config.model_type
        if not same and found not in CONFIG_MAPPING:
            raise ValueError(
                f"{source} holds a {found}, which is not a {self.description}; give drafter= a "
                "whole model, or use a recipe for that type"
            )
        return load_causal(source, dtype or "auto", type(target.model) if same else None)

    def default_sees(self, model: Any, target: Reader, requested: str) -> str:
        """ "pixels" where both read images; "prompt" for image generation or two encoders."""
        if requested not in ("auto", *DRAFT_INPUTS):
            raise ValueError(
                f"sees={requested!r} does not fit: a draft model reads a prompt of its own and "
                f"sees one of {', '.join(DRAFT_INPUTS)}; drop sees=, or use another recipe"
            )
        if requested != "auto":
            return requested
        pair, draws = (target, target.make_reader(model)), target.family.draws_images
        if not draws and all(one.family.media for one in pair):
            return "pixels"
        encode = all(isinstance(one, EncoderDecoder) for one in pair)
        return "prompt" if draws or encode else "nothing"

    def read(self, model: Any, target: Reader, sees: str) -> Reader:
        reader = target.make_reader(model)
        if not self.has_own_codes:
            check_vocabulary_sizes(target.vocabulary, reader.vocabulary)
        if target.family.writes_text:
            check_vocabularies(*(str(one.model.config._name_or_path) for one in (target, reader)))
        check_pair(target, reader, sees)
        if self.check is not None:
            self.check(target, reader)
        return reader

    def random(self, target: Reader, seed: int) -> Any:
        """A model like the target with one decoder layer."""
        config = copy.deepcopy(target.model.config)
        text = config.get_text_config(decoder=True)
        if kinds := vars(text).get("layer_types"):
            text.layer_types = [FULL if FULL in kinds else kinds[0]]
        text.num_hidden_layers = 1
        return random_model(lambda: type(target.model)(config), seed)

    def save(self, model: Any, folder: Path, target: Any, drafter: Any) -> None:
        model.save_pretrained(folder)
        if self.save_extra is not None:
            self.save_extra(drafter, folder)


SMALL_MODEL = SmallModelKind(check=check_same_size)
