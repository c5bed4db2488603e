"""What modalities share that decode token ids: a model bound to a recipe, and a request to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.decode import Parts
from mmspec.distributions.noise import KeyedNoise, fresh_seed
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Drafter, Gate, Verifier
from mmspec.draft_models import BoundDraftModel, draft_model
from mmspec.drafters.shapes import shape_of
from mmspec.errors import described
from mmspec.modality import Call, Loop, Session
from mmspec.recipe import COMPRESSIBLE, Kit, Recipe, pair, resolve
from mmspec.targets.stop import Stop
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Request
from mmspec.targets.tokens.turns import EarlierTurns


@dataclass
class BoundTokens:
    """A reader of token ids with the parts of a recipe made for it."""

    backbone: Any  # the reader
    recipe: Recipe
    drafter: Drafter
    verifier: Verifier
    gate: Gate | None
    draft_model: BoundDraftModel | None = None  # where the recipe takes one
    checks: bool = True  # whether a class is asked how it reads, on its first request
    target: CausalTarget = field(init=False)

    def __post_init__(self) -> None:
        own, wants = self.drafter, self.drafter.wants | self.verifier.wants
        late = own.opens and self.backbone.words_prompts  # else the target says the first token
        self.target = CausalTarget(
            self.backbone,
            wants,
            checks=self.checks,
            trees=own.trees,
            late=late,
            at_once=late and self.gate is None,  # which might keep a draft unread
            awaits=own.awaits,
        )

    @property
    def model(self) -> Any:
        return self.backbone.model

    def call(
        self,
        inputs: Mapping[str, Any],
        sampling: Sampling,
        stop: Stop,
        seed: int | None,
        row_ids: Sequence[int] | None = None,
        drafter_inputs: Mapping[str, Any] | None = None,
        shared: Mapping[str, Any] | None = None,
        past: EarlierTurns | None = None,
    ) -> Call:
        """One request in terms of the loop."""
        batch = len(carrier(inputs))
        seed = fresh_seed() if seed is None else seed
        noise = KeyedNoise.seeded(seed, batch, self.backbone.device, row_ids)
        told = self.drafter.given(drafter_inputs or {}, batch)
        request = Request(inputs, sampling, noise, stop.max_new_tokens, told, shared or {}, past)
        parts = Parts(self.target, self.drafter, self.verifier, stop, self.gate)
        small = () if self.draft_model is None else (self.draft_model.model,)
        return Call(parts, request, self.recipe, models=(self.model, *small))


class TokenSession(Session):
    """What the sessions of models of token ids have in common; each adds its calls."""

    def __init__(self, bound: BoundTokens) -> None:
        self.bound, self.model, self.recipe = bound, bound.model, bound.recipe

    @property
    def sees(self) -> str:
        return self.bound.drafter.sees

    def save(self, folder: Path) -> None:
        """The draft model's weights. Raises ValueError for a drafter that was made by hand."""
        bound = self.bound
        if self.recipe.takes_drafter and bound.draft_model is None:
            raise ValueError(f"{type(bound.drafter).__name__} was made by hand and cannot be saved")
        if bound.draft_model is not None:
            bound.draft_model.save(folder, bound.backbone, bound.drafter)


def bind(backbone: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> BoundTokens:
    """A recipe bound to a reader; `parts` may replace compressor, kv, tree, length and sees.

    `actions` among them is the `ActionSpace` of a policy.

    Raises ValueError for what does not fit together.
    """
    compressor = parts.get("compressor")
    _check_sight(recipe, drafter, compressor, parts.get("sees"))
    _check_kv(recipe, parts.get("kv"))
    if recipe.hears and backbone.family.ctc is None:
        raise ValueError(
            f"recipe {recipe.name or 'custom'!r} drafts with the CTC head of a recogniser's "
            f"encoder, and {type(backbone.model).__name__} has none; use it with Granite-Speech, "
            "or choose another recipe"
        )
    recipe = replace(
        recipe,
        compressor=recipe.compressor if compressor is None else compressor,
        execution=shape_of(recipe.execution, parts.get("tree"), parts.get("length")),
        sees=parts.get("sees") or recipe.sees,
        kv=recipe.kv if recipe.kv is None else parts.get("kv") or recipe.kv,
    )
    own = drafter if isinstance(drafter, Drafter) else None
    small = None if own else draft_model(recipe, drafter, backbone)
    reader, sees = (None, recipe.sees) if small is None else (small.reader, small.sees)
    if compressor is None and recipe.kv is None and sees not in COMPRESSIBLE:
        recipe = replace(recipe, compressor=None)  # the recipe's own is for those that see pictures
    kit = Kit(
        backbone,
        reader,
        recipe.execution,
        sees,
        recipe.compressor,
        recipe.options,
        recipe.kv,
        parts.get("actions"),
    )
    verifier = resolve(recipe.verifier, kit)
    gate = None if recipe.gate is None else resolve(recipe.gate, kit)
    paired = pair(own or recipe.architecture(kit), verifier, backbone)
    records_distribution = recipe.records_distribution and paired.records_distribution
    recipe = replace(
        recipe, verifier=verifier, gate=gate, records_distribution=records_distribution
    )
    checks = parts.get("check", True)
    return BoundTokens(backbone, recipe, paired, verifier, gate, small, checks)


def _check_kv(recipe: Recipe, kv: Any) -> None:
    """Refuse a view of the target's memory for a drafter that reads none, and none for one."""
    name = recipe.name or "custom"
    if kv not in (None, "none") and recipe.kv is None:
        raise ValueError(
            f"kv={kv!r}: the drafter of recipe {name!r} reads no memory of the target; drop kv=, "
            "or use a recipe that drafts with the target's own layers (std, swift, layer-skip)"
        )
    if kv == "none" and recipe.kv is not None:
        raise ValueError(
            f"kv='none': the drafter of recipe {name!r} has no memory but the target's; choose "
            "same, sparse, text or tokens"
        )


def _check_sight(recipe: Recipe, drafter: Any, compressor: Any, sees: Any) -> None:
    """Refuse what says what a draft model sees, where it says nothing. Raises ValueError."""
    if sees is not None and not isinstance(sees, str):
        raise ValueError(f"sees={sees!r} is no text; give a view, such as 'pixels' or 'nothing'")
    given = {"sees": sees, "compressor": None if recipe.kv else compressor}
    idle = [name for name, value in given.items() if value is not None]
    if idle and drafter is None and not recipe.takes_drafter and sees != recipe.sees:
        raise ValueError(
            f"recipe {recipe.name or 'custom'!r} takes no draft model that would see a picture; "
            f"drop {'= and '.join(idle)}="
        )
    try:
        assert compressor is None or isinstance(compressor, str) or compressor.compress
    except AttributeError:
        raise ValueError(
            f"compressor={described(compressor)} cannot compress; give a name, such as "
            "'average-pool', or an object of mmspec.compressors"
        ) from None


def spoken(
    call: Call, ids: Tensor, loop: Loop, streamer: Any = None
) -> tuple[list[list[int]], list[list[int]]]:
    """New tokens per row, and the round of each.

    A Hugging Face streamer gets the prompt, then verified tokens, and its end whatever happens. An
    error carries what was verified before it as `tokens`.
    """
    tokens: list[list[int]] = [[] for _ in range(ids.shape[0])]
    rounds: list[list[int]] = [[] for _ in range(ids.shape[0])]
    try:
        if streamer is not None:
            streamer.put(ids.cpu())
        for kept in loop(call):
            for row, new in enumerate(kept.tokens):
                tokens[row].extend(new)
                rounds[row].extend([kept.index] * len(new))
            if streamer is not None and kept.tokens[0]:
                streamer.put(torch.tensor(kept.tokens[0]))
    except BaseException as error:
        error.tokens = tokens  # type: ignore[attr-defined]
        raise
    finally:
        if streamer is not None:
            streamer.end()
    return tokens, rounds


def prompt_ids(inputs: Mapping[str, Any], batch: int, device: torch.device) -> Tensor:  # (B, L)
    """The ids of a prompt; none where it was given as embeddings."""
    ids = inputs.get("input_ids")
    return torch.zeros(batch, 0, dtype=torch.int64, device=device) if ids is None else ids


def carrier(inputs: Mapping[str, Any]) -> Tensor:  # (B, L) or (B, L, D)
    """What a prompt is carried by: embeddings where there are some, else ids."""
    embeds = inputs.get("inputs_embeds")
    found: Tensor = inputs["input_ids"] if embeds is None else embeds
    return found


def padded(tokens: Sequence[Sequence[int]], pad: int) -> list[list[int]]:
    """New tokens as `generate()` returns them: finished rows padded."""
    width = max(len(row) for row in tokens)
    return [list(row) + [pad] * (width - len(row)) for row in tokens]


def first(*candidates: Any) -> int:
    """The first id that is set; of a list of ids, its first."""
    for value in candidates:
        if isinstance(value, list | tuple):
            value = value[0] if value else None
        if value is not None:
            return int(value)
    return 0
