"""Survey of all pipelines of the installed diffusers that make pictures or clips from text.

Each is built small and at random, and called for latents by itself and by ours: in sequence, in
windows of states that are refined until nothing moves (rows of one network call are states of
different steps), with the counterpart with noise of its sampler, with an exact recipe, and with
forecasts. Either the latents are the pipeline's own, or the call is refused with an error.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor

from mmspec import api
from mmspec.modalities.diffusion.noise_replay import replay_noise
from mmspec.modalities.diffusion.stochastic_sampler import make_stochastic
from mmspec.modalities.diffusion.tiny_pipelines import build, build_request, text_pipelines
from mmspec.verifiers.tolerance_window import ToleranceWindow

STEPS, SEED = 6, 5
CLOSE = 2e-3  # of the standard deviation of the latents, by rounding in other batches
EXACT = "asd"
SEPARATOR = " | "  # of reasons
USES = ("plain", "windows", "stochastic", "exact", "forecast", "cache")


@dataclass(frozen=True)
class Line:
    """The result of one pipeline: the outcome of each use, and the first reason."""

    name: str
    sampler: str = ""  # shipped
    plain: str = ""  # "equal", "refused", "wrong" or "crash"; empty = its own call fails
    windows: str = ""  # the same, drafted in windows
    stochastic: str = ""  # in sequence with sampler="stochastic"
    exact: str = ""  # an exact recipe with that sampler: "runs" or "refused"
    forecast: str = ""  # taylorseer: "runs", and equal to the pipeline if nothing is forecast
    cache: str = ""  # first-block-cache
    reason: str = ""

    @property
    def total(self) -> int:
        """The number of pipelines."""
        return len(text_pipelines())

    @property
    def outcomes(self) -> tuple[str, ...]:
        return tuple(getattr(self, use) for use in USES)

    @property
    def verdict(self) -> str:
        """ "equal" if the chain is the pipeline's own, or why it is not."""
        if not self.plain:
            return "not asked"
        for bad in ("wrong", "crash"):
            if bad in self.outcomes:
                return bad
        if self.plain == self.windows == "equal" or self.stochastic == "equal":
            return "equal"
        return "forecasts only" if "runs" in f"{self.forecast} {self.cache}" else "refused"


def survey(only: frozenset[str] | None = None) -> Iterator[Line]:
    """Measure the pipelines, one line per class; default: all."""
    for name in text_pipelines():
        if only is None or name in only:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield measure_pipeline(name)


def measure_pipeline(name: str) -> Line:
    """Build one pipeline and run all uses."""
    try:
        pipe = build(name)
    except Exception as error:
        return Line(name, reason=f"not built: {_first_line(error)}")
    given = build_request(pipe)
    if "num_inference_steps" in inspect.signature(pipe.__call__).parameters:
        given = {"num_inference_steps": STEPS, **given}
    try:
        expected = _own(pipe, given)
    except Exception as error:
        return Line(name, reason=f"its own call: {_first_line(error)}")
    if not bool(expected.isfinite().all()):
        return Line(name, reason="its own call gives NaN with random weights")
    found: dict[str, str] = {}
    reasons: list[str] = []
    for use, check in CHECKS.items():
        try:
            found[use] = check(pipe, given, expected)
        except ValueError as error:
            found[use] = "refused"
            reasons.append(_first_line(error))
        except Exception as error:
            found[use] = "crash"
            reasons.append(f"{type(error).__name__}: {_first_line(error)}")
    return Line(name, type(pipe.scheduler).__name__, **found, reason=SEPARATOR.join(reasons))


def _check_plain(pipe: Any, given: Any, expected: Tensor) -> str:
    fast = api.accelerate(pipe, "paradigms", window=1)
    return _compare(_latents(fast(**given, generator=_generator())), expected)


def _check_windows(pipe: Any, given: Any, expected: Tensor) -> str:
    """Rows of a network call are states of different steps, so this compares them all."""
    fast = api.accelerate(pipe, "paradigms", window=3, verifier=ToleranceWindow(0.0))
    return _compare(_latents(fast(**given, generator=_generator())), expected)


def _check_stochastic(pipe: Any, given: Any, expected: Tensor) -> str:
    """In sequence with the counterpart with noise, which the pipeline itself gets too.

    A flow's own call has no ancestral steps, so it is compared with the noise that diffusers adds.
    """
    sampler = make_stochastic(pipe.scheduler)
    own, more, swap = copy.copy(pipe), {}, {"sampler": "stochastic"}
    own.scheduler = sampler.scheduler
    if sampler.eta is not None and "eta" in inspect.signature(own.scheduler.step).parameters:
        more["eta"] = sampler.eta
    elif sampler.eta is not None:
        config = {**sampler.scheduler.config, "stochastic_sampling": True}
        own.scheduler, swap = type(sampler.scheduler).from_config(config), {}
    alone = _own(own, {**given, **more})
    fast = api.accelerate(pipe if swap else own, "paradigms", window=1, **swap)
    return _compare(_latents(fast(**given, generator=_generator())), alone)


def _check_exact(pipe: Any, given: Any, expected: Tensor) -> str:
    fast = api.accelerate(pipe, EXACT, sampler="stochastic")
    found = _latents(fast(**given, generator=_generator()))
    return "runs" if found.shape == expected.shape and bool(found.isfinite().all()) else "wrong"


def _check_forecast(pipe: Any, given: Any, expected: Tensor) -> str:
    never, often = {"interval": 1, "warm_up": 1}, {"interval": 2, "warm_up": 1}
    try:
        return _compare_forecasts(pipe, given, "taylorseer", never, often)
    except ValueError as error:
        if "lite=True" not in str(error):
            raise
    lite = {"lite": True}
    found = _compare_forecasts(pipe, given, "taylorseer", {**never, **lite}, {**often, **lite})
    return f"{found}, lite" if found == "runs" else found


def _check_cache(pipe: Any, given: Any, expected: Tensor) -> str:
    never, often = {"threshold": 0.0}, {"threshold": 1e3}
    return _compare_forecasts(pipe, given, "first-block-cache", never, often)


def _compare_forecasts(
    pipe: Any, given: Any, recipe: str, never: Mapping[str, Any], often: Mapping[str, Any]
) -> str:
    """Equal to the pipeline if nothing is forecast, and finite where much is."""
    expected = _latents(pipe(**given, generator=_generator()))
    same = _latents(api.accelerate(pipe, recipe, **never)(**given, generator=_generator()))
    if _compare(same, expected) == "wrong":
        return "wrong"
    fast: Any = api.accelerate(pipe, recipe, **often)
    found = _latents(fast(**given, generator=_generator()))
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return "wrong"
    return "runs" if fast.last_stats.num_accepted_draft_tokens else "no forecast"


CHECKS: dict[str, Callable[[Any, Any, Tensor], str]] = {
    "plain": _check_plain,
    "windows": _check_windows,
    "stochastic": _check_stochastic,
    "exact": _check_exact,
    "forecast": _check_forecast,
    "cache": _check_cache,
}


def _own(pipe: Any, given: Any) -> Tensor:
    """The pipeline's own latents, its scheduler given the noise of our chain."""
    generator = _generator()
    with replay_noise(pipe.scheduler, 1, generator):
        return _latents(pipe(**given, generator=generator))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def _latents(output: Any) -> Tensor:
    return torch.as_tensor(output[0]).float()


def _compare(found: Tensor, expected: Tensor) -> str:
    """ "equal" within rounding, or "wrong"."""
    scale = float(expected.std())
    is_close = torch.allclose(found, expected, atol=CLOSE * scale, rtol=CLOSE)
    return "equal" if is_close else "wrong"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return lines[0][:300]


HEADS: dict[str, str] = {  # beginnings of reasons -> what the table says
    r"diffusers' first-block cache does not know the (\w+).*": r"the cache knows no \1",
    r"diffusers' first-block cache does not support.*": "the cache does not fit its network",
    r".*has 0 transformer blocks.*": "no stack of blocks",
    r"the last block of .* has no text stream.*": "its last block has no text stream",
    r"this recipe does not support (\w+);.*": r"no chain for \1",
    r"sampler='stochastic': (\w+) .*": r"\1 has no counterpart with noise",
    r"pipe\.(\w+) does not accept other states.*": r"\1 takes no other number of rows",
    r"this pipeline combines the \d+ outputs of its network by a rule that is (.*?) \(.*": (
        r"guidance by a rule that is \1"
    ),
    r"the network is called without a tensor of states.*": "states in a list",
    r"this pipeline copies its scheduler.*": "a scheduler for each part of the state",
    r"a layer gives features of shape.*": "parts of different lengths",
}


def _brief(reason: str) -> str:
    """The distinct causes in the words of the table."""
    found = []
    for one in reason.split(SEPARATOR):
        for pattern, brief in HEADS.items():
            if re.fullmatch(pattern, one):
                one = re.sub(pattern, brief, one)
        found.append(one.split("; ")[0].replace("|", "/"))
    return "; ".join(dict.fromkeys(one for one in found if one))


def markdown(lines: Sequence[Line]) -> str:
    """Return the table of docs/pipelines.md, and the pipelines that were not asked."""
    count = Counter(line.verdict for line in lines)
    asked = [line for line in lines if line.verdict != "not asked"]
    rows = [
        f"diffusers {diffusers.__version__}: {len(lines)} pipelines take a prompt and need no "
        f"picture, of which {len(asked)} were built and ran. {count['equal']} are equal to the "
        f"pipeline in latents, {count['forecasts only']} only forecast (chains are refused), "
        f"{count['refused']} are refused, {count['crash']} crash, and {count['wrong']} gave wrong "
        "latents.",
        "",
        f"| pipeline | shipped sampler | verdict | {' | '.join(USES)} | why |",
        "| --- | --- | --- | " + " | ".join(["---"] * (len(USES) + 1)) + " |",
    ]
    for line in asked:
        name, sampler = line.name.removesuffix("Pipeline"), line.sampler.removesuffix("Scheduler")
        cells = (name, sampler, line.verdict, *line.outcomes, _brief(line.reason))
        rows.append(f"| {' | '.join(cells)} |")
    rows += ["", "Not asked, since no small pipeline was found that runs by itself:", ""]
    left = [line for line in lines if line.verdict == "not asked"]
    return "\n".join(rows + [f"- {line.name}: {_brief(line.reason)}" for line in left])
