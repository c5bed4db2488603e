"""Sessions of token models, shared by modalities: a model bound to a recipe, and its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec import _hf, zoo
from mmspec.decode import Parts
from mmspec.distributions.call_state import spread_rows
from mmspec.distributions.noise import KeyedNoise, fresh_seed
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Drafter, Gate, Verifier
from mmspec.draft_models import BoundDraftModel, check_no_shape, draft_model
from mmspec.drafters.draft_model import ModelDrafter
from mmspec.drafters.lookup.given_text import DRAFT
from mmspec.drafters.shapes import shape_of
from mmspec.errors import check_flag, format_value
from mmspec.modality import Call, Loop, Session
from mmspec.models.loading import load_causal
from mmspec.recipe import COMPRESSIBLE, CTC_HEAD, Kit, Recipe, pair, resolve
from mmspec.registry import ZOO
from mmspec.stats import CompileLog
from mmspec.targets.stop import Stop
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Request, check_drafter_inputs
from mmspec.targets.tokens.turns import EarlierTurns

# inputs that some forwards take in `**kwargs`, or that a text model has to refuse
MODEL_INPUTS = frozenset(
    {
        *("pixel_values", "pixel_values_videos", "input_ids", "attention_mask", "inputs_embeds"),
        *("token_type_ids", "mm_token_type_ids"),
    }
)
_SHELVES = ("targets.readers", "drafters", "verifiers")
_COMPILED = tuple(f"mmspec.{shelf}.compiled" for shelf in _SHELVES)
MIN_INDEX_HEADS = 16  # all are clamped, so that scores tie, for one token in 2**16


@dataclass
class BoundTokens:
    """A reader of token ids with the parts of a recipe made for it."""

    backbone: Any  # the reader
    recipe: Recipe
    drafter: Drafter
    verifier: Verifier
    gate: Gate | None
    draft_model: BoundDraftModel | None = None  # where the recipe takes one
    checks: bool = True  # whether the first request checks how the model class reads
    compiled: CompileLog | None = None  # where blocks are read by compiled graphs
    target: CausalTarget = field(init=False)

    def __post_init__(self) -> None:
        own = self.drafter
        required_features = own.required_features | self.verifier.required_features
        # else the target predicts the first token
        late = own.drafts_first_token and self.backbone.has_token_prompts
        self.target = CausalTarget(
            self.backbone,
            required_features,
            checks=self.checks,
            uses_trees=own.uses_trees,
            defers_prefill=late,
            joins_prefill=late and self.gate is None,  # a gate may skip reading a draft
            deferred_features=own.deferred_features,
        )

    @property
    def model(self) -> Any:
        return self.backbone.model

    @property
    def models(self) -> tuple[Any, ...]:
        """The models that its rounds run."""
        small = () if self.draft_model is None else (self.draft_model.model,)
        return (self.model, *small)

    def _draft_names(self) -> frozenset[str] | None:
        """Names that `drafter_inputs` may have; None = what the drafter itself takes."""
        if self.draft_model is None:
            return None
        models = (self.model, self.draft_model.model)
        own = self.drafter.input_names if isinstance(self.drafter, ModelDrafter) else ()
        return MODEL_INPUTS.union({DRAFT}, own, *map(_hf.forward_names, models))

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
        """Return a request as a `Call` of the loop."""
        batch = len(prompt_tensor(inputs))
        seed = fresh_seed(moves=sampling.do_sample) if seed is None else seed
        noise = KeyedNoise.from_seed(seed, batch, self.backbone.device, row_ids)
        given = check_drafter_inputs(drafter_inputs, self._draft_names(), batch)
        own = self.drafter.prepare_inputs(given, batch)
        request = Request(inputs, sampling, noise, stop.max_new_tokens, own, shared or {}, past)
        parts = Parts(self.target, self.drafter, self.verifier, stop, self.gate)
        return Call(parts, request, self.recipe, models=self.models, compiled=self.compiled)

    def constrain(
        self, sampling: Sampling, stop: Stop, batch: int, given: Mapping[str, Any]
    ) -> tuple[Sampling, Stop]:
        """The settings and stop conditions of a request of `batch` rows, with its `grammar`.

        Raises ValueError for a grammar that does not fit the model, and for recipes that cannot
        keep one.
        """
        grammar = given.get("grammar")
        if grammar is not None:
            rows, size = spread_rows(grammar, batch), self.backbone.vocabulary
            maker = next((one for one in rows if one is not None), None)
            if maker is not None:
                made = maker.bind(rows, size, stop.eos, given.get("tokenizer"))
                sampling = sampling.add_processor(made)
        if not sampling.is_constrained:
            return sampling, stop
        if self.gate is not None:
            raise ValueError(
                f"the gate of recipe {self.recipe.name or 'custom'!r} accepts tokens that the "
                "target did not score, so a grammar or a stateful processor cannot hold; choose "
                "another recipe"
            )
        return sampling, replace(stop, guard=sampling.state_trees.commit)


class TokenSession(Session):
    """Base of the sessions of token models; subclasses add their calls."""

    def __init__(self, bound: BoundTokens) -> None:
        self.bound, self.model, self.recipe = bound, bound.model, bound.recipe

    @property
    def sees(self) -> str:
        return self.bound.drafter.sees

    def save(self, folder: Path) -> None:
        """Save the weights of the draft model. Raises ValueError for a drafter object."""
        bound = self.bound
        if self.recipe.takes_drafter and bound.draft_model is None:
            raise ValueError(f"{type(bound.drafter).__name__} was made by hand and cannot be saved")
        if bound.draft_model is not None:
            bound.draft_model.save(folder, bound.backbone, bound.drafter)


def bind(backbone: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> BoundTokens:
    """Bind a recipe to a reader; `parts` may replace compressor, kv, tree, length and sees.

    `parts["actions"]` is the `ActionSpace` of a policy. Raises ValueError for unsuitable parts.
    """
    _check_target(backbone)
    compressor = parts.get("compressor")
    _check_sight(recipe, drafter, compressor, parts.get("sees"))
    _check_kv(recipe, parts.get("kv"))
    if CTC_HEAD in recipe.needs and backbone.family.ctc is None:
        raise ValueError(
            f"recipe {recipe.name or 'custom'!r} drafts with the CTC head of a recogniser's "
            f"encoder, and {type(backbone.model).__name__} has none; use it with Granite-Speech, "
            "or choose another recipe"
        )
    recipe = replace(
        recipe,
        compressor=recipe.compressor if compressor is None else compressor,
        execution=shape_of(recipe.execution, parts.get("tree"), parts.get("length")),
        sees=recipe.sees if parts.get("sees") is None else parts["sees"],
        kv=recipe.kv if recipe.kv is None or parts.get("kv") is None else parts["kv"],
    )
    own = drafter if isinstance(drafter, Drafter) else None
    if own is not None:
        check_no_shape(own, parts)
    small = None if own else draft_model(recipe, drafter, backbone)
    reader, sees = (None, recipe.sees) if small is None else (small.reader, small.sees)
    if compressor is None and recipe.kv is None and sees not in COMPRESSIBLE:
        recipe = replace(recipe, compressor=None)  # for multimodal drafters only
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
    check_flag("check", checks)
    bound = BoundTokens(backbone, recipe, paired, verifier, gate, small, checks)
    option = parts.get("compile")
    if option is not None and option is not False:
        readers, growth, verifiers = map(import_module, _COMPILED)  # by those who ask for it alone
        features = bound.target.required_features
        draft = growth.find_draft_model(paired, reader)
        bound.compiled = readers.compile_readers(backbone, draft, features, option)
        bound.drafter = growth.compile_growth(bound.drafter, bound.compiled, option)
        bound.verifier = verifiers.compile_verifier(bound.verifier, bound.compiled, option)
    return bound


def _check_target(reader: Any) -> None:
    """Refuse a model that would decode otherwise than its own `generate()`. Raises ValueError."""
    name, config = type(reader.model).__name__, reader.config
    if _hf.replaces_loop(reader.model):
        raise ValueError(
            f"{name} has a decoding loop of its own (it overrides _sample), which would be ignored "
            "here; use model.generate() for this model"
        )
    heads = None if getattr(config, "index_topk", None) is None else config.index_n_heads
    if heads is not None and heads < MIN_INDEX_HEADS:
        raise ValueError(
            f"{name} selects the tokens it attends to by index_n_heads={heads} heads, whose scores "
            "are clamped at zero: with so few they tie, and a block of drafted tokens would select "
            "others than single tokens do; use model.generate() for this model"
        )


def _check_kv(recipe: Recipe, kv: Any) -> None:
    """Refuse `kv` unless the drafter reads the target's cache, and "none" if it does."""
    name = recipe.name or "custom"
    if kv not in (None, "none") and recipe.kv is None:
        raise ValueError(
            f"kv={kv!r}: the drafter of recipe {name!r} reads no cache of the target; drop kv=, "
            "or use a recipe that drafts with the target's own layers (std, swift, layer-skip)"
        )
    if kv == "none" and recipe.kv is not None:
        raise ValueError(
            f"kv='none': the drafter of recipe {name!r} has no cache but the target's; choose "
            "same, sparse, text or tokens"
        )


def _check_sight(recipe: Recipe, drafter: Any, compressor: Any, sees: Any) -> None:
    """Refuse `sees` and `compressor` where they have no effect. Raises ValueError."""
    if sees is not None and not isinstance(sees, str):
        raise ValueError(
            f"sees={sees!r} is not a string; give a view, such as 'pixels' or 'nothing'"
        )
    given = {"sees": sees, "compressor": None if recipe.kv else compressor}
    idle = [name for name, value in given.items() if value is not None]
    if idle and drafter is None and not recipe.takes_drafter and sees != recipe.sees:
        raise ValueError(
            f"recipe {recipe.name or 'custom'!r} takes no draft model that could see an image; "
            f"drop {'= and '.join(idle)}="
        )
    # numbers of numpy have a `compress` of their own
    is_compressor = hasattr(compressor, "compress") and hasattr(compressor, "needs")
    if compressor is not None and not isinstance(compressor, str) and not is_compressor:
        raise ValueError(
            f"compressor={format_value(compressor)} cannot compress; give a name, such as "
            "'average-pool', or an object of mmspec.compressors"
        )


def run_rounds(
    call: Call, ids: Tensor, loop: Loop, streamer: Any = None
) -> tuple[list[list[int]], list[list[int]]]:
    """Run all rounds of a call; returns the new tokens of each row, and the round of each token.

    A Hugging Face streamer gets the prompt and verified tokens, and is always ended. An exception
    has the tokens verified so far as its attribute `tokens`.
    """
    tokens: list[list[int]] = [[] for _ in range(ids.shape[0])]
    rounds: list[list[int]] = [[] for _ in range(ids.shape[0])]
    try:
        if streamer is not None:
            streamer.put(ids.cpu())
        for round_ in loop(call):
            for row, new in enumerate(round_.tokens):
                tokens[row].extend(new)
                rounds[row].extend([round_.index] * len(new))
            if streamer is not None and round_.tokens[0]:
                streamer.put(torch.tensor(round_.tokens[0]))
    except BaseException as error:
        error.tokens = tokens  # type: ignore[attr-defined]
        raise
    finally:
        if streamer is not None:
            streamer.end()
    return tokens, rounds


def prompt_ids(inputs: Mapping[str, Any], batch: int, device: torch.device) -> Tensor:  # (B, L)
    """Return the ids of a prompt; L = 0 for embeddings."""
    ids = inputs.get("input_ids")
    return torch.zeros(batch, 0, dtype=torch.int64, device=device) if ids is None else ids


def prompt_tensor(inputs: Mapping[str, Any]) -> Tensor:  # (B, L) or (B, L, D)
    """Return the embeddings of a prompt if given, else its ids."""
    embeds = inputs.get("inputs_embeds")
    found: Tensor = inputs["input_ids"] if embeds is None else embeds
    return found


def pad_rows(tokens: Sequence[Sequence[int]], pad: int) -> list[list[int]]:
    """Pad new tokens to the longest row."""
    width = max(len(row) for row in tokens)
    return [list(row) + [pad] * (width - len(row)) for row in tokens]


def first_id(*candidates: Any) -> int:
    """Return the first id that is not None (of a list: its first element); default 0."""
    for value in candidates:
        if isinstance(value, list | tuple):
            value = value[0] if value else None
        if value is not None:
            return int(value)
    return 0


def load_token_model(source: str | Path, maker: Any = None, **options: Any) -> Any:
    """Load a model from a folder, a hub name, or "zoo:NAME" (in float32 unless placed otherwise).

    Raises ValueError as `load_causal` does.
    """
    name = str(source)
    if not name.startswith(ZOO):
        return load_causal(name, maker=maker, **options)
    if "placement" not in options:
        return zoo.load(name.removeprefix(ZOO))
    return load_causal(zoo.path(name.removeprefix(ZOO)), torch.float32, maker, **options)
