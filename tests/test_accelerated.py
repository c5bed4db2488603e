"""What `accelerate` returns can be read by people, completion and type checkers."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc
from typing import Any

import pytest
import torch

import mmspec
from mmspec.accelerated import Accelerated
from tests import toys
from tests.modalities.speech import recognisers
from tools import surface


@pytest.mark.parametrize("interface", surface.interfaces(), ids=lambda one: one.__name__)
def test_every_call_is_a_documented_method(interface: type[Accelerated]) -> None:
    assert interface.calls
    for name in interface.calls:
        method = inspect.getattr_static(interface, name)
        assert inspect.isfunction(method), name
        assert inspect.signature(method).return_annotation is not inspect.Signature.empty
        assert method.__doc__, name
    first = inspect.getdoc(getattr(interface, interface.calls[0])) or ""
    assert all(f"{part}:" in first for part in ("Args", "Returns", "Raises", "Example")), first


def test_type_checkers_see_the_calls_of_the_classes() -> None:
    assert surface.FILE.read_text() == surface.stub(), "run `python -m tools.surface`"


def test_help_explains_accelerate() -> None:
    page = pydoc.plain(pydoc.render_doc(mmspec.accelerate))
    parts = ("Args:", "Returns:", "Raises:", "Example:", "-> 'Accelerated'")
    assert all(part in page for part in parts), page


def test_a_model_has_the_calls_of_its_modality_only() -> None:
    language = mmspec.accelerate(toys.model("llava"))
    speech = mmspec.accelerate(recognisers.whisper())
    assert isinstance(language, mmspec.Accelerated)
    assert {"generate", "stream", "last_stats"} <= {*dir(language)}
    assert "transcribe" not in dir(language)
    assert not hasattr(language, "transcribe")
    assert {"generate", "transcribe"} <= {*dir(speech)}
    assert "one recording" in (inspect.getdoc(speech.transcribe) or "")


def test_another_call_is_refused_with_those_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no transcribe\(\) here; call generate\(\)"):
        _ = mmspec.accelerate(toys.model("llava")).transcribe


@pytest.mark.parametrize("name", ["joint-frames", "gaussian-ratio"])
def test_a_verifier_of_another_kind_of_token_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="modality vlm decode tokens; choose another verifier"):
        mmspec.accelerate(
            toys.model("llama"), "coupled", drafter=toys.model("llama"), verifier=name
        )


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("llava", "eagle-3"),  # with trained heads
        ("image", "sjd"),
        ("diffusion", "taylorseer"),
        ("codec-lm", "prompt-lookup"),
        *(
            pytest.param(name, recipe, marks=pytest.mark.exhaustive)
            for name, recipe in (
                ("llava", "prompt-lookup"),
                ("granite-speech", "ctc-ssd"),
                ("vla", "hold-last"),
            )
        ),
    ],
)
def test_an_object_can_be_pickled_and_copied(name: str, recipe: str) -> None:
    fast = mmspec.accelerate(f"zoo:{name}", recipe)
    fast.disable()
    for again in (pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
        assert repr(again) == repr(fast)
        assert again.is_disabled
        assert again.model is not fast.model
    assert copy.copy(fast).model is fast.model


def test_a_pickle_generates_the_same_tokens() -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "seed": 3}
    fast = mmspec.accelerate(
        model, "coupled", drafter=toys.model("llama", layers=1), verifier="rejection", length=3
    )
    expected = fast.generate(**request, **how)
    again = pickle.loads(pickle.dumps(fast))
    assert again.last_stats == fast.last_stats
    assert again.given == fast.given
    assert torch.equal(again.generate(**request, **how).sequences, expected.sequences)
