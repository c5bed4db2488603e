"""Flow-matching policies (pi0): speculative Euler steps of an action chunk.

Such a policy has no action tokens. It encodes images, text and state once; conditioned on that
prefix, a small action expert turns noise into a chunk of actions in ten deterministic Euler steps.
Recipes for deterministic samplers decode this chain: a window of states is scored in one forward
over many rows with the same prefix.

    steps        t = 1    0.9   0.8   0.7  ..   0
    one by one   x0  ->   x1 -> x2 -> x3  ..  x10      ten forwards of one row
    a window     x0 ->  [ x1 -> x2 -> x3 ]             one forward of four rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmspec import _hf_cache, recipes
from mmspec.decode import Parts, decode
from mmspec.distributions.kernels import GaussianKernel
from mmspec.distributions.noise import KeyedNoise, fresh_seed
from mmspec.draft import Round, Verifier
from mmspec.drafters.denoising.window import Window
from mmspec.errors import check_number
from mmspec.recipe import Kit, Recipe, pair, resolve
from mmspec.stats import Ledger, Stats
from mmspec.targets.continuous.denoising import ChainRequest, ChainTarget, Prediction
from mmspec.targets.stop import Stop


@dataclass(frozen=True)
class FlowActions:
    """What `sample_actions` returns; tokens in `stats` are Euler steps."""

    actions: Tensor  # (B, chunk, max_action_dim), as the model's own `sample_actions` gives them
    stats: Stats


@torch.no_grad()
def sample_actions(
    model: Any,
    *,
    recipe: str | Recipe = "paradigms",
    verifier: Verifier | None = None,
    window: int | None = None,
    num_steps: int | None = None,
    noise: Tensor | None = None,
    seed: int | None = None,
    max_rows: int | None = None,
    on_round: Callable[[Round], None] | None = None,
    **inputs: Any,
) -> FlowActions:
    """Actions of a `PI0ForConditionalGeneration`, with fewer forwards than Euler steps.

    `inputs` are those of the model's own `sample_actions`: `state` (B, max_state_dim), `input_ids`,
    `pixel_values`, `pixel_attention_mask`, `attention_mask`. `noise` (B, chunk, max_action_dim) is
    the first state, by default sampled from `seed`. `window` limits the states per forward,
    `max_rows` its rows. Recipe "paradigms" is lossy; with `verifier=ToleranceWindow(0)`, and
    with `window=1`, the result is that of the model's own loop up to the rounding of float32.

    Raises ValueError for models of another type, and for recipes that need noise in each step, a
    draft model, or tokens.
    """
    if model.config.model_type != "pi0":
        raise ValueError(
            f"{type(model).__name__} is not a flow-matching policy of transformers; give a "
            "PI0ForConditionalGeneration, or use accelerate(model) for a policy with action tokens"
        )
    chosen = recipes.get(recipe) if isinstance(recipe, str) else recipe
    check_flow_recipe(chosen)
    steps = model.config.num_inference_steps if num_steps is None else num_steps
    check_number("num_steps", steps, 1, whole=True, example=10)
    if seed is not None:
        check_number("seed", seed, whole=True, example=0)
    seed = fresh_seed() if seed is None else int(seed)
    denoiser = FlowPolicyDenoiser.of(model, inputs, steps)
    batch = len(denoiser.state)
    start = _start(denoiser, noise, seed)
    execution = chosen.execution
    if window is not None:
        execution = replace(execution, max_states=window)
    chosen = replace(chosen, execution=execution, verifier=verifier or chosen.verifier)
    target = ChainTarget(denoiser, max_rows)
    kit = Kit(target, None, execution, chosen.sees, None, chosen.options)
    judge = resolve(chosen.verifier, kit)
    drafter = pair(chosen.architecture(kit), judge, target)
    request = ChainRequest(start, KeyedNoise.from_seed(seed, batch, start.device))
    ledger = Ledger(chosen.name or "custom", replace(chosen, verifier=judge).exact, drafter.sees)
    last = list(start)
    for round_ in ledger.follow(decode(Parts(target, drafter, judge, Stop(steps)), request)):
        for row, new in enumerate(round_.tokens):
            last[row] = new[-1] if new else last[row]
        if on_round is not None:
            on_round(round_)
    return FlowActions(torch.stack(last).to(model.dtype), ledger.stats())


def check_flow_recipe(recipe: Recipe) -> None:
    """Raises ValueError for recipes that cannot decode a deterministic chain."""
    execution, name = recipe.execution, recipe.name or "custom"
    if recipe.decodes != "latents" or not isinstance(execution, Window):
        raise ValueError(
            f"recipe {name!r} decodes {recipe.decodes}, and a flow-matching policy takes Euler "
            "steps; give recipe='paradigms'"
        )
    if not execution.deterministic or recipe.gate is not None:
        raise ValueError(
            f"recipe {name!r} verifies sampled noise in each step, and flow-matching steps are "
            "deterministic; give recipe='paradigms'"
        )
    if recipe.takes_drafter:
        raise ValueError(
            f"recipe {name!r} needs a draft model, which is not supported here; give "
            "recipe='paradigms'"
        )


@dataclass(frozen=True, eq=False)
class FlowPolicyDenoiser:
    """The action expert with the cached prefix; rows are independent."""

    model: Any
    keys: Sequence[tuple[Tensor, Tensor]]  # (B, heads, L, d) each, of every layer
    state: Tensor  # (B, max_state_dim)
    cameras: Tensor  # (B, cameras) bool
    mask: Tensor | None  # (B, L)
    times: Tensor  # (N,) float32, where each step begins
    kernel: GaussianKernel
    width: int = 1

    @classmethod
    def of(cls, model: Any, inputs: dict[str, Any], steps: int) -> FlowPolicyDenoiser:
        """Encode images and text, as the model's own `sample_actions` does.

        Raises ValueError for missing or unknown inputs.
        """
        names = ("state", "input_ids", "pixel_values", "pixel_attention_mask")
        missing = [name for name in names if inputs.get(name) is None]
        unknown = sorted({*inputs} - {*names, "attention_mask"})
        if missing or unknown:
            problem = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}"
            raise ValueError(
                f"the request {problem}; give the output of PI0Processor: {', '.join(names)} and "
                "attention_mask"
            )
        state, ids, pixels, cameras = (inputs[name] for name in names)
        mask = inputs.get("attention_mask")
        embeds = model.model.embed_prefix(ids, pixels, cameras)
        out = model.model.vlm(
            inputs_embeds=embeds,
            attention_mask=mask,
            position_ids=None if mask is None else mask.cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(embeds)[:, :, 0],
            use_cache=True,
        )
        keys = [(layer.keys, layer.values) for layer in _hf_cache.output_cache(out).layers]
        level = torch.arange(steps, -1, -1, dtype=torch.float64) / steps
        kernel = GaussianKernel.flow_churn(level, 0.0)
        times = level[:-1].to(state.device, torch.float32)
        return cls(model, keys, state, cameras, mask, times, kernel)

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        """The clean chunk x - t v of states (R, *E), with the predicted velocity v."""
        cache, time = DynamicCache(), self.times[step]
        for layer, (keys, values) in enumerate(self.keys):
            cache.update(keys[row], values[row], layer)
        velocity = self.model(
            state=self.state[row],
            noise=states.to(self.model.dtype),
            timestep=time,
            pixel_attention_mask=self.cameras[row],
            attention_mask=None if self.mask is None else self.mask[row],
            **{_hf_cache.CACHE_NAME: cache},
        ).logits
        return Prediction(states - time[:, None, None] * velocity.to(states.dtype))


def _start(denoiser: FlowPolicyDenoiser, noise: Tensor | None, seed: int) -> Tensor:
    """The first states (B, *E) float32. Raises ValueError for noise of another shape."""
    config, batch = denoiser.model.config, len(denoiser.state)
    shape = (batch, config.chunk_size, config.max_action_dim)
    if noise is None:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(denoiser.state.device)
    if tuple(noise.shape) != shape:
        raise ValueError(f"noise has shape {tuple(noise.shape)}; give {shape}, one chunk per row")
    return noise.float()
