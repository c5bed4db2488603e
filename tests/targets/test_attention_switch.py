"""While tokens are decoded on a GPU, torch takes no attention kernel that plans every shape."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

import mmspec
from mmspec.targets import attention_kernels
from mmspec.targets.attention_kernels import Unplanned
from tests import toys
from tests.partners import noisy
from tests.toys.mar import PLAN, mar, settings


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU is in use, as far as the switch asks."""
    before = cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(attention_kernels, "is_initialized", lambda: True)
    cuda.enable_cudnn_sdp(True)
    yield
    cuda.enable_cudnn_sdp(before)


def switches(model: Any) -> list[bool]:
    """Whether cuDNN's attention is on in each forward of a model from now on."""
    found: list[bool] = []
    model.register_forward_pre_hook(lambda *_: found.append(cuda.cudnn_sdp_enabled()))
    return found


def test_rounds_run_without_plans_and_prompts_as_in_generate() -> None:
    """Of the target and of its draft model; afterwards the switch is as before."""
    model, small = toys.model("llama"), noisy("llama")
    fast = mmspec.accelerate(model, "coupled", drafter=small)
    request = toys.inputs("llama")
    fast.generate(**request, max_new_tokens=4)  # checks the class
    found, drafted = switches(model.get_decoder()), switches(small.get_decoder())
    for _ in fast.stream(**request, max_new_tokens=8, do_sample=False):
        assert cuda.cudnn_sdp_enabled()  # the caller's own networks take what torch prefers
    for calls in (found, drafted):
        assert calls[0]
        assert len(calls) > 2
        assert not any(calls[1:])


def test_a_choice_of_the_user_stays() -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    fast = mmspec.accelerate(model, "prompt-lookup")
    found = switches(model.get_decoder())
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), Unplanned():
        assert cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    fast.generate(**request, max_new_tokens=4)
    assert not any(found)
    assert not cuda.cudnn_sdp_enabled()


def test_networks_of_constant_shapes_keep_it() -> None:
    model: Any = mar()
    fast: Any = mmspec.accelerate(model, "cspd-coupled", drafter=mar(seed=1))
    found: list[bool] = []
    model.bridge.register_forward_pre_hook(lambda *_: found.append(cuda.cudnn_sdp_enabled()))
    fast.generate_images(class_labels=[1], seed=2, **settings(PLAN))
    assert found
    assert all(found)


def test_it_is_on_again_after_an_error_and_after_the_last_of_several_threads() -> None:
    model = toys.model("llama")
    fast = mmspec.accelerate(model, "prompt-lookup")
    request = toys.inputs("llama")
    fast.generate(**request, max_new_tokens=4)

    def fail(*_: Any) -> None:
        if not cuda.cudnn_sdp_enabled():
            raise RuntimeError("broken")

    hook = model.get_decoder().register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        fast.generate(**request, max_new_tokens=4)
    assert cuda.cudnn_sdp_enabled()
    hook.remove()
    kernels = Unplanned()
    with kernels:
        other = Thread(target=lambda: kernels.__enter__())
        other.start()
        other.join()
    assert not cuda.cudnn_sdp_enabled()
    kernels.__exit__()
    assert cuda.cudnn_sdp_enabled()
