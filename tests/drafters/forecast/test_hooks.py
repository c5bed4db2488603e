"""Forecasting on tiny real networks, in their own pipelines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from mmspec.drafters.forecast.attached import AttachedNetworks, Statistics
from mmspec.drafters.forecast.features import transformer_blocks
from mmspec.drafters.forecast.forecast import Newton
from mmspec.drafters.forecast.hooks import Extrapolation, Forecasting
from mmspec.targets.continuous.forecast_schedule import DecayingThreshold
from mmspec.verifiers.forecast_gate import ForecastGate, fixed_cadence
from mmspec.verifiers.reflection import Reflection
from tests.covering import covering, limited
from tests.drafters.forecast.networks import PIPELINES, STEPS, dit, draw, flux

NOTHING = DecayingThreshold(base=-1.0, decay=1.0, floor=-1.0, least=0, warm_up=1)
CALLS = {"dit": 1, "flux": 2, "sd3": 1}  # of the network, per step


@dataclass(frozen=True)
class Blame:
    """A metric with errors in the groups in `index` only."""

    index: tuple[int, ...]

    def __call__(self, forecast: Tensor, computed: Tensor) -> Tensor:
        error = torch.zeros(len(forecast))
        error[[index for index in self.index if index < len(error)]] = 1.0
        return error


@contextmanager
def attach(how: Forecasting, pipe: Any, samples: int | None = 2) -> Iterator[AttachedNetworks]:
    attachment = how.attach(pipe, samples)
    try:
        yield attachment
    finally:
        attachment()


def _draw_image(pipe: Any, how: Forecasting, **extra: Any) -> tuple[Tensor, AttachedNetworks]:
    with attach(how, pipe) as attachment:
        return draw(pipe, **extra), attachment


@pytest.mark.parametrize(
    ("name", "how"),
    covering(PIPELINES, ((False, False), (True, False), (True, True)), strength=1),
)
def test_where_nothing_passes_the_pictures_are_the_networks_own(
    name: str, how: tuple[bool, bool]
) -> None:
    """A negative threshold, every forecast checked and rolled back: bit for bit."""
    pipe, (per_sample, lite) = PIPELINES[name](), how
    plain = draw(pipe)
    found, attachment = _draw_image(
        pipe,
        Forecasting(
            ForecastGate(NOTHING, per_sample=per_sample), Extrapolation(order=2, lite=lite)
        ),
    )
    assert torch.equal(found, plain)
    groups = CALLS[name] * (2 if per_sample else 1)
    seen = attachment.statistics
    assert seen.full == STEPS * groups
    assert seen.rejected == (STEPS - 1) * groups == len(seen.errors)
    assert seen.forecast == 0


def test_a_threshold_is_that_of_the_share_of_steps_taken() -> None:
    progress_values: list[float] = []

    class Watched(DecayingThreshold):
        def threshold(self, progress: float) -> float:
            progress_values.append(progress)
            return -1.0

    _draw_image(dit(), Forecasting(ForecastGate(Watched(least=0, warm_up=1))))
    assert progress_values == [step / STEPS for step in range(1, STEPS)]


@pytest.mark.parametrize("name", PIPELINES)
def test_without_rollback_a_rejected_step_stays(name: str) -> None:
    """The published behaviour: the next step is in full, so every second one is a forecast."""
    pipe = PIPELINES[name]()
    gate = ForecastGate(NOTHING, rollback=False, per_sample=False)
    found, attachment = _draw_image(pipe, Forecasting(gate))
    assert not torch.equal(found, draw(pipe))
    assert attachment.statistics.full == STEPS // 2 * CALLS[name]
    assert attachment.statistics.rejected == 0


@pytest.mark.parametrize("name", PIPELINES)
def test_where_all_passes_it_is_a_fixed_cadence(name: str) -> None:
    """SpeCa with an infinite threshold is TaylorSeer, bit for bit, checks or not."""
    pipe = PIPELINES[name]()
    schedule = DecayingThreshold(base=float("inf"), least=1, most=2, warm_up=1)
    left, checked = _draw_image(pipe, Forecasting(ForecastGate(schedule)))
    right, fixed = _draw_image(pipe, Forecasting(fixed_cadence(3, 1)))
    assert torch.equal(left, right)
    assert not torch.equal(left, draw(pipe))
    assert fixed.statistics.full == 3 * CALLS[name]  # F t t F t t F t
    assert fixed.statistics.forecast == 5 * CALLS[name]
    assert len(checked.statistics.errors) == 2 * 2 * CALLS[name]


@pytest.mark.parametrize("name", PIPELINES)
def test_forecast_layers_do_not_compute(name: str) -> None:
    pipe = PIPELINES[name]()
    computed: list[str] = []
    for path, layer in pipe.transformer.named_modules():
        if path.endswith((".to_q", ".ff.net.0.proj", ".proj_mlp", ".norm1", ".norm")):

            def hook(module: Any, given: Any, output: Any, path: str = path) -> None:
                if not isinstance(output, Tensor) or output.any():  # an idle layer says 0
                    computed.append(path)

            layer.register_forward_hook(hook)
    draw(pipe)
    whole = Counter(computed)
    computed.clear()
    _draw_image(pipe, Forecasting(fixed_cadence(4, 1)))  # F t t t F t t t
    for path, count in Counter(computed).items():
        gates = path.endswith("norm1") or path.endswith("norm")
        assert count == (whole[path] if gates else whole[path] // 4), path


@pytest.mark.parametrize(
    "scheduler",
    limited(
        [
            diffusers.DDIMScheduler,
            diffusers.DDPMScheduler,
            diffusers.DPMSolverMultistepScheduler,
            diffusers.UniPCMultistepScheduler,
            diffusers.EulerAncestralDiscreteScheduler,
            diffusers.HeunDiscreteScheduler,
        ],
        3,
    ),
)
def test_any_scheduler_will_do(scheduler: Any) -> None:
    """At interval 1 nothing changes; at 3 the pictures do, and stay finite."""
    pipe = dit(scheduler())
    plain = draw(pipe)
    assert torch.equal(_draw_image(pipe, Forecasting(fixed_cadence(1, 1)))[0], plain)
    found, attachment = _draw_image(pipe, Forecasting(fixed_cadence(3, 1), Extrapolation(order=2)))
    assert not torch.equal(found, plain)
    assert found.isfinite().all()
    assert attachment.statistics.forecast > attachment.statistics.full


@pytest.mark.parametrize("name", ["dit", "sd3"])
def test_a_rejected_sample_leaves_the_others_alone(name: str) -> None:
    """Sample 1 is redone at every step: sample 0 is bit for bit as if it were not."""
    pipe = PIPELINES[name]()
    schedule = DecayingThreshold(base=0.5, decay=1.0, least=0, most=100, warm_up=1)
    calm, _ = _draw_image(pipe, Forecasting(ForecastGate(schedule, Blame(()))))
    found, attachment = _draw_image(pipe, Forecasting(ForecastGate(schedule, Blame((1,)))))
    assert torch.equal(found[0], calm[0])
    torch.testing.assert_close(found[1], draw(pipe)[1], atol=1e-4, rtol=1e-4)
    assert attachment.statistics.rejected == STEPS - 1
    assert attachment.statistics.full == STEPS + 1
    together = ForecastGate(schedule, Blame((0,)), per_sample=False)
    found, _ = _draw_image(pipe, Forecasting(together))  # one for all: everything is redone
    assert torch.equal(found, draw(pipe))
    assert not torch.equal(found[0], calm[0])


def _still(network: nn.Module) -> nn.Module:
    """Make a network independent of time, so that equal inputs have equal outputs."""
    for path, layer in network.named_modules():
        if path.endswith("timestep_embedder.linear_1"):
            nn.init.zeros_(layer.get_parameter("weight"))
    return network


def _inputs(name: str, rows: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator)

    if name == "dit":
        return {"hidden_states": normal(4, 8, 8), "class_labels": torch.arange(rows)}
    text = {"encoder_hidden_states": normal(3, 12), "pooled_projections": normal(6)}
    if name == "sd3":
        return {"hidden_states": normal(4, 8, 8), **text}
    ids = {"txt_ids": torch.zeros(3, 3), "img_ids": torch.rand(4, 3, generator=generator)}
    return {"hidden_states": normal(4, 16), **text, **ids}


@torch.no_grad()
def _count_calls(network: nn.Module, time: int, inputs: dict[str, Any]) -> Tensor:
    rows = len(inputs["hidden_states"])
    output: Tensor = network(**inputs, timestep=torch.full((rows,), time / 10)).sample
    return output


@pytest.mark.parametrize("name", PIPELINES)
def test_features_that_stand_still_are_forecast_without_error(name: str) -> None:
    network, inputs = _still(PIPELINES[name]().transformer), _inputs(name, 3, 1)
    want = _count_calls(network, 9, inputs)
    schedule = DecayingThreshold(base=1e-5, floor=1e-5, least=0, most=4, warm_up=1)
    attachment = Forecasting(ForecastGate(schedule), Extrapolation(Newton(), 2)).attach_to(
        network, lambda: 10
    )
    for time in range(9, -1, -1):
        torch.testing.assert_close(_count_calls(network, time, inputs), want, atol=1e-5, rtol=0)
    attachment()
    seen = attachment.statistics
    assert (seen.full, seen.forecast, seen.rejected) == (2 * 3, 8 * 3, 0)
    moving = PIPELINES[name]().transformer  # a network that knows the time is not
    attachment = Forecasting(ForecastGate(schedule)).attach_to(moving, lambda: 10)
    for time in range(9, -1, -1):
        _count_calls(moving, time, inputs)
    attachment()
    assert attachment.statistics.rejected > 0


@pytest.mark.parametrize("name", PIPELINES)
def test_calls_within_a_step_have_states_of_their_own(name: str) -> None:
    """Guidance by two calls: they do not affect each other."""
    network = PIPELINES[name]().transformer
    how = Forecasting(fixed_cadence(3, 1))
    found = []
    for seeds in ((1,), (2,), (1, 2)):
        attachment = how.attach_to(network, lambda: 6)
        for time in range(6, 0, -1):
            found += [_count_calls(network, time, _inputs(name, 2, seed)) for seed in seeds]
        attachment()
        assert attachment.statistics.full == 2 * len(seeds)
    for step in range(6):
        assert torch.equal(found[12 + 2 * step], found[step])
        assert torch.equal(found[13 + 2 * step], found[6 + step])


@pytest.mark.parametrize("name", PIPELINES)
def test_rows_in_their_own_time(name: str) -> None:
    """A batch, partly recomputed: every row is as it is alone."""
    network = PIPELINES[name]().transformer
    schedule = DecayingThreshold(base=0.5, decay=1.0, least=1, most=3, warm_up=1)
    inputs = _inputs(name, 4, 1)
    together, alone = [], []
    attachment = Forecasting(ForecastGate(schedule, Blame((2,)))).attach_to(network, lambda: 8)
    for time in range(8, 0, -1):
        together.append(_count_calls(network, time, inputs))
    attachment()
    for row in range(4):
        gate = ForecastGate(schedule, Blame((0,) if row == 2 else ()))
        attachment = Forecasting(gate).attach_to(network, lambda: 8)
        part = {
            key: value if key.endswith("_ids") else value[row, None]
            for key, value in inputs.items()
        }
        alone.append(torch.cat([_count_calls(network, time, part) for time in range(8, 0, -1)]))
        attachment()
    torch.testing.assert_close(torch.stack(together, 1), torch.stack(alone), atol=1e-4, rtol=1e-4)


def test_a_change_of_batch_begins_again() -> None:
    network = PIPELINES["dit"]().transformer
    attachment = Forecasting(fixed_cadence(10, 1)).attach_to(network, lambda: 6)
    for time, rows in ((6, 4), (5, 4), (4, 2), (3, 2)):  # guidance ends after two steps
        _count_calls(network, time, _inputs("dit", rows, 1))
    attachment()
    assert (attachment.statistics.full, attachment.statistics.forecast) == (2, 2)


@pytest.mark.parametrize("name", PIPELINES)
def test_detaching_leaves_no_trace(name: str) -> None:
    pipe = PIPELINES[name]()
    plain, weights = draw(pipe), {k: v.clone() for k, v in pipe.transformer.state_dict().items()}
    before = [dict(vars(module)) for module in pipe.transformer.modules()]
    how = Forecasting(ForecastGate())
    with attach(how, pipe), pytest.raises(ValueError, match="is already forecast"):
        how.attach(pipe)
    with pytest.raises(ZeroDivisionError), attach(how, pipe):
        draw(pipe, callback_on_step_end=_fail) if name != "dit" else _fail()
    for module, old in zip(pipe.transformer.modules(), before, strict=True):
        assert vars(module).keys() == old.keys()
    assert torch.equal(draw(pipe), plain)
    for key, value in pipe.transformer.state_dict().items():
        assert torch.equal(value, weights[key])


def test_an_interrupt_while_attaching_leaves_no_trace() -> None:
    first, detached = nn.Linear(1, 1), list[nn.Module]()

    def attach_one(network: nn.Module) -> Any:
        if network is not first:
            raise KeyboardInterrupt
        return lambda: detached.append(network)

    with pytest.raises(KeyboardInterrupt):
        AttachedNetworks.to([first, nn.Linear(1, 1)], attach_one, Statistics())
    assert detached == [first]


def _fail(*_: Any) -> dict[str, Any]:
    raise ZeroDivisionError


def test_a_forward_that_was_replaced_before_is_put_back() -> None:
    network = PIPELINES["dit"]().transformer
    calls = []
    inner = network.forward

    def outer(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    outer.__wrapped__ = inner  # type: ignore[attr-defined]
    network.forward = outer
    attachment = Forecasting(fixed_cadence(2, 1)).attach_to(network, lambda: 4)
    _count_calls(network, 4, _inputs("dit", 2, 1))
    attachment()
    assert network.forward is outer
    assert calls == [1]


@pytest.mark.parametrize("lite", [False, True])
def test_networks_that_are_no_transformer_are_forecast_whole(lite: bool) -> None:
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
    )
    pipe = diffusers.DDPMPipeline(unet.eval(), diffusers.DDPMScheduler())
    pipe.set_progress_bar_config(disable=True)
    how = Forecasting(fixed_cadence(3, 2), Extrapolation(lite=lite))
    if not lite:
        with pytest.raises(ValueError, match="UNet2DModel is not a stack of transformer blocks"):
            how.attach(pipe)
        return
    calls: list[int] = []
    unet.conv_in.register_forward_hook(lambda *_: calls.append(1))
    with attach(how, pipe) as attachment:
        picture = pipe(num_inference_steps=8, output_type="np").images
    assert torch.from_numpy(picture).isfinite().all()
    assert attachment.statistics.full == len(calls) == 4  # F F t t F t t F
    assert attachment.statistics.forecast == 4


def test_lite_works_on_any_output_and_saves_every_block() -> None:
    pipe = flux()
    plain = draw(pipe)
    found, attachment = _draw_image(
        pipe, Forecasting(fixed_cadence(2, 1), Extrapolation(lite=True))
    )
    assert not torch.equal(found, plain)
    assert attachment.statistics.full == attachment.statistics.forecast == STEPS
    again, _ = _draw_image(pipe, Forecasting(fixed_cadence(1, 1), Extrapolation(lite=True)))
    assert torch.equal(again, plain)


@pytest.mark.parametrize("name", ["dit", "flux"])
def test_lite_forecasts_that_are_checked_compute_the_last_block_alone(name: str) -> None:
    pipe = PIPELINES[name]()
    runs: list[int] = []
    for index, block in enumerate(transformer_blocks(pipe.transformer)):
        query = next(part for name, part in block.named_modules() if name.endswith("to_q"))
        query.register_forward_hook(lambda *_, index=index: runs.append(index))
    gate = ForecastGate(DecayingThreshold(base=1e9, decay=1.0, least=0, warm_up=1, most=STEPS))
    found, attachment = _draw_image(pipe, Forecasting(gate, Extrapolation(lite=True)))
    assert attachment.statistics.full == 2 * CALLS[name]  # the first step, of two samples
    last = max(runs)
    assert [runs.count(index) for index in range(last)] == [CALLS[name]] * last
    assert runs.count(last) == STEPS * CALLS[name]
    assert not torch.equal(found, draw(pipe))


def test_what_cannot_be_forecast_is_refused() -> None:
    with pytest.raises(ValueError, match="Reflection does not judge forecasts"):
        Extrapolation().under(Reflection())
    with pytest.raises(ValueError, match="order=-1"):
        Extrapolation(order=-1)
    pipe = dit()
    with attach(Forecasting(ForecastGate()), pipe, 3), pytest.raises(ValueError, match="4 rows"):
        draw(pipe)
    with pytest.raises(ValueError, match="recipes speca and taylorseer"):
        ForecastGate().verify(None, None, None)  # type: ignore[arg-type]
    cached = PIPELINES["flux"]()
    cached.transformer.enable_cache(diffusers.FirstBlockCacheConfig())
    with pytest.raises(ValueError, match=r"disable_cache\(\) first"):
        Forecasting(ForecastGate()).attach(cached)


def test_an_error_that_is_not_a_number_is_rejected() -> None:
    def broken_metric(forecast: Tensor, computed: Tensor) -> Tensor:
        return torch.full((len(forecast),), torch.nan)

    schedule = DecayingThreshold(base=1e9, floor=1e9, least=0, most=4, warm_up=1)
    pipe = dit()
    found, attachment = _draw_image(pipe, Forecasting(ForecastGate(schedule, broken_metric)))
    assert attachment.statistics.forecast == 0
    assert attachment.statistics.rejected > 0
    assert torch.equal(found, draw(pipe))
