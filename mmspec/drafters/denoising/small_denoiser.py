"""Drafting with another denoiser: a small network, or a cheap approximation of the target."""

from __future__ import annotations

import inspect
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.distributions.kernels import GaussianKernel
from mmspec.draft import Draft, Drafter
from mmspec.drafters.denoising.unroll import WindowDrafter, unroll
from mmspec.drafters.denoising.window import Progress, window_of
from mmspec.models.folder import read_json
from mmspec.models.loading import is_pipeline, load_network, load_pipeline
from mmspec.recipe import DraftModelKind, Kit
from mmspec.targets.continuous.denoising import Denoiser, Trajectory


@dataclass(frozen=True)
class IndependentDenoiser(WindowDrafter):
    """One call of another denoiser per drafted state (De Bortoli et al. 2025, independent draft).

    It may be a smaller network, or a cached or forecast version of the target: its errors cost
    acceptance, never exactness. It must use the target's grid, see `check_grids`.
    """

    _: KW_ONLY
    denoiser: Denoiser

    def begin(self, context: Trajectory) -> Progress:
        check_grids(self.denoiser.kernel, context.kernel)
        return self.window.begin(context)

    def propose(self, context: Trajectory, state: Progress) -> Draft:
        levels = self.window.levels(state, context)

        def distribution(depth: int, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            rows = [row for row, level in enumerate(levels) if level > depth]
            return self._distribution(context, x, step, torch.tensor(rows, device=x.device))

        return unroll(context, self.window.topology(max(levels)), levels, distribution, self.kind)

    def _distribution(
        self, context: Trajectory, x: Tensor, step: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:  # (B, W, *E), (B, W), (R,)
        """Distributions of the next states; rows that are no longer drafted keep x."""
        width = x.shape[1]
        states, at = x[rows].flatten(0, 1), step[rows].flatten()
        prediction = self.denoiser.predict(states, at, rows.repeat_interleave(width))
        mean = context.kernel.mean(states, prediction.clean, at).unflatten(0, (len(rows), width))
        deviation = context.kernel.std_at(step, x)
        if prediction.std is not None:
            own = prediction.std.unflatten(0, (len(rows), width))
            deviation = torch.ones_like(x).index_copy(0, rows, own)
        return x.index_copy(0, rows, mean), deviation


def check_grids(draft: GaussianKernel, target: GaussianKernel) -> None:
    """Raises ValueError where the draft's sampler does not take the target's steps."""
    if draft.num_steps != target.num_steps:
        raise ValueError(
            f"the draft's sampler takes {draft.num_steps} steps and the target's "
            f"{target.num_steps}; give both the same scheduler and number of steps"
        )
    for name in ("alpha", "sigma"):
        own, other = (getattr(kernel, name).cpu() for kernel in (draft, target))
        if not torch.allclose(own, other, rtol=1e-4, atol=1e-6):
            raise ValueError(
                f"the draft's sampler and the target's differ in {name}; give both the same "
                "scheduler, with the same settings"
            )


def small_denoiser(kit: Kit) -> Drafter:
    """An independent denoiser on the target's grid, one call per drafted state."""
    assert kit.drafter is not None
    check_grids(kit.drafter.denoiser.kernel, kit.target.denoiser.kernel)
    return IndependentDenoiser(window_of(kit), denoiser=kit.drafter.denoiser)


class PipelineNetwork(Protocol):
    """A pipeline, and the name of its denoising network among its components."""

    @property
    def pipe(self) -> Any: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class DraftPipelineKind(DraftModelKind):
    """Smaller diffusers pipelines with the target's call signature; calls bind them to its grid.

    A folder may hold a denoising network alone, which is then combined with the target's other
    parts.
    """

    description: str = "draft pipeline"

    def accepts(self, model: Any) -> bool:
        return is_pipeline(model)

    def owns(self, folder: Path) -> bool:
        if (folder / "model_index.json").exists():
            return True
        file = folder / "config.json"  # of diffusers: it has a class name and no model type
        return file.exists() and "_class_name" in read_json(file)

    def load(
        self, source: str | Path, target: PipelineNetwork, dtype: torch.dtype | None = None
    ) -> Any:
        if not (Path(source) / "config.json").exists():
            return load_pipeline(source, dtype)
        return pipeline_with_network(target, load_network(source, dtype))

    def read(self, model: Any, target: PipelineNetwork, sees: str) -> Any:
        known = inspect.signature(target.pipe.__call__).parameters
        parameters = inspect.signature(model.__call__).parameters.values()
        required = [
            one
            for one in parameters
            if one.default is one.empty and one.kind is not one.VAR_KEYWORD
        ]
        missing = [one.name for one in required if one.name not in known]
        if missing:
            raise ValueError(
                f"the draft pipeline needs {', '.join(missing)}, which a "
                f"{type(target.pipe).__name__} does not take; give two pipelines with the same "
                "arguments"
            )
        return model

    def random(self, target: PipelineNetwork, seed: int) -> Any:
        network = target.pipe.components[target.name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return pipeline_with_network(target, type(network).from_config(network.config).eval())

    def save(self, model: Any, folder: Path, target: PipelineNetwork, drafter: Any) -> None:
        """Write the network only, if the draft pipeline has the target's other parts."""
        own, theirs = target.pipe.components, model.components
        shared = all(part is own.get(key) for key, part in theirs.items() if key != target.name)
        is_network = shared and target.name in theirs
        written = theirs[target.name] if is_network else model
        written.save_pretrained(folder, safe_serialization=True)


DRAFT_PIPELINE = DraftPipelineKind()


def pipeline_with_network(target: PipelineNetwork, network: Any) -> Any:
    """A pipeline with another network and the target's other components."""
    pipe = target.pipe
    small = type(pipe)(**{**pipe.components, target.name: network})
    small.set_progress_bar_config(**vars(pipe).get("_progress_bar_config", {}))
    return small
