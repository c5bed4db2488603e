"""The public surface: `accelerate` a model, then `generate` as before.

fast = mmspec.accelerate(model, recipe="coupled", drafter=small)
out = fast.generate(**inputs, max_new_tokens=64)
out.sequences, out.stats
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec import recipes
from mmspec.arguments import (
    LOOP_ARGUMENTS,
    MODEL_INPUTS,
    OWN,
    PREPARED,
    first,
    fresh_seed,
    padded_sequences,
    sampled,
    unknown_message,
)
from mmspec.compressors.naming import named as compressor_named
from mmspec.decode import Parts, decode
from mmspec.draft import Drafter, Round, Verifier
from mmspec.drafters.shapes import shape_of
from mmspec.laws.noise import KeyedNoise
from mmspec.laws.sampling import Sampling
from mmspec.modalities.families import backbone, surface
from mmspec.modalities.image import drawing as images
from mmspec.modalities.image import families as image
from mmspec.modalities.vlm import families as vlm
from mmspec.partner import draft_model, is_drafter
from mmspec.recipe import Kit, Recipe, made, pair
from mmspec.stats import Ledger, Stats
from mmspec.targets.causal import CausalTarget
from mmspec.targets.context import Request
from mmspec.targets.encoder_decoder import EncoderDecoder, source_inputs
from mmspec.targets.generation_settings import refuse_modes, resolve
from mmspec.targets.stop import Stop
from mmspec.verifiers.naming import named

PARTS = ("recipe", "drafter", "verifier", "compressor", "tree", "length", "sees", "options")


log = logging.getLogger("mmspec")
WATCHED = 24  # steps after which an acceptance of next to nothing is worth a word


@dataclass(frozen=True)
class Output:
    """What `generate` returns: sequences as transformers gives them, and the run's own report."""

    sequences: Tensor  # (B, L + T): prompt, new tokens, finished rows padded
    stats: Stats


def accelerate(
    model: Any,
    recipe: str | Recipe | None = None,
    *,
    drafter: Any = None,
    verifier: Verifier | str | None = None,
    compressor: Any = None,
    tree: Any = None,
    length: Any = None,
    sees: str | None = None,
    processor: Any = None,
    **options: Any,
) -> Accelerated:
    """Make a Hugging Face model generate faster by speculation.

    A diffusers pipeline gives an `AcceleratedPipeline`, a MAR model an `AcceleratedContinuous`; see
    `mmspec.modalities.diffusion.pipeline`, `mmspec.modalities.mar.continuous` for their arguments.

    `recipe` is a name (see `mmspec.recipes.names()`), a `Recipe`, or None: "coupled" with a
    drafter, else "prompt-lookup". `drafter` is a model, a folder, "zoo:NAME", or a `Drafter`. The
    other arguments replace parts of the recipe; `options` are its own knobs. `processor` is what
    turns the prompts of `generate_images` into tensors. Nothing is written onto the model.

    Raises ValueError, before anything runs, for parts that do not fit: unknown names, different
    vocabularies, a proposal kind the verifier is biased for, a cache that cannot roll back.
    """
    special = surface(model)
    if special is not None:
        parts = {"compressor": compressor, "tree": tree, "length": length, "sees": sees, **options}
        parts["processor"] = processor
        given = {name: value for name, value in parts.items() if value is not None}
        fast: Any = special(model, recipe, drafter=drafter, verifier=verifier, **given)
        return fast  # type: ignore[no-any-return]  # an `AcceleratedPipeline`, say
    if recipe is None:
        recipe = "prompt-lookup" if drafter is None else "coupled"
    plan = recipes.get(recipe) if isinstance(recipe, str) else recipe
    recipes.check_decodes(plan, "tokens", model)
    unknown = set(options) - set(plan.options)
    if unknown:
        raise ValueError(
            unknown_message(sorted(unknown), [*PARTS[:-1], *plan.options], "accelerate()")
        )
    given = {
        "verifier": verifier,
        "compressor": compressor,
        "tree": tree,
        "length": length,
        "sees": sees,
        **options,
    }
    plan = replace(
        plan,
        verifier=(named(verifier) if isinstance(verifier, str) else verifier) or plan.verifier,
        compressor=(compressor_named(compressor) if isinstance(compressor, str) else compressor)
        or plan.compressor,
        execution=shape_of(plan.execution, tree, length),
        sees=sees or plan.sees,
        options={**plan.options, **options},
    )
    kept = {k: v for k, v in given.items() if v is not None}
    return Accelerated(model, plan, drafter, kept, processor)


class Accelerated:
    """A model bound to a recipe; `generate`, `stream`, or pass it as `custom_generate`."""

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        drafter: Any,
        given: Mapping[str, Any] | None = None,
        processor: Any = None,
    ) -> None:
        self.model, self.processor = model, processor
        self.given = dict(given or {})  # the parts the user replaced, for save_pretrained
        self.backbone = backbone(model)
        self.image_family = self.backbone.image_family
        self.small = None
        if not is_drafter(drafter):
            self.small = draft_model(recipe, drafter, self.backbone)
        reader, sees = None, recipe.sees
        if self.small is not None:
            reader, sees = self.small.reader, self.small.sees
        options = (recipe.execution, sees, recipe.compressor, recipe.options)
        kit = Kit(self.backbone, reader, *options)
        verifier, gate = made(recipe.verifier, kit), made(recipe.gate, kit)
        self.recipe = recipe = replace(recipe, verifier=verifier, gate=gate)
        if not is_drafter(drafter):
            drafter = recipe.architecture(kit)
        self.drafter: Drafter = pair(drafter, recipe.verifier, self.backbone)
        if not getattr(self.drafter, "lossless", True):
            self.recipe = replace(recipe, truthful=False)
        self.target = CausalTarget(self.backbone, frozenset(getattr(self.drafter, "wants", ())))
        self.model_inputs = set(inspect.signature(model.forward).parameters) | MODEL_INPUTS
        self.last_stats: Stats | None = None
        self.warned = False

    @torch.no_grad()
    def generate(self, **arguments: Any) -> Output:
        """Generate as `model.generate` does, with the same arguments, plus `seed` and `row_ids`.

        Sampling is on when `do_sample=True` or when a sampling setting (temperature, top_k, top_p,
        ...) is given. With `seed`, every exact coupled recipe returns the tokens of
        `decode_plain(seed=...)`.
        """
        call = self._call(arguments)
        tokens = self._run(call, arguments.get("streamer"))
        assert self.last_stats is not None
        return Output(padded_sequences(call.ids, tokens, call.pad), self.last_stats)

    def _run(
        self, call: _Call, streamer: Any = None, rounds: list[list[int]] | None = None
    ) -> list[list[int]]:
        """New tokens per row; a Hugging Face streamer gets the prompt, then verified tokens.

        Every token's round is appended to `rounds`, where there is one list per row.
        """
        if streamer is not None:
            streamer.put(call.ids.cpu())
        ledger = self._ledger()
        tokens: list[list[int]] = [[] for _ in range(call.ids.shape[0])]
        for kept in ledger.follow(decode(call.parts, call.request)):
            for index, new in enumerate(kept.tokens):
                tokens[index].extend(new)
                if rounds is not None:
                    rounds[index].extend([kept.index] * len(new))
            if streamer is not None and kept.tokens[0]:
                streamer.put(torch.tensor(kept.tokens[0]))
        if streamer is not None:
            streamer.end()
        self.last_stats = ledger.stats()
        self._watch(self.last_stats)
        return tokens

    def _watch(self, stats: Stats) -> None:
        """Warn once when hardly anything is accepted: the output is right, so nobody notices."""
        if self.warned or stats.num_spec_steps < WATCHED or stats.mean_acceptance_length > 1.1:
            return
        self.warned = True
        log.warning(
            "hardly any drafted token is accepted (acceptance length %.2f over %d steps, the "
            "drafter saw %s): check that it shares the target's tokenizer and sees the picture, or "
            "give length='auto', which turns speculation off where it loses",
            *(stats.mean_acceptance_length, stats.num_spec_steps, stats.drafter_saw),
        )

    @torch.no_grad()
    def generate_images(self, **arguments: Any) -> images.Images:
        """Draw pictures with a model that speaks picture tokens, under the same promises.

        Takes `prompt=`, a text or a list, where `accelerate` was given the processor, or what the
        model draws behind (`input_ids` and `attention_mask`, a class, caption features); `grid=`
        (height, width) in codes or a `Grid`, `guidance=` a scale (default: the published one;
        1 = none), `negative=` inputs or words of unconditional prompts, and `seed`, `row_ids` and
        sampling settings as `generate` does. Greedy without any.
        """
        drawing = self.drawing(**arguments)
        how = (drawing.sampling, drawing.stop, drawing.seed, drawing.row_ids)
        call = self._bind(drawing.inputs, *how, drafter_inputs={})
        request = replace(call.request, shared={"grid": drawing.grid})
        rounds: list[list[int]] = [[] for _ in range(call.ids.shape[0])]
        tokens = self._run(replace(call, request=request), rounds=rounds)
        assert self.last_stats is not None
        return drawing.finish(tokens, rounds, self.last_stats)

    def drawing(self, **arguments: Any) -> images.Drawing:
        """What `generate_images` makes of its arguments, before anything is drawn."""
        most = getattr(self.backbone.config, "max_position_embeddings", None)
        image_family = self.image_family or image.image_family(self.model)
        return images.prepare(
            image_family, self.backbone.vocabulary, most, arguments, self.processor
        )

    @torch.no_grad()
    def stream(self, **arguments: Any) -> Iterator[Round]:
        """The same, one `Round` of verified tokens at a time."""
        call = self._call(arguments)
        ledger = self._ledger()
        yield from ledger.follow(decode(call.parts, call.request))
        self.last_stats = ledger.stats()

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = (),
        stopping_criteria: Any = (),
        generation_config: Any = None,
        seed: int | None = None,
        drafter_inputs: Mapping[str, Any] | None = None,
        pixel_values: Any = None,
        pixel_values_videos: Any = None,
        image_grid_thw: Any = None,
        video_grid_thw: Any = None,
        second_per_grid_ts: Any = None,
        image_sizes: Any = None,
        batch_num_images: Any = None,
        pixel_attention_mask: Any = None,
        spatial_shapes: Any = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """The `custom_generate` hook: `model.generate(**inputs, custom_generate=fast)`.

        transformers has merged the configuration; statistics are in `last_stats`. The pictures are
        named here because transformers leaves named arguments alone: otherwise it would hand on its
        own encoding of them, and a draft model with an encoder of its own would see nothing.
        """
        media = {
            "pixel_values": pixel_values,
            "pixel_values_videos": pixel_values_videos,
            "image_grid_thw": image_grid_thw,
            "video_grid_thw": video_grid_thw,
            "second_per_grid_ts": second_per_grid_ts,
            "image_sizes": image_sizes,
            "batch_num_images": batch_num_images,
            "pixel_attention_mask": pixel_attention_mask,
            "spatial_shapes": spatial_shapes,
        }
        media = {name: value for name, value in media.items() if value is not None}
        if media:  # what was prepared without the pictures is prepared again with them
            model_kwargs = {k: v for k, v in model_kwargs.items() if k not in PREPARED}
        refuse_modes(generation_config)
        if model is not self.model:
            raise ValueError(
                "this was accelerated for another model; call accelerate() on this one"
            )
        inputs = {"input_ids": input_ids, **media} | {
            name: value for name, value in model_kwargs.items() if name not in LOOP_ARGUMENTS
        }
        if isinstance(self.backbone, EncoderDecoder):
            inputs = source_inputs(self.model, inputs)
        length = input_ids.shape[1]
        stop = Stop.from_config(generation_config, stopping_criteria, length)
        sampling = Sampling.from_processors(logits_processor, bool(generation_config.do_sample))
        seed = fresh_seed() if seed is None else seed
        call = self._bind(inputs, sampling, stop, seed, None, drafter_inputs or {})
        tokens = self._run(call)
        pad = generation_config.pad_token_id
        return padded_sequences(input_ids, tokens, first(pad, generation_config.eos_token_id))

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the recipe and its drafter (not the target) for `mmspec.load`."""
        from mmspec.loading import save

        save(self, Path(folder))

    def __repr__(self) -> str:
        name = self.recipe.name or "custom recipe"
        return f"Accelerated({type(self.model).__name__}, {name}, drafter sees {self.sees})"

    @property
    def sees(self) -> str:
        """What the drafter sees of the picture."""
        return str(getattr(self.drafter, "sees", "nothing"))

    def _ledger(self) -> Ledger:
        return Ledger(self.recipe.name or "custom", self.recipe.exact, self.sees)

    def _call(self, arguments: Mapping[str, Any]) -> _Call:
        """Split the arguments of `generate` into inputs, settings and our own, and check them."""
        known = self.model_inputs
        inputs = {name: value for name, value in arguments.items() if name in known}
        own = {name: arguments.get(name) for name in OWN}
        rest = {k: v for k, v in arguments.items() if k not in known and k not in OWN}
        if isinstance(self.backbone, EncoderDecoder):
            inputs = source_inputs(self.model, inputs)
        vlm.check(self.model, self.backbone.family, inputs)
        carrier = inputs.get("input_ids")
        carrier = inputs["inputs_embeds"] if carrier is None else carrier
        batch, length = carrier.shape[:2]
        sampling, config = resolve(
            self.model,
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
        stop = Stop.resolve(
            self.model, config, length, own["stopping_criteria"] or (), own["tokenizer"]
        )
        seed = fresh_seed() if own["seed"] is None else int(own["seed"])
        call = self._bind(inputs, sampling, stop, seed, own["row_ids"], own["drafter_inputs"] or {})
        return replace(call, pad=first(config.pad_token_id, config.eos_token_id))

    def _bind(
        self,
        inputs: Mapping[str, Any],
        sampling: Sampling,
        stop: Stop,
        seed: int,
        row_ids: Sequence[int] | None,
        drafter_inputs: Mapping[str, Any],
    ) -> _Call:
        carrier = inputs.get("input_ids")
        batch = inputs["inputs_embeds"].shape[0] if carrier is None else carrier.shape[0]
        device = self.backbone.device
        ids = (
            torch.zeros(batch, 0, dtype=torch.int64, device=device) if carrier is None else carrier
        )
        noise = KeyedNoise.seeded(seed, batch, device, row_ids)
        request = Request(inputs, sampling, noise, stop.max_new_tokens, drafter_inputs)
        parts = Parts(self.target, self.drafter, self.recipe.verifier, stop, self.recipe.gate)
        return _Call(ids, parts, request)


@dataclass(frozen=True)
class _Call:
    ids: Tensor  # (B, L)
    parts: Parts
    request: Request
    pad: int = 0


def decode_plain(model: Any, **arguments: Any) -> Output:
    """Plain decoding, one token per forward, under the same noise as every exact coupled recipe."""
    return accelerate(model, recipe="plain").generate(**arguments)


def load(folder: str | Path, model: Any = None) -> Accelerated:
    """Load what `save_pretrained` saved; without `model`, the target that the file names."""
    from mmspec.loading import restore

    restored: Accelerated = restore(Path(folder), model, accelerate)
    return restored
