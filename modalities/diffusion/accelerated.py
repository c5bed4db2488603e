"""What `mmspec.accelerate` returns for pipelines of diffusers."""

from __future__ import annotations

from typing import Any, ClassVar

from mmspec.accelerated import Accelerated


class AcceleratedPipeline(Accelerated):
    """A text-to-image or text-to-video pipeline of diffusers."""

    calls: ClassVar[tuple[str, ...]] = ("__call__", "generate")

    @property
    def saved_parts(self) -> dict[str, Any]:
        """The parts that the user gave, and those that a call has measured (`mag-cache`)."""
        return {**self.given, **self.session.runner.measured}

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """Run the pipeline.

        Args:
            args, arguments: What the pipeline takes: `prompt`, `num_inference_steps`,
                `guidance_scale`, `height`, `width`, `output_type`, ...
            seed: Seeds the initial noise too, unless `latents` or `generator` is given.
            row_ids, on_round: See `mmspec.Accelerated`. Of recipes that sample chains, as are
            eta, churn: Noise per step, which makes a deterministic scheduler stochastic.

        Returns:
            What the pipeline returns, with `stats` added (not with `return_dict=False`).

        Raises:
            ValueError: An unknown argument, one that needs the steps in order, an exact recipe with
                a scheduler that adds no noise.

        Example:
            >>> pipe = StableDiffusionPipeline.from_pretrained(name)
            >>> pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
            >>> fast = mmspec.accelerate(pipe, recipe="accelerated-diffusion-carried")
            >>> fast("a lighthouse at dusk", seed=0).images[0]
        """
        return self._run("__call__", args, arguments)

    def generate(self, *args: Any, **arguments: Any) -> Any:
        """The same as calling the pipeline."""
        return self._run("generate", args, arguments)
