"""The recipes that forecast, from the outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec import recipes
from mmspec.drafters.forecast.presets import SPECA, TAYLORSEER
from mmspec.targets.continuous.forecast_error import l1
from mmspec.targets.continuous.forecast_schedule import Cadence, DecayingThreshold
from mmspec.verifiers.forecast_gate import ForecastGate
from tests.covering import covering, limited
from tests.toys.pipelines import build_request, pipeline

NEUTRAL: dict[str, dict[str, Any]] = {  # settings at which nothing is forecast
    "speca": {"base": -1.0, "decay": 1.0, "floor": -1.0, "least": 0, "warm_up": 1},
    "taylorseer": {"interval": 1},
    "first-block-cache": {"threshold": -1.0},
    "mag-cache": {"threshold": -1.0, "ratios": [1.0]},
    "sea-cache": {"threshold": 0.0},
    "tea-cache": {"threshold": 0.0, "coefficients": [1.0, 0.0]},
    "pab": {"spatial": 1, "temporal": 1, "cross": 1},
}
SKIPPING: dict[str, dict[str, Any]] = {
    "speca": {"warm_up": 1},
    "taylorseer": {"warm_up": 1},
    "first-block-cache": {"threshold": 1e9},
    "mag-cache": {"threshold": 1e9, "ratios": [1.0]},
    "sea-cache": {"threshold": 1e9},
    "tea-cache": {"threshold": 1e9, "coefficients": [1.0, 0.0]},
    "pab": {},
}


def _picture(pipe: Any, name: str, **extra: Any) -> Tensor:
    output = pipe(**build_request(name, 2), num_inference_steps=6, output_type="pt", **extra)
    found = output.frames if "frames" in output else output.images
    return torch.as_tensor(found)


@pytest.mark.parametrize(
    ("family", "name"),
    covering(("dit", "sd3", "flux", "pixart", "ltx"), tuple(NEUTRAL), strength=1),
)
def test_at_its_neutral_setting_a_recipe_is_the_pipeline(name: str, family: str) -> None:
    if name in ("first-block-cache", "sea-cache", "tea-cache") and family in ("sd3", "ltx"):
        pytest.skip("refused, or one block only")
    pipe = pipeline(family)
    torch.manual_seed(5)  # `seed=` sets it too: not all pipelines give their scheduler a generator
    plain = _picture(pipe, family, generator=torch.Generator().manual_seed(5))
    fast: Any = mmspec.accelerate(pipe, name, **NEUTRAL[name])
    assert torch.equal(_picture(fast, family, seed=5), plain)
    assert fast.last_stats.target_calls > 0
    assert fast.last_stats.unverified_tokens == 0
    fast = mmspec.accelerate(pipe, name, **SKIPPING[name])
    assert not torch.equal(_picture(fast, family, seed=5), plain)
    assert fast.last_stats.unverified_tokens > 0


@pytest.mark.parametrize("model", ["dit", "flux", "hunyuan-video"])
@pytest.mark.parametrize(("name", "presets"), [("speca", SPECA), ("taylorseer", TAYLORSEER)])
def test_published_settings_are_options_of_their_recipe(
    name: str, presets: Mapping[str, Mapping[str, Any]], model: str
) -> None:
    fast: Any = mmspec.accelerate(pipeline("dit"), name, **presets[model])
    bound = fast.session.runner.forecasting
    assert bound.extrapolation.order == {"dit": 4, "flux": 2, "hunyuan-video": 1}[model]
    assert bound.gate.schedule.warm_up == (1 if model == "hunyuan-video" else 3)
    assert not bound.gate.per_sample
    assert bound.gate.rollback is (name == "taylorseer")  # which checks nothing


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_recipe_that_forecasts_says_that_it_is_lossy(name: str) -> None:
    recipe = recipes.get(name)
    assert not recipe.exact
    assert recipe.decodes == "latents"
    assert not recipe.verifier.lossless


def test_options_and_verifiers_reach_the_gate() -> None:
    pipe = pipeline("dit")
    fast: Any = mmspec.accelerate(
        pipe, "speca", base=0.3, most=7, metric="l1", order=3, basis="newton"
    )
    bound = fast.session.runner.forecasting
    assert bound.gate.schedule == DecayingThreshold(base=0.3, most=7)
    assert bound.gate.metric == l1
    assert bound.extrapolation.order == 3
    assert bound.gate.rollback
    assert bound.gate.per_sample
    fast = mmspec.accelerate(pipe, "speca", rollback=False, per_sample=False, lite=True)
    assert not fast.session.runner.forecasting.gate.rollback
    assert not fast.session.runner.forecasting.gate.per_sample
    assert fast.session.runner.forecasting.extrapolation.lite
    own = ForecastGate(Cadence(2, 1), per_sample=False)
    fast = mmspec.accelerate(pipe, "speca", verifier=own)
    assert fast.session.runner.forecasting.gate is own
    with pytest.raises(ValueError, match="metric='l3' is not known; choose one of relative-norm"):
        mmspec.accelerate(pipe, "speca", metric="l3")
    with pytest.raises(
        ValueError, match="basis='fourier' is not known; choose one of taylor, newton"
    ):
        mmspec.accelerate(pipe, "taylorseer", basis="fourier")


@pytest.mark.parametrize(
    ("name", "given"),
    [("first-block-cache", {"threshold": float("nan")}), ("speca", {"base": "low"})],
)
def test_a_threshold_is_a_number(name: str, given: dict[str, Any]) -> None:
    option, value = next(iter(given.items()))
    with pytest.raises(
        ValueError, match=f"^{option}={value!r} must be a number; give one, such as 0"
    ):
        mmspec.accelerate(pipeline("dit"), name, **given)


@pytest.mark.parametrize(
    ("name", "given"),
    limited(
        [
            *NEUTRAL.items(),
            ("taylorseer", {"warm_up": 6}),
            ("first-block-cache", {"threshold": 1e-9}),
        ],
        5,
    ),
)
def test_a_call_without_forecasts_is_warned_of_once(
    name: str, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    pipe = pipeline("dit")
    fast: Any = mmspec.accelerate(pipe, name, **given)
    for seed in range(2):
        _picture(fast, "dit", seed=seed)
    if name in ("taylorseer", "pab"):
        assert [message.split(",")[0] for message in caplog.messages] == [
            f"{name!r} skips none of 6 steps"  # before the call: the cadence decides
        ]
        return
    assert [message.split(" in this call")[0] for message in caplog.messages] == [
        f"{name!r} forecast nothing"
    ]
    full, rejected = fast.last_stats.target_calls, fast.last_stats.num_draft_tokens
    assert f"({full} steps in full, {rejected} forecasts rejected)" in caplog.text
    assert (rejected > 0) == (name == "speca")
