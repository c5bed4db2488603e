"""The target of token decoding: a Hugging Face causal model with prefill, score and keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec import _hf
from mmspec.draft import Draft, Round, Scores
from mmspec.targets.memory import Memory, RowMemories, build_block
from mmspec.targets.readers.attention_tap import (
    ATTENTION_FEATURES,
    AttentionTap,
    ClassTokenTap,
    count_question_tokens,
)
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.check import check, check_without_prompt, has_free_positions
from mmspec.targets.readers.check_turn import check_turn
from mmspec.targets.readers.encoder_decoder import (
    EncoderDecoder,
    add_source,
    encode_shared_source,
    refuse_if_readable,
)
from mmspec.targets.readers.hooks import (
    HiddenStateHook,
    LayerStatesHook,
    SnapshotHook,
    fill_states,
    wanted_layers,
)
from mmspec.targets.readers.reader import Reader, reuse_encoder_output, run_ctc
from mmspec.targets.readers.visual import encode_media
from mmspec.targets.tokens.context import (
    Context,
    Request,
    check_drafted,
    count_pending,
    longest_prompt,
    make_prefix,
    prompt_tokens,
)
from mmspec.targets.tokens.late import DeferredPrefill, JointPrefill
from mmspec.targets.tokens.turns import count_prompt_slots, full_attention_mask

EARLY_FEATURES = frozenset({"ctc", "source"})  # known before the prompt is read


@dataclass(frozen=True)
class CausalTarget:
    """Scores drafts with one forward over pending and draft tokens.

    `required_features` names features. With the scores: "hidden" (last hidden states after the
    final norm, (B, N + 1, H)) and "logits" (of the model, (B, N + 1, V)). In `context.shared` after
    the prefill: "vision" (outputs of the image encoders by modality), "cls" (attention of the class
    token of the vision tower, (n,) per image), attention of several kinds (see
    `mmspec.targets.readers.attention_tap`), "states" (embeddings and early hidden states, (2, B, L,
    H)), "ctc" (`CtcOutput` of a recogniser's encoder), "source" (the encoder's output; both known
    before the prompt is read), and, with "hidden", "embeds" and "hidden" of the whole prompt, (B,
    L, H) each, and "positions", (B, L) or (axes, B, L), if the decoder takes them. "layers:2,8,13"
    are hidden states of these layers by Hugging Face index, concatenated: (B, N + 1, 3H) with the
    scores, (B, L, 3H) after the prefill, along with those of "hidden". With guidance hidden states
    have 2B rows, of both branches.

    Recurrent models replay lazily: their state stays at the last point where everything was
    accepted, and later accepted tokens stay pending and are read again with the next draft. A
    forward is spent on that only after `longest_replay` pending tokens.

    `checks` compares block reading with the model's own steps for every new model class
    (`mmspec.targets.readers.check`): a class that cannot be read in blocks is refused.
    """

    backbone: Reader
    required_features: frozenset[str] = frozenset()
    longest_replay: int = 16
    checks: bool = True
    uses_trees: bool = False  # whether the drafter proposes any
    defers_prefill: bool = (
        False  # whether the first token is drafted: see `mmspec.targets.tokens.late`
    )
    joins_prefill: bool = False  # whether the prompt may then be read with its draft
    deferred_features: frozenset[str] = frozenset()  # needed after the first draft only

    def __post_init__(self) -> None:
        early = (
            sorted(self.required_features - EARLY_FEATURES - self.deferred_features)
            if self.defers_prefill
            else []
        )
        if early:
            raise ValueError(
                f"the first token is drafted before the prompt is read, but the drafter needs "
                f"{', '.join(early)} of the prompt; give sees='nothing', or what the draft model "
                "encodes itself"
            )
        self._tap([])  # raises for what is not available
        self._states()
        self._layers()
        self._snapshots()
        self._class_token()

    def prefill(self, request: Request) -> Context:
        """Read the prompt; `context.scores` then gives the first token without a forward."""
        request = replace(request, inputs=_add_inferred_mask(self.backbone, request.inputs))
        if isinstance(self.backbone, Backbone) and self.backbone.border is not None:
            self.backbone.border.check(longest_prompt(request), request.max_new_tokens)
        offer = dict[str, Any](request.shared)
        if "ctc" in self.required_features:
            assert self.backbone.family.ctc is not None  # checked when the recipe was bound
            offer["ctc"] = run_ctc(self.backbone.model, self.backbone.family.ctc, request.inputs)
        if "source" in self.required_features:
            offer["source"] = encode_shared_source(self.backbone, request.inputs)
        full_request = add_source(request, offer)
        if self.defers_prefill:
            slots, rows = count_prompt_slots(request.inputs, request.past), len(request.noise.rows)
            unread = DeferredPrefill(
                slots, rows, lambda: self.run_prefill(full_request, offer), offer
            )
            return self._context(request, unread, [slots] * rows, self.backbone.vocabulary, offer)
        return self.open_context(request, *self.run_prefill(full_request, offer), offer)

    def open_context(
        self, request: Request, memory: Any, logits: Tensor, offer: Mapping[str, Any]
    ) -> Context:  # logits (B, V)
        """The context after a prompt that was read, with the distribution of the first token."""
        context = self._context(request, memory, memory.lengths, logits.shape[-1], offer)
        position = context.position()
        distribution = request.sampling.distribution(
            logits[:, None], make_prefix(context, None), position
        )
        features = {"logits": logits[:, None]} if "logits" in self.required_features else {}
        return replace(context, scores=Scores(distribution, position, features))

    def run_prefill(self, request: Request, offer: dict[str, Any]) -> tuple[Any, Tensor]:
        """Memory and logits (B, V) of a prompt; requested features are added to `offer`."""
        inputs = request.inputs
        if "vision" in self.required_features:
            with self._class_token() as token:
                inputs = encode_media(self.backbone, inputs)
            offer["vision"] = inputs["mm_encoder_outputs"]
            offer["cls"] = None if token is None else token.attention
        rows = (
            count_question_tokens(request.inputs, self.backbone.visual_ids)
            if self.required_features & ATTENTION_FEATURES
            else []
        )
        once = reuse_encoder_output(self.backbone.model, self.backbone.family.ctc, offer.get("ctc"))
        with once, self._tap(rows) as tap, self.record_states() as states:
            memory, logits = self._read_prompt(request, inputs)
        if self._must_reread(request, memory, logits):
            memory, logits = self._read_prompt(request, inputs)
        if self.checks and request.past is not None and isinstance(self.backbone, Backbone):
            check_turn(self.backbone, request.inputs, request.past, logits)
        if tap is not None:
            offer |= tap.offer()
        offer |= states
        if request.past is not None and request.past.features is not None:
            offer |= request.past.features.prepend_to(offer)
        self.backbone.prepare_graphs(memory, request.max_new_tokens)
        return memory, logits

    @contextmanager
    def record_states(self) -> Iterator[dict[str, Any]]:
        """Record the required states of a prompt's forward; the result is filled at exit."""
        offer = dict[str, Any]()
        with ExitStack() as stack:
            states = stack.enter_context(self._states())
            early = stack.enter_context(self._snapshots())
            layers = {n: stack.enter_context(one) for n, one in self._layers().items()}
            yield offer
        if early is not None:
            offer["states"] = early.offer()
        if states is not None:
            offer["embeds"], offer["hidden"] = states.embeds, states.hidden
            offer["positions"] = states.positions
        offer |= {name: noted.offer() for name, noted in layers.items()}

    def _context(
        self,
        request: Request,
        memory: Any,
        slots: Sequence[int],
        vocabulary: int,
        offer: Mapping[str, Any],
    ) -> Context:
        """The context after a prompt of so many slots per row."""
        history = prompt_tokens(request.inputs, len(slots))
        mask = full_attention_mask(request.inputs, request.past)
        pads = [0] * len(history) if mask is None else (mask == 0).sum(-1).tolist()
        rows = zip(slots, pads, history, strict=True)
        return Context(
            request=request,
            history=history,
            prompt=tuple(len(row) for row in history),
            padding=tuple(pads),
            num_unknown=tuple(kept - pad - len(row) for kept, pad, row in rows),
            vocabulary=vocabulary,
            memory=memory,
            noise=request.noise,
            finished=(False,) * len(slots),
            shared=offer,
        )

    def score(self, context: Context, draft: Draft) -> Scores:
        """One forward over the pending tokens and the draft nodes."""
        if not (draft.is_chain or self.backbone.reads_trees):
            raise ValueError(
                f"{type(self.backbone.model).__name__} {self.backbone.obstacle} and scores chains "
                "only, but the drafter proposed a tree; give length= instead of tree="
            )
        if self.joins_prefill and isinstance(context.memory, DeferredPrefill):
            found = self._read_with(context, context.memory, draft)
            if found is not None:
                return self._scores(context, draft, *found, 0)
        memory, calls = _run_deferred(context.memory), 1
        if memory.saved_state is not None and max(context.pending) > self.longest_replay:
            self._advance_state(context)
            calls = 2
        layout = build_block(context.pending_tokens(), draft, memory.like)
        layers = self._layers()
        if isinstance(memory, RowMemories) and not layers:  # these record whole blocks
            memory.num_useful = context.count_useful_nodes()
        with ExitStack() as stack:
            for noted in layers.values():
                stack.enter_context(noted)
            try:
                logits, hidden = self.backbone.read(
                    memory, layout, hidden="hidden" in self.required_features
                )
            except IndexError:
                check_drafted(draft, context.vocabulary)
                raise
        features = {} if hidden is None else {"hidden": hidden}
        fill_states(layers.values(), memory)
        features |= {name: noted.offer(draft.nodes + 1) for name, noted in layers.items()}
        return self._scores(context, draft, logits, features, calls)

    def _scores(
        self,
        context: Context,
        draft: Draft,
        logits: Tensor,
        features: Mapping[str, Tensor],
        calls: int,
    ) -> Scores:  # (B, 1 + N, V), (B, 1 + N, ...)
        position = context.positions(draft)
        if "logits" in self.required_features:
            features = {**features, "logits": logits}
        distribution = context.sampling.distribution(logits, make_prefix(context, draft), position)
        return Scores(distribution, position, features, calls, context.lengths)

    def _read_with(
        self, context: Context, unread: DeferredPrefill, draft: Draft
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Logits and features (B, 1 + N, ...) after a prompt that is read with its first draft.

        None if it must be read on its own, or was already. A class that was not checked yet is read
        both ways, and on its own if the scores differ. Hidden states of the prompt are shared
        without those of the draft; if other features are required, the prompt is read on its own.
        """
        if unread.memory is not None or self.required_features - EARLY_FEATURES - {
            "hidden",
            "logits",
        }:
            return None
        needs_hidden = "hidden" in self.required_features
        if not draft.nodes:
            unread.run()
            last = {"hidden": unread.offer["hidden"][:, -1:]} if needs_hidden else {}
            return None if unread.logits is None else (unread.logits[:, None], last)
        opening = JointPrefill.from_request(
            self.backbone, add_source(context.request, context.shared), draft
        )
        if opening is None or opening.is_trusted is False:
            return None
        if opening.is_trusted:
            model, ctc = self.backbone.model, self.backbone.family.ctc
            with (
                reuse_encoder_output(model, ctc, context.shared.get("ctc")),
                self._states() as states,
            ):
                unread.memory, logits = opening.read()
            return logits, {} if states is None else _share_states(
                unread.offer, states, draft.nodes
            )
        memory = unread.run()  # also checks how the class reads blocks
        layout = build_block(context.pending_tokens(), draft, memory.like)
        logits, hidden = self.backbone.read(memory, layout, hidden=needs_hidden)
        opening.compare(logits)
        return logits, {} if hidden is None else {"hidden": hidden}

    def keep(self, context: Context, draft: Draft, round_: Round) -> Context:
        """Commit the accepted tokens: cache slots first, then the history."""
        memory = context.memory
        if round_.calls or (isinstance(memory, DeferredPrefill) and memory.memory is not None):
            memory = _run_deferred(memory)
            memory.commit(count_pending(context), round_.path, draft.nodes)
        for history, tokens in zip(context.history, round_.tokens, strict=True):
            history.extend(tokens)
        skipped = context.num_unverified_rounds + 1 if round_.is_unverified else 0
        context = replace(context, memory=memory, scores=None, num_unverified_rounds=skipped)
        return replace(context, finished=round_.finished)

    def _read_prompt(self, request: Request, inputs: Mapping[str, Any]) -> tuple[Any, Tensor]:
        """Memory and logits (B, V). Raises ValueError for classes that need another cache."""
        room = request.max_new_tokens + 64
        if request.past is not None:
            assert isinstance(self.backbone, Backbone)
            memory, logits, _ = self.backbone.prefill(inputs, room, request.past)
            return memory, logits
        try:
            memory, logits, _ = self.backbone.prefill(inputs, room)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a class may fail with this cache in any way
            if not isinstance(self.backbone, Backbone | EncoderDecoder):
                raise
            refuse_if_readable(self.backbone, request.inputs, error)
            raise
        return memory, logits

    def _must_reread(self, request: Request, memory: Any, logits: Tensor) -> bool:
        """Whether the prompt must be read again in the model's own steps; see `check`."""
        if not self.checks or not isinstance(self.backbone, Backbone | EncoderDecoder):
            return False
        if request.past is not None or not has_free_positions(memory):
            return check_without_prompt(self.backbone, memory, self.uses_trees)
        return check(
            self.backbone, request.inputs, memory, logits, self.uses_trees, request.max_new_tokens
        )

    def _tap(self, rows: Sequence[int]) -> AbstractContextManager[AttentionTap | None]:
        wanted = bool(self.required_features & ATTENTION_FEATURES)
        return (
            AttentionTap(self.backbone, self.required_features, rows) if wanted else nullcontext()
        )

    def _snapshots(self) -> AbstractContextManager[SnapshotHook | None]:
        return SnapshotHook(self.backbone) if "states" in self.required_features else nullcontext()

    def _class_token(self) -> AbstractContextManager[ClassTokenTap | None]:
        tapped = (
            ClassTokenTap(self.backbone.model, self.backbone.family)
            if "cls" in self.required_features
            else None
        )
        return nullcontext() if tapped is None else tapped

    def _states(self) -> AbstractContextManager[HiddenStateHook | None]:
        is_wanted = "hidden" in self.required_features or wanted_layers(self.required_features)
        return HiddenStateHook(self.backbone) if is_wanted else nullcontext()

    def _layers(self) -> dict[str, LayerStatesHook]:
        """Hooks on the layers whose states are required, by feature name."""
        named = wanted_layers(self.required_features)
        return {name: LayerStatesHook(self.backbone, layers) for name, layers in named.items()}

    def _advance_state(self, context: Context) -> None:
        """Read all pending tokens but the last, to advance the recurrent state."""
        memory = _run_deferred(context.memory)
        settled = [row[:-1] or row for row in context.pending_tokens()]
        self.backbone.read(memory, build_block(settled, None, memory.like))
        memory.advance([len(row) - 1 for row in context.pending_tokens()])


def _run_deferred(memory: Any) -> Memory | RowMemories:
    found: Memory | RowMemories = memory.run() if isinstance(memory, DeferredPrefill) else memory
    return found


def _share_states(offer: dict[str, Any], states: HiddenStateHook, nodes: int) -> dict[str, Tensor]:
    """Share the states of a prompt that was read with a draft; return those of the draft."""
    offer["embeds"], offer["hidden"] = states.embeds[:, :-nodes], states.hidden[:, :-nodes]
    positions = states.positions
    offer["positions"] = None if positions is None else positions[..., :-nodes]
    return {"hidden": states.hidden[:, -nodes - 1 :]}


def _add_inferred_mask(backbone: Reader, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request with the mask that `generate()` infers from padding, if it has none."""
    ids = inputs.get("input_ids")
    if ids is None or inputs.get("attention_mask") is not None:
        return inputs
    if isinstance(backbone, EncoderDecoder):  # a decoder's prompt is not padded
        return inputs
    mask = _hf.infer_mask(backbone.model, ids)
    return inputs if mask is None else {**inputs, "attention_mask": mask}
