"""The target of token decoding: a Hugging Face causal model behind three calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec import _hf
from mmspec.distributions.sampling import Prefix
from mmspec.draft import Draft, Round, Scores
from mmspec.errors import first_line
from mmspec.targets.memory import Memory, RowMemories, block
from mmspec.targets.readers.attention_tap import OFFERED, AttentionTap, ClassTokenTap
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.check import check, check_unasked, has_room
from mmspec.targets.readers.ctc import hear, remembered
from mmspec.targets.readers.encoder_decoder import EncoderDecoder, source_of, with_source
from mmspec.targets.readers.hooks import (
    HiddenStateHook,
    LayerStatesHook,
    SnapshotHook,
    wanted_layers,
)
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context, Request
from mmspec.targets.tokens.late import Opening, Unread
from mmspec.targets.tokens.turns import prompt_slots, whole_mask

BEFORE = frozenset({"ctc", "source"})  # what is known of a prompt before it is read


@dataclass(frozen=True)
class CausalTarget:
    """Scores drafts with one forward over pending and draft tokens.

    `wants` names features: "hidden" (last hidden states, (B, N + 1, H), after the final norm) and
    "logits" (as the model gives them, (B, N + 1, V)) with the scores; and, in `context.shared`
    after the prefill, "vision" (the picture encoders' outputs by modality), "cls" (what the class
    token of the vision tower attends to, (n,) per picture), attention of several kinds (see
    `mmspec.targets.readers.attention_tap`), "states" (hidden states embedded and early on, (2, B,
    L, H)), "ctc" (a `Heard`: what the labels of a recogniser's encoder say), "source" (the
    encoder's own output; both known early), and, with "hidden", "embeds" and "hidden" of the whole
    prompt, (B, L, H) each, and "positions", (B, L) or (axes, B, L), where the decoder is told them.
    "layers:2,8,13" are hidden states of these layers by Hugging Face index, side by side: (B, N +
    1, 3H) with the scores, (B, L, 3H) after the prefill, with the same beside them. Under guidance
    hidden states are those of both branches, 2B rows. Recurrent models replay lazily: their state
    stays at the last point where everything was accepted, and the tokens kept since then stay
    pending and are read again with the next draft. No forward is spent on that until
    `longest_replay` tokens wait.

    `checks` has a few tokens behind the first prompt of every class read both ways, see
    `mmspec.targets.readers.check`: a class that cannot be read in blocks is refused instead of
    misread.
    """

    backbone: Reader
    wants: frozenset[str] = frozenset()
    longest_replay: int = 16
    checks: bool = True
    trees: bool = False  # whether the drafter proposes any
    late: bool = False  # whether the first token is drafted, too: see `mmspec.targets.tokens.late`
    at_once: bool = False  # whether a prompt may then be read with its draft in one forward
    awaits: frozenset[str] = frozenset()  # what is then wanted behind the first draft only

    def __post_init__(self) -> None:
        early = sorted(self.wants - BEFORE - self.awaits) if self.late else []
        if early:
            raise ValueError(
                f"the first token is drafted before the prompt is read, and the drafter wants "
                f"{', '.join(early)} of that; give sees='nothing', or what the draft model sees by "
                "itself"
            )
        self._tap([])  # refuses what cannot be tapped
        self._states()
        self._layers()
        self._snapshots()
        self._class_token()

    def prefill(self, request: Request) -> Context:
        """Read the prompt; `context.scores` then gives the first token without a forward."""
        request = replace(request, inputs=_masked(self.backbone, request.inputs))
        if isinstance(self.backbone, Backbone) and self.backbone.border is not None:
            self.backbone.border.check(_longest(request), request.room)
        offer = dict[str, Any](request.shared)
        if "ctc" in self.wants:
            assert self.backbone.family.ctc is not None  # or it could not be bound
            offer["ctc"] = hear(self.backbone.model, self.backbone.family.ctc, request.inputs)
        if "source" in self.wants:
            offer["source"] = source_of(self.backbone, request.inputs)
        told = with_source(request, offer)
        if self.late:
            slots, rows = prompt_slots(request.inputs, request.past), len(request.noise.rows)
            unread = Unread(slots, rows, lambda: self._read_all(told, offer), offer)
            return self._context(request, unread, [slots] * rows, self.backbone.vocabulary, offer)
        memory, logits = self._read_all(told, offer)
        context = self._context(request, memory, memory.kept, logits.shape[-1], offer)
        position = context.position()
        distribution = request.sampling.distribution(
            logits[:, None], prefix(context, None), position
        )
        features = {"logits": logits[:, None]} if "logits" in self.wants else {}
        return replace(context, scores=Scores(distribution, position, features))

    def _read_all(self, request: Request, offer: dict[str, Any]) -> tuple[Any, Tensor]:
        """Memory and logits (B, V) of a prompt; what drafters asked for comes into `offer`."""
        inputs = request.inputs
        if "vision" in self.wants:
            with self._class_token() as token:
                inputs = _encoded(self.backbone, inputs)
            offer["vision"] = inputs["mm_encoder_outputs"]
            offer["cls"] = None if token is None else token.attention
        rows = questions(request.inputs, self.backbone.visual_ids) if self.wants & OFFERED else []
        once = remembered(self.backbone.model, self.backbone.family.ctc, offer.get("ctc"))
        with ExitStack() as stack:
            stack.enter_context(once)
            tap = stack.enter_context(self._tap(rows))
            states = stack.enter_context(self._states())
            early = stack.enter_context(self._snapshots())
            layers = {n: stack.enter_context(one) for n, one in self._layers().items()}
            memory, logits = self._read_prompt(request, inputs)
        if self._is_read_otherwise(request, memory, logits):
            memory, logits = self._read_prompt(request, inputs)
        if tap is not None:
            offer |= tap.offer()
        if early is not None:
            offer["states"] = early.offer()
        if states is not None:
            offer["embeds"], offer["hidden"] = states.embeds, states.hidden
            offer["positions"] = states.positions
        offer |= {name: noted.offer() for name, noted in layers.items()}
        return memory, logits

    def _context(
        self,
        request: Request,
        memory: Any,
        slots: Sequence[int],
        vocabulary: int,
        offer: Mapping[str, Any],
    ) -> Context:
        """What is known behind a prompt of so many slots per row."""
        history = _prompt(request.inputs, len(slots))
        mask = whole_mask(request.inputs, request.past)
        pads = [0] * len(history) if mask is None else (mask == 0).sum(-1).tolist()
        rows = zip(slots, pads, history, strict=True)
        return Context(
            request=request,
            history=history,
            prompt=tuple(len(row) for row in history),
            padding=tuple(pads),
            unknown=tuple(kept - pad - len(row) for kept, pad, row in rows),
            vocabulary=vocabulary,
            memory=memory,
            noise=request.noise,
            finished=(False,) * len(slots),
            shared=offer,
        )

    def score(self, context: Context, draft: Draft) -> Scores:
        """One forward over the pending tokens and the draft nodes."""
        if not (draft.is_chain or self.backbone.can_branch):
            raise ValueError(
                f"{type(self.backbone.model).__name__} {self.backbone.obstacle} and scores chains "
                "only, but the drafter proposed a tree; give length= instead of tree="
            )
        if self.at_once and isinstance(context.memory, Unread):
            found = self._read_with(context, context.memory, draft)
            if found is not None:
                return self._scores(context, draft, *found, 0)
        memory, calls = _opened(context.memory), 1
        if memory.saved is not None and max(context.pending) > self.longest_replay:
            self._settle(context)
            calls = 2
        layout = block(context.waiting(), draft, memory.like)
        layers = self._layers()
        with ExitStack() as stack:
            for noted in layers.values():
                stack.enter_context(noted)
            logits, hidden = self.backbone.read(memory, layout, hidden="hidden" in self.wants)
        features = {} if hidden is None else {"hidden": hidden}
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
        position = context.position()
        if draft.nodes:
            position = torch.cat((position, position + 1 + draft.places()), 1)
        if "logits" in self.wants:
            features = {**features, "logits": logits}
        distribution = context.sampling.distribution(logits, prefix(context, draft), position)
        return Scores(distribution, position, features, calls)

    def _read_with(
        self, context: Context, unread: Unread, draft: Draft
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Logits and features (B, 1 + N, ...) behind a prompt that is read with its first draft.

        None where it must be read by itself, or was already. A class that was not asked yet is read
        both ways, and by itself where it reads otherwise. States of the prompt are offered then,
        without those of the draft; where more than states is wanted, nothing is read at once.
        """
        if unread.found is not None or self.wants - BEFORE - {"hidden", "logits"}:
            return None
        is_told = "hidden" in self.wants
        if not draft.nodes:
            unread.opened()
            last = {"hidden": unread.offer["hidden"][:, -1:]} if is_told else {}
            return None if unread.logits is None else (unread.logits[:, None], last)
        opening = Opening.of(self.backbone, with_source(context.request, context.shared), draft)
        if opening is None or opening.is_trusted is False:
            return None
        if opening.is_trusted:
            model, ctc = self.backbone.model, self.backbone.family.ctc
            with remembered(model, ctc, context.shared.get("ctc")), self._states() as states:
                unread.found, logits = opening.read()
            return logits, {} if states is None else _offered(unread.offer, states, draft.nodes)
        memory = unread.opened()  # and looks at how the class reads what stands behind
        layout = block(context.waiting(), draft, memory.like)
        logits, hidden = self.backbone.read(memory, layout, hidden=is_told)
        opening.compare(logits)
        return logits, {} if hidden is None else {"hidden": hidden}

    def keep(self, context: Context, draft: Draft, kept: Round) -> Context:
        """Commit what was kept: cache slots first, then the history."""
        memory = context.memory
        if kept.calls or (isinstance(memory, Unread) and memory.found is not None):
            memory = _opened(memory)
            memory.commit(_alive(context), kept.path, draft.nodes)
        for history, tokens in zip(context.history, kept.tokens, strict=True):
            history.extend(tokens)
        skipped = context.skipped + 1 if kept.skips else 0
        context = replace(context, memory=memory, scores=None, skipped=skipped)
        return replace(context, finished=kept.finished)

    def _read_prompt(self, request: Request, inputs: Mapping[str, Any]) -> tuple[Any, Tensor]:
        """Memory and logits (B, V). What a class reads but not so is refused by name."""
        room = request.room + 64
        if request.past is not None:
            assert isinstance(self.backbone, Backbone)
            memory, logits, _ = self.backbone.prefill(inputs, room, request.past)
            return memory, logits
        try:
            memory, logits, _ = self.backbone.prefill(inputs, room)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a class does with a cache it was not made for
            if not isinstance(self.backbone, Backbone | EncoderDecoder):
                raise
            _refuse_if_readable(self.backbone, request.inputs, error)
            raise
        return memory, logits

    def _is_read_otherwise(self, request: Request, memory: Any, logits: Tensor) -> bool:
        """Whether the prompt must be read again, in the model's own steps; see `check`."""
        if not self.checks or not isinstance(self.backbone, Backbone | EncoderDecoder):
            return False
        if request.past is not None or not has_room(memory):
            return check_unasked(self.backbone, memory, self.trees)
        return check(self.backbone, request.inputs, memory, logits, self.trees, request.room)

    def _tap(self, rows: Sequence[int]) -> AbstractContextManager[AttentionTap | None]:
        wanted = bool(self.wants & OFFERED)
        return AttentionTap(self.backbone, self.wants, rows) if wanted else nullcontext()

    def _snapshots(self) -> AbstractContextManager[SnapshotHook | None]:
        return SnapshotHook(self.backbone) if "states" in self.wants else nullcontext()

    def _class_token(self) -> AbstractContextManager[ClassTokenTap | None]:
        tapped = (
            ClassTokenTap(self.backbone.model, self.backbone.family)
            if "cls" in self.wants
            else None
        )
        return nullcontext() if tapped is None else tapped

    def _states(self) -> AbstractContextManager[HiddenStateHook | None]:
        is_wanted = "hidden" in self.wants or wanted_layers(self.wants)
        return HiddenStateHook(self.backbone) if is_wanted else nullcontext()

    def _layers(self) -> dict[str, LayerStatesHook]:
        """Hooks on the layers whose states are wanted, by what the drafter calls them."""
        named = wanted_layers(self.wants)
        return {name: LayerStatesHook(self.backbone, layers) for name, layers in named.items()}

    def _settle(self, context: Context) -> None:
        """Read all pending tokens but the last, so that the recurrent state moves on."""
        memory = _opened(context.memory)
        settled = [row[:-1] or row for row in context.waiting()]
        self.backbone.read(memory, block(settled, None, memory.like))
        memory.advance([len(row) - 1 for row in context.waiting()])


def _opened(memory: Any) -> Memory | RowMemories:
    found: Memory | RowMemories = memory.opened() if isinstance(memory, Unread) else memory
    return found


def _offered(offer: dict[str, Any], states: HiddenStateHook, nodes: int) -> dict[str, Tensor]:
    """Offer the states of a prompt that was read with a draft; those of the draft's scores."""
    offer["embeds"], offer["hidden"] = states.embeds[:, :-nodes], states.hidden[:, :-nodes]
    told = states.positions
    offer["positions"] = None if told is None else told[..., :-nodes]
    return {"hidden": states.hidden[:, -nodes - 1 :]}


def _refuse_if_readable(
    reader: Backbone | EncoderDecoder, inputs: Mapping[str, Any], error: Exception
) -> None:
    """Raise ValueError where only the engine cannot read a prompt; else the request is at fault."""
    if inputs.get("input_ids") is None:
        return
    given = dict(reader.own_inputs(inputs, None))
    if isinstance(reader, EncoderDecoder):
        given["decoder_input_ids"] = given.pop("input_ids")
    try:
        reader.model.generate(**given, max_new_tokens=1, do_sample=False)
    except Exception:  # the model itself cannot read it either, and its error says why
        return
    raise ValueError(
        f"{type(reader.model).__name__} cannot be read with a cache that rolls back "
        f"({first_line(error)}); use model.generate() for this model"
    ) from error


def _masked(backbone: Reader, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request with the mask that `generate()` would infer from padding, where it has none."""
    ids = inputs.get("input_ids")
    if ids is None or inputs.get("attention_mask") is not None:
        return inputs
    if isinstance(backbone, EncoderDecoder):  # a decoder's prompt is not padded
        return inputs
    mask = _hf.inferred_mask(backbone.model, ids)
    return inputs if mask is None else {**inputs, "attention_mask": mask}


def questions(inputs: Mapping[str, Any], visual: Sequence[int]) -> list[int]:
    """Per row, how many tokens stand behind the last of the `visual` ids; at least 1.

    The last token alone in a row without any: nobody asks what it attends to.
    """
    ids = inputs.get("input_ids")
    if ids is None:
        return []
    known = set(visual)
    rows = []
    for row in ids.tolist():
        text = next((at for at, token in enumerate(reversed(row)) if token in known), 1)
        rows.append(max(text, 1))
    return rows


def _longest(request: Request) -> int:
    """Tokens of the longest prompt, earlier turns included, padding excluded."""
    inputs, past = request.inputs, request.past
    mask = whole_mask(inputs, past)
    return prompt_slots(inputs, past) if mask is None else int(mask.sum(-1).amax())


def _encoded(backbone: Reader, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request with its pictures encoded; sizes and grids stay, positions are made of them."""
    rest = {name: value for name, value in inputs.items() if name not in backbone.family.media}
    rest.pop("pixel_attention_mask", None)
    return {**rest, **_hf.encode_media(backbone.model, inputs)}


def prefix(context: Context, draft: Draft | None) -> Prefix | None:
    """The tokens before each distribution row, for processors that look at them; None when nobody does."""
    if not context.sampling.needs_prefix:
        return None
    committed = [context.prefix(row) for row in range(context.batch)]
    if draft is None or not draft.nodes:
        return lambda row, _: committed[row]
    ancestors, tokens = draft.ancestors(), draft.tokens

    def before(row: int, place: int) -> Tensor:
        if place == 0:
            return committed[row]
        return torch.cat((committed[row], tokens[row, ancestors[row, place - 1]]))

    return before


def _alive(context: Context) -> list[int]:
    """Pending tokens per row; a finished row keeps nothing more."""
    rows = zip(context.pending, context.finished, strict=True)
    return [0 if finished else count for count, finished in rows]


def _prompt(inputs: Mapping[str, Any], batch: int) -> tuple[list[int], ...]:
    """Prompt tokens per row without padding; none where they were given as embeddings."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None:
        return tuple([] for _ in range(batch))
    if mask is None:
        return tuple(ids.tolist())
    return tuple(row[seen].tolist() for row, seen in zip(ids, mask.bool(), strict=True))
