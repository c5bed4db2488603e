"""The plan of a training: options, checks, and its cost (`mmspec train --dry-run`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mmspec import recipes
from mmspec.errors import check_number, parse_parameters
from mmspec.recipe import Recipe
from mmspec.training.endpoint import ChatEndpoint
from mmspec.training.processes import Processes
from mmspec.training.trackers import check_trackers

# of a device of a dry run: a mean rate of an H100, of its memory and its link; and its size
ASSUMED = {"tflops": 400.0, "memory_gbs": 2000.0, "link_gbs": 200.0, "device_gib": 80.0}


@dataclass(frozen=True)
class TrainOptions:
    """Options of the command; None = as the recipe has it."""

    recipe: str
    target: str
    data: Path
    out: Path
    images: Path | None = None
    image_root: tuple[Path, ...] = ()
    allow_urls: bool = False
    max_bad_rows: int = 0
    answers: str = "target"
    endpoint: str | None = None
    endpoint_model: str | None = None
    endpoint_timeout: float = 300.0
    concurrency: int = 8
    head: Path | None = None
    cache: Path | None = None
    steps: int = 2000
    batch: int = 8
    accumulate: int = 1
    pack: int | None = None
    shard_target: bool = False
    rate: float | None = None
    ema: float = 0.0
    bf16: bool = False
    muon: bool = False
    held_out: int = 32
    every: int = 100
    max_new_tokens: int = 128
    max_length: int = 2048
    temperature: float = 0.0
    seed: int = 0
    overrides: tuple[str, ...] = ()
    track: tuple[str, ...] = ()
    threads: int | None = None
    trust_remote_code: bool = False
    dry_run: bool = False
    devices: int | None = None
    assume: str = ""
    json: bool = False
    placed: Mapping[str, str] = field(default_factory=dict)  # of the target

    def __post_init__(self) -> None:
        """Raises ValueError for rates and temperatures that are infinite or NaN."""
        for name in ("rate", "ema", "temperature"):
            if getattr(self, name) is not None:
                check_number(f"--{name}", getattr(self, name), 0, example=1e-3)
        if self.endpoint is not None and self.answers == "data":
            raise ValueError(
                f"--endpoint {self.endpoint} answers in place of the target, and --answers data "
                "takes the answers of the data; drop one of them"
            )
        self.chat_endpoint()
        check_trackers(self.track)
        if not self.dry_run and (self.devices is not None or self.assume):
            raise ValueError("--devices and --assume are of a plan; give --dry-run, or drop them")
        for name, value in self.assumed.items():
            check_number(f"--assume {name}", value, 1e-9, example=ASSUMED[name])

    @property
    def assumed(self) -> dict[str, float]:
        """Rates and size of a device in a plan. Raises ValueError for other names."""
        return {**ASSUMED, **parse_parameters(self.assume, ASSUMED, "--assume")}

    def chat_endpoint(self) -> ChatEndpoint | None:
        """Where the target answers; None = in this process. Raises ValueError for no address."""
        if self.endpoint is None:
            return None
        return ChatEndpoint(self.endpoint, self.endpoint_model, self.endpoint_timeout)


def get_trainable(name: str) -> Recipe:
    """A recipe whose drafter can be trained. Raises ValueError naming those that can be."""
    recipe = recipes.get(name)
    if recipe.training is None:
        able = [one for one in recipes.names("tokens") if recipes.get(one).training is not None]
        raise ValueError(
            f"recipe {name!r} has no drafter that `mmspec train` can train; choose one of "
            f"{', '.join(able)}"
        )
    return recipe


def check_share(options: TrainOptions, processes: Processes) -> None:
    """Refuse batches that processes, or the devices of a plan, cannot share. Raises ValueError."""
    count = options.devices or processes.count
    if options.accumulate % count:
        raise ValueError(
            f"--accumulate {options.accumulate} batches a step cannot be shared evenly by "
            f"{count} processes; give a multiple of {count}"
        )
