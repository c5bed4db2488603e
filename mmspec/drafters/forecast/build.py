"""What recipes that forecast features are made of, from the options of their kit."""

from __future__ import annotations

from typing import TypeVar

from mmspec.drafters.forecast.first_block import FirstBlockCache
from mmspec.drafters.forecast.forecast import Basis, Newton, Taylor
from mmspec.drafters.forecast.gate import DecayingThreshold
from mmspec.drafters.forecast.hooks import Extrapolation
from mmspec.drafters.forecast.metric import METRICS
from mmspec.recipe import Kit
from mmspec.verifiers.first_block import FirstBlockGate
from mmspec.verifiers.forecast_gate import ForecastGate, fixed_cadence

BASES: dict[str, Basis] = {"taylor": Taylor(), "newton": Newton()}
Part = TypeVar("Part")


def forecast_features(kit: Kit) -> Extrapolation:
    """Options `basis` ("taylor", "newton"), `order`, and `lite` where the recipe has it."""
    options = kit.options
    basis = chosen("basis", options["basis"], BASES)
    return Extrapolation(basis, options["order"], options.get("lite", False))


def first_block_cache(kit: Kit) -> FirstBlockCache:
    """The cache of diffusers."""
    return FirstBlockCache()


def decaying_gate(kit: Kit) -> ForecastGate:
    """SpeCa's threshold and check; `metric` is a name of METRICS or an object like them."""
    named = ("base", "decay", "floor", "least", "most", "warm_up")
    schedule = DecayingThreshold(**{name: kit.options[name] for name in named})
    metric = chosen("metric", kit.options["metric"], METRICS)
    return ForecastGate(schedule, metric, kit.options["rollback"], kit.options["per_sample"])


def cadence_gate(kit: Kit) -> ForecastGate:
    """TaylorSeer's fixed cadence, without any check."""
    return fixed_cadence(kit.options["interval"], kit.options["warm_up"])


def residual_gate(kit: Kit) -> FirstBlockGate:
    """The threshold of the first-block cache."""
    return FirstBlockGate(kit.options["threshold"])


def chosen(option: str, value: Part | str, known: dict[str, Part]) -> Part:
    """An object, or the one of that name. Raises ValueError with the known names."""
    if not isinstance(value, str):
        return value
    if value not in known:
        raise ValueError(f"{option}={value!r} is none of {', '.join(known)}")
    return known[value]
