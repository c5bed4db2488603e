"""What modalities share that decode token ids: a model bound to a recipe, and text out of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec import _hf
from mmspec.compressors.naming import named as compressor_named
from mmspec.decode import Parts
from mmspec.draft import Drafter, Gate, Verifier
from mmspec.draft_models import BoundDraftModel, draft_model
from mmspec.drafters.shapes import shape_of
from mmspec.errors import described
from mmspec.laws.noise import KeyedNoise, fresh_seed
from mmspec.laws.sampling import Sampling
from mmspec.modality import Call, Loop
from mmspec.recipe import Kit, Recipe, pair, resolve
from mmspec.stats import Stats
from mmspec.targets.causal import CausalTarget
from mmspec.targets.context import Request
from mmspec.targets.generation_settings import check_parts, refuse_modes, sampled
from mmspec.targets.generation_settings import resolve as resolve_settings
from mmspec.targets.inputs import check_inputs
from mmspec.targets.stop import Stop
from mmspec.targets.visual import check_request, visual_ids

# what `generate` takes beside a model's inputs and generation settings
OWN = (
    *("seed", "row_ids", "streamer", "drafter_inputs", "tokenizer"),
    *("generation_config", "stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn"),
)
# inputs that some forwards take under `**kwargs`, or that a text model must be able to refuse
MODEL_INPUTS = frozenset(
    {
        *("pixel_values", "pixel_values_videos", "input_ids", "attention_mask", "inputs_embeds"),
        *("token_type_ids", "mm_token_type_ids"),
    }
)


@dataclass(frozen=True)
class Output:
    """What `generate` returns: sequences as transformers gives them, and the run's own report."""

    sequences: Tensor  # (B, L + T): prompt, new tokens, finished rows padded
    stats: Stats


@dataclass
class BoundTokens:
    """A reader of token ids with the parts of a recipe made for it."""

    backbone: Any  # the reader
    recipe: Recipe
    drafter: Drafter
    verifier: Verifier
    gate: Gate | None
    draft_model: BoundDraftModel | None = None  # where the recipe takes one
    target: CausalTarget = field(init=False)

    def __post_init__(self) -> None:
        self.target = CausalTarget(self.backbone, self.drafter.wants)

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
    ) -> Call:
        """One request in terms of the loop."""
        carrier = inputs.get("input_ids")
        batch = len(inputs["inputs_embeds"] if carrier is None else carrier)
        seed = fresh_seed() if seed is None else seed
        noise = KeyedNoise.seeded(seed, batch, self.backbone.device, row_ids)
        request = Request(
            inputs, sampling, noise, stop.max_new_tokens, drafter_inputs or {}, shared or {}
        )
        parts = Parts(self.target, self.drafter, self.verifier, stop, self.gate)
        return Call(parts, request, self.recipe)


def bind(backbone: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> BoundTokens:
    """A recipe bound to a reader; `parts` may replace compressor, tree, length and sees.

    Raises ValueError for what does not fit together.
    """
    compressor = parts.get("compressor")
    _check_sight(recipe, drafter, compressor, parts.get("sees"))
    if isinstance(compressor, str):
        compressor = compressor_named(compressor)
    recipe = replace(
        recipe,
        compressor=recipe.compressor if compressor is None else compressor,
        execution=shape_of(recipe.execution, parts.get("tree"), parts.get("length")),
        sees=parts.get("sees") or recipe.sees,
    )
    own = drafter if isinstance(drafter, Drafter) else None
    small = None if own else draft_model(recipe, drafter, backbone)
    reader, sees = (None, recipe.sees) if small is None else (small.reader, small.sees)
    kit = Kit(backbone, reader, recipe.execution, sees, recipe.compressor, recipe.options)
    verifier = resolve(recipe.verifier, kit)
    gate = None if recipe.gate is None else resolve(recipe.gate, kit)
    paired = pair(own or recipe.architecture(kit), verifier, backbone)
    lawful = recipe.records_law and paired.records_law
    recipe = replace(recipe, verifier=verifier, gate=gate, records_law=lawful)
    return BoundTokens(backbone, recipe, paired, verifier, gate, small)


def _check_sight(recipe: Recipe, drafter: Any, compressor: Any, sees: Any) -> None:
    """Refuse what says what a draft model sees, where it says nothing. Raises ValueError."""
    if sees is not None and not isinstance(sees, str):
        raise ValueError(f"sees={sees!r} is no text; give a view, such as 'pixels' or 'nothing'")
    given = {"sees": sees, "compressor": compressor}
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


class Text:
    """`generate` of a bound model: the model's own arguments, and its own output."""

    def __init__(self, bound: BoundTokens, prepared: Callable[[Mapping[str, Any]], dict[str, Any]]):
        self.bound = bound
        self.prepared = prepared  # inputs as the reader takes them
        self.inputs = MODEL_INPUTS | set(_hf.forward_names(bound.model))

    def generate(self, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Output:
        """As `model.generate`, plus `seed` and `row_ids`.

        Sampling is on when `do_sample=True` or when a sampling setting (temperature, top_k, top_p,
        ...) is given. With `seed`, every exact coupled recipe returns the tokens of plain decoding.
        """
        arguments = placed(args, arguments)
        inputs = {name: value for name, value in arguments.items() if name in self.inputs}
        own = {name: arguments.get(name) for name in OWN}
        check_parts(own)
        rest = {k: v for k, v in arguments.items() if k not in self.inputs and k not in OWN}
        model = self.bound.model
        self._check(inputs)
        inputs = self.prepared(inputs)
        check_request(model, self.bound.backbone.family, inputs)
        carrier = inputs.get("input_ids")
        carrier = inputs["inputs_embeds"] if carrier is None else carrier
        batch, length = carrier.shape[:2]
        sampling, config = resolve_settings(
            model,
            sampled(rest),
            length,
            carrier.device,
            batch=batch,
            config=own["generation_config"],
            inputs=inputs.get("input_ids"),
            attention_mask=inputs.get("attention_mask"),
            processors=own["logits_processor"] or (),
            prefix_allowed_tokens_fn=own["prefix_allowed_tokens_fn"],
        )
        criteria = own["stopping_criteria"] or ()
        stop = Stop.resolve(model, config, length, criteria, own["tokenizer"])
        call = self.bound.call(
            inputs, sampling, stop, own["seed"], own["row_ids"], own["drafter_inputs"]
        )
        ids = prompt_ids(inputs, batch, self.bound.backbone.device)
        tokens, _ = spoken(call, ids, loop, own["streamer"])
        pad = first(config.pad_token_id, config.eos_token_id)
        return Output(padded_sequences(ids, tokens, pad), loop.stats())

    def hook(self, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Tensor:
        """The `custom_generate` hook: `model.generate(**inputs, custom_generate=fast)`.

        transformers has merged the configuration and hands over what it made for its own loop.
        """
        given = HOOK.bind(*args, **arguments).arguments
        model, ids, config = given["model"], given["input_ids"], given["generation_config"]
        rest = {**given.get("model_kwargs", {})}
        media = {name: given[name] for name in MEDIA if given.get(name) is not None}
        if media:  # what was prepared without the pictures is prepared again with them
            rest = {name: value for name, value in rest.items() if name not in PREPARED}
        refuse_modes(config)
        if model is not self.bound.model:
            raise ValueError(
                "this was accelerated for another model; call accelerate() on this one"
            )
        if ids.numel():
            self._check({"input_ids": ids, **media})
        kept = {name: value for name, value in rest.items() if name not in LOOP_ARGUMENTS}
        inputs = self.prepared({"input_ids": ids, **media, **kept})
        stop = Stop.from_config(config, given.get("stopping_criteria") or (), ids.shape[1])
        processors = given.get("logits_processor") or ()
        sampling = Sampling.from_processors(processors, bool(config.do_sample))
        call = self.bound.call(
            inputs, sampling, stop, given.get("seed"), None, given.get("drafter_inputs")
        )
        tokens, _ = spoken(call, ids, loop)
        return padded_sequences(ids, tokens, first(config.pad_token_id, config.eos_token_id))

    def _check(self, inputs: Mapping[str, Any]) -> None:
        """Refuse tensors that the model cannot read. Raises ValueError."""
        model, family = self.bound.model, self.bound.backbone.family
        words = model.get_input_embeddings().weight
        check_inputs(inputs, words.shape[0], visual_ids(model, family), words.device)


# The pictures are named because transformers leaves named arguments alone: otherwise it would hand
# on its own encoding of them, and a draft model with an encoder of its own would see nothing.
MEDIA = (
    *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"),
    *("second_per_grid_ts", "image_sizes", "batch_num_images", "pixel_attention_mask"),
    "spatial_shapes",
)
# what transformers' own loop hands to a custom_generate callable, and this one makes itself
LOOP_ARGUMENTS = frozenset(
    {
        *("past_key_values", "use_cache", "logits_to_keep"),
        *("output_hidden_states", "output_attentions"),
    }
)
PREPARED = ("position_ids", "mm_encoder_outputs")  # what transformers prepares from the pictures


def _signature() -> inspect.Signature:
    """What transformers looks at to know which arguments the hook wants untouched."""
    names = ("logits_processor", "stopping_criteria", "generation_config")
    own = ("seed", "drafter_inputs", *MEDIA)
    either, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, either) for name in ("model", "input_ids")]
    parameters += [inspect.Parameter(name, named, default=None) for name in (*names, *own)]
    rest = inspect.Parameter("model_kwargs", inspect.Parameter.VAR_KEYWORD)
    return inspect.Signature([*parameters, rest])


HOOK = _signature()


def prompt_ids(inputs: Mapping[str, Any], batch: int, device: torch.device) -> Tensor:  # (B, L)
    """The ids of a prompt; none where it was given as embeddings."""
    ids = inputs.get("input_ids")
    return torch.zeros(batch, 0, dtype=torch.int64, device=device) if ids is None else ids


def padded_sequences(ids: Tensor, tokens: Sequence[Sequence[int]], pad: int) -> Tensor:
    """Prompts (B, L) and new tokens as `generate()` returns them: finished rows padded."""
    width = max(len(row) for row in tokens)
    new = [list(row) + [pad] * (width - len(row)) for row in tokens]
    return torch.cat((ids, torch.tensor(new, dtype=ids.dtype, device=ids.device)), 1)


def first(*candidates: Any) -> int:
    """The first id that is set; of a list of ids, its first."""
    for value in candidates:
        if isinstance(value, list | tuple):
            value = value[0] if value else None
        if value is not None:
            return int(value)
    return 0


def save_drafter(bound: BoundTokens, folder: Path) -> None:
    """The draft model's weights. Raises ValueError for a drafter that was made by hand."""
    recipe = bound.recipe
    if recipe.takes_drafter and bound.draft_model is None:
        raise ValueError(f"{type(bound.drafter).__name__} was made by hand and cannot be saved")
    if bound.draft_model is not None:
        bound.draft_model.save(folder, bound.backbone, bound.drafter)


def placed(args: Sequence[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name; the prompt's ids may come by place, as in `model.generate(ids)`."""
    if not args:
        return dict(arguments)
    if len(args) > 1 or "input_ids" in arguments:
        raise ValueError(
            "generate() takes input_ids by place, once, and everything else by name; give "
            "generate(**inputs)"
        )
    return {"input_ids": args[0], **arguments}
