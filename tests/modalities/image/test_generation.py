"""Images are sampled from the distribution of `generate()`, for any generation configuration."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec import zoo
from mmspec.modalities.image import families as image
from tests.covering import covering
from tests.modalities import drawing
from tests.toys import image_models

OWN = ("janus", "emu3", "chameleon")  # LlamaGen has no generate()
CONFIGS: dict[str, dict[str, Any]] = {
    "library": {"do_sample": True},
    "model": {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8},
    "scale": {"do_sample": True, "top_k": 20, "guidance_scale": 2.0},
}


def configured(family: str, own: dict[str, Any]) -> Any:
    toy = image_models.PAINTERS[family]()
    toy.generation_config = copy.deepcopy(toy.generation_config)
    toy.generation_config.update(**own)
    return toy


def recorded(monkeypatch: pytest.MonkeyPatch, toy: Any, family: str, **more: Any) -> Any:
    """The image (1, L) of the model's own loop, and the distributions (L, V) of its tokens."""
    distributions: list[Tensor] = []
    draw = torch.multinomial

    def noting(probs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        distributions.append(probs[0])
        return draw(probs, *args, **kwargs)

    given = image_models.request(family, 1)
    negative = given.pop("negative", None)
    grid = drawing.grid_of(family, image.image_family(toy))
    start = given["input_ids"].shape[1]

    def allowed(_: int, ids: Tensor) -> list[int]:
        forced = grid.forced_token(len(ids) - start)
        codes: list[int] = grid.ids().tolist()
        return codes if forced is None else [forced]

    with monkeypatch.context() as patched:
        patched.setattr(torch, "multinomial", noting)
        if family == "janus":
            ids = {"inputs": given["input_ids"], "attention_mask": given["attention_mask"]}
            found = toy.generate(**ids, generation_mode="image", **more)
            return found, torch.stack(distributions)
        if negative is not None:
            more |= {"negative_prompt_ids": negative["input_ids"]}
        how = {"max_new_tokens": grid.length, "prefix_allowed_tokens_fn": allowed}
        found = toy.generate(**given, **how, **more)
    return found[:, start:], torch.stack(distributions)


def ours(toy: Any, family: str, sequence: Tensor, **more: Any) -> Tensor:  # (L, V)
    """The distributions from which `generate_images` samples the tokens of an image."""
    given = {**image_models.request(family, 1), **drawing.sized(family), **more}
    made = mmspec.accelerate(toy, "plain").session.prepare_request(**given)
    scale, rows = made.inputs.get("guidance_scale", 1.0), []
    start = int(made.inputs["attention_mask"].sum())
    for length in range(sequence.shape[1]):
        new = sequence[0, :length]
        logits = drawing.logits_of(toy, family, made.inputs, 0, new)
        if scale != 1:
            other = drawing.logits_of(toy, family, made.inputs["negative"], 0, new)
            logits = other + scale * (logits - other)
        before = torch.cat((made.inputs["input_ids"][0], new))

        def prefix(row: int, place: int, before: Tensor = before) -> Tensor:
            return before

        position = torch.tensor([[start + length]])
        rows.append(made.sampling.distribution(logits[None, None], prefix, position).probs[0, 0])
    return torch.stack(rows)


@pytest.mark.parametrize(("family", "config"), covering(tuple(OWN), tuple(CONFIGS), strength=1))
def test_the_generation_config_is_honoured(
    monkeypatch: pytest.MonkeyPatch, family: str, config: str
) -> None:
    own = CONFIGS[config]
    if family == "chameleon" and config == "scale":
        own = {**own, "guidance_scale": None}  # it has an unconditional prompt of another make
    toy = configured(family, own)
    torch.manual_seed(0)
    sequence, theirs = recorded(monkeypatch, toy, family)
    plain = "guidance_scale" not in own or family == "chameleon"
    given = {"guidance": 1.0} if plain and family != "janus" else {}
    found = ours(toy, family, sequence, **given)
    assert torch.equal(found > 0, theirs > 0)
    assert_close(found, theirs.to(found), atol=1e-4, rtol=1e-3)
    wanted = {"library": 50, "model": 9, "scale": 20}[config]
    assert int((theirs > 0).sum(-1).max()) <= wanted
    assert wanted == 9 or int((theirs > 0).sum(-1).max()) == wanted


@pytest.mark.parametrize("family", OWN)
def test_arguments_of_the_call_override_it(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    toy = configured(family, CONFIGS["model"])
    said = {"temperature": 1.3, "top_k": 12, "top_p": 1.0}
    torch.manual_seed(0)
    sequence, theirs = recorded(monkeypatch, toy, family, **said)
    given = {} if family == "janus" else {"guidance": 1.0}
    assert_close(ours(toy, family, sequence, **said, **given), theirs, atol=1e-4, rtol=1e-3)
    assert int((theirs > 0).sum(-1).max()) == 12


@pytest.mark.parametrize("family", OWN)
def test_the_model_decides_whether_to_sample(family: str) -> None:
    sampling = mmspec.accelerate(configured(family, {"do_sample": True}), "sjd")
    given = {**image_models.request(family, 1), **drawing.sized(family), "guidance": 1.0}
    pictures = [sampling.generate_images(**given, seed=seed).sequences for seed in range(2)]
    assert not torch.equal(*pictures)
    greedy = mmspec.accelerate(image_models.PAINTERS[family](), "plain").generate_images(**given)
    for said in ({"do_sample": False}, {"temperature": 0}):
        assert torch.equal(sampling.generate_images(**given, **said).sequences, greedy.sequences)


def test_processors_of_emu3_get_the_inputs_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = configured("emu3", {"do_sample": True, "repetition_penalty": 1.7})
    torch.manual_seed(0)
    sequence, theirs = recorded(monkeypatch, toy, "emu3")
    assert_close(ours(toy, "emu3", sequence, guidance=1.0), theirs, atol=1e-4, rtol=1e-3)


def test_processors_that_read_the_prompt_of_janus_are_refused() -> None:
    toy = configured("janus", {"repetition_penalty": 1.7})
    with pytest.raises(
        ValueError, match=r"RepetitionPenalty.* reads the prompt.*generation_config"
    ):
        mmspec.accelerate(toy, "plain").generate_images(**image_models.request("janus", 1))


def test_llamagen_has_no_configuration_of_its_own() -> None:
    toy = image_models.llamagen_class()
    made = mmspec.accelerate(toy, "plain").session.prepare_request(class_ids=[1], temperature=1.0)
    assert (made.sampling.top_k, made.sampling.top_p) == (0, 1.0)


def test_bundled_models_sample_from_the_whole_codebook() -> None:
    """As in training and evaluation; the default of transformers is top_k=50."""
    for name in ("image", "image-drafter", "image-sketch"):
        assert zoo.load(name).generation_config.top_k == 0


def test_an_image_decoder_that_returns_no_numbers_is_one_error() -> None:
    toy = image_models.PAINTERS["janus"]()
    fast = mmspec.accelerate(toy, "plain")
    with torch.no_grad():
        weight = next(toy.model.vqmodel.decoder.parameters())
        kept = weight.clone()
        weight.fill_(torch.nan)
        with pytest.raises(ValueError, match=r"image decoder returned NaN .* wider dtype"):
            fast.generate_images(**image_models.request("janus"))
        weight.copy_(kept)
    assert fast.generate_images(**image_models.request("janus")).images
