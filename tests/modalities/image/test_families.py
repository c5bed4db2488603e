"""Images of the loop equal those of the models' own loops, with any drafter."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.codes.grid import Grid
from mmspec.draft import Draft, Drafter, Kind
from mmspec.modalities.image import chameleon
from mmspec.modalities.image import families as image
from mmspec.targets.memory import build_block
from mmspec.targets.tokens.context import Context
from tests.covering import covering, exhaustive, limited
from tests.modalities import drawing
from tests.toys import image_models

FAMILIES = tuple(image_models.PAINTERS)
RECIPES = ("plain", "prompt-lookup", "token-recycling")
BATCHES = (1, 3)


@lru_cache(maxsize=8)
def model(family: str) -> Any:
    return image_models.PAINTERS[family]()


@lru_cache(maxsize=32)
def expected(family: str, batch: int, scale: float) -> Tensor:
    image_family = image.image_family(model(family))
    grid = drawing.grid_of(family, image_family)
    return drawing.two_passes(model(family), family, request(family, batch), scale, grid)


def request(family: str, batch: int) -> dict[str, Any]:
    return image_models.request(family, batch)


def draw(family: str, batch: int, recipe: str = "plain", drafter: Any = None, **more: Any) -> Any:
    fast = mmspec.accelerate(model(family), recipe, drafter=drafter)
    given = {**request(family, batch), **drawing.sized(family), **more}
    out = fast.generate_images(**given)
    assert out.stats.fallback is None
    return out


# --- text of a model whose image tokens have a head of their own -------------------------------


@pytest.mark.parametrize("batch", [1, 2])
def test_janus_is_asked_about_a_picture_as_a_language_model(batch: int) -> None:
    janus: Any = image_models.PAINTERS["janus"]()
    vision, mark = janus.config.vision_config, 9
    janus.config.image_token_id = janus.model.config.image_token_id = mark
    cells = (vision.image_size // vision.patch_size) ** 2
    ids = torch.tensor([[1, *[mark] * cells, 5, 6, 7 + row] for row in range(batch)])
    pixels = torch.randn(batch, 3, vision.image_size, vision.image_size)
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    expected = janus.generate(**asked, max_new_tokens=8, do_sample=False)
    fast: Any = mmspec.accelerate(janus, "prompt-lookup", modality="vlm")
    assert torch.equal(
        fast.generate(**asked, max_new_tokens=8, do_sample=False).sequences, expected
    )
    painter: Any = mmspec.accelerate(janus)
    calls: list[Any] = [lambda: painter.generate(**asked), lambda: painter(janus, ids)]
    for call in calls:
        with pytest.raises((AttributeError, ValueError), match=r"modality='vlm'\) for text"):
            call()


# --- greedy equality ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "batch", "scale"), limited(covering(FAMILIES, BATCHES, (3.0, 1.0), strength=1), 3)
)
def test_greedy_pictures_are_those_of_a_plain_two_pass_loop(
    family: str, batch: int, scale: float
) -> None:
    for recipe in RECIPES:
        out = draw(family, batch, recipe, guidance=scale)
        assert torch.equal(out.sequences, expected(family, batch, scale)), recipe


@pytest.mark.parametrize("family", exhaustive(FAMILIES, [*FAMILIES][1::2]))
def test_guidance_and_prompts_matter(family: str) -> None:
    """Negative control: images of the toys depend on prompt and guidance."""
    assert not torch.equal(expected(family, 3, 1.0), expected(family, 3, 3.0))
    assert len({tuple(row) for row in expected(family, 3, 3.0).tolist()}) > 1


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("batch", BATCHES)
def test_emu3_equals_transformers(batch: int, scale: float) -> None:
    toy, given = model("emu3"), request("emu3", batch)
    negative = given.pop("negative")
    grid = drawing.grid_of("emu3", image.image_family(toy))
    start = given["input_ids"].shape[1]

    def allowed(_: int, ids: Tensor) -> list[int]:
        forced = grid.forced_token(len(ids) - start)
        codes: list[int] = grid.ids().tolist()
        return codes if forced is None else [forced]

    guided = {
        "guidance_scale": scale,
        "negative_prompt_ids": negative["input_ids"],
        "negative_prompt_attention_mask": negative["attention_mask"],
    }
    theirs = toy.generate(
        **given,
        **(guided if scale != 1 else {}),
        max_new_tokens=grid.length,
        do_sample=False,
        prefix_allowed_tokens_fn=allowed,
    )
    assert torch.equal(draw("emu3", batch, guidance=scale).sequences, theirs[:, start:])


@pytest.mark.parametrize("batch", BATCHES)
def test_janus_equals_transformers(batch: int) -> None:
    given = request("janus", batch)
    theirs = model("janus").generate(
        inputs=given["input_ids"],
        attention_mask=given["attention_mask"],
        generation_mode="image",
        guidance_scale=3.0,
        do_sample=False,
    )
    assert torch.equal(draw("janus", batch, guidance=3.0).sequences, theirs)


def test_lumina_rows_end_with_newlines_and_header_and_footer_are_forced() -> None:
    toy = model("chameleon")
    grid = chameleon.lumina(toy, 2, 4, newline=15, end=16, sizes=17)
    out = draw("chameleon", 3, "token-recycling", grid=grid)
    assert out.sequences[:, :2].tolist() == [[18, 19]] * 3
    assert out.sequences[:, 2:12].unflatten(1, (2, 5))[..., -1].eq(15).all()
    assert out.sequences[:, -1].eq(16).all()
    given = request("chameleon", 3)
    assert torch.equal(out.sequences, drawing.two_passes(toy, "chameleon", given, 3.0, grid))
    with pytest.raises(ValueError, match="even numbers"):
        chameleon.lumina(toy, 3, 4)


# --- draft models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_model_is_guided_like_the_target(family: str) -> None:
    """Drafts of a copy of the target are always accepted, so prompts and scale must agree."""
    out = draw(family, 3, "coupled", drafter=model(family), guidance=3.0)
    assert torch.equal(out.sequences, expected(family, 3, 3.0))
    assert out.stats.draft_acceptance_rate == 1
    assert out.stats.drafter_saw == "prompt"
    if family in ("emu3", "chameleon"):
        alone = mmspec.accelerate(model(family), "coupled", drafter=model(family), sees="nothing")
        blind = alone.generate_images(**request(family, 3), **drawing.sized(family), guidance=3.0)
        assert torch.equal(blind.sequences, out.sequences)
        assert blind.stats.draft_acceptance_rate < 1  # it drafts without guidance


@pytest.mark.parametrize(
    ("family", "shape"),
    covering(FAMILIES, ({"tree": [2, 2, 1]}, {"length": 4}), strength=1),
    ids=str,
)
def test_a_drafter_that_is_right_in_part_changes_nothing(
    family: str, shape: dict[str, Any]
) -> None:
    fast = mmspec.accelerate(model(family), "coupled", drafter=drawing.noisy(family), **shape)
    out = fast.generate_images(**request(family, 3), **drawing.sized(family), guidance=3.0)
    assert torch.equal(out.sequences, expected(family, 3, 3.0))
    stats = out.stats
    assert stats.fallback is None
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_the_target_drafts_for_itself_without_some_layers(family: str) -> None:
    out = draw(family, 3, "draft-verify", guidance=3.0)
    assert torch.equal(out.sequences, expected(family, 3, 3.0))
    assert out.stats.num_draft_tokens > 0


@pytest.mark.parametrize("family", limited(exhaustive(FAMILIES, [*FAMILIES][::2]), 2))
def test_sampled_pictures_depend_on_seed_and_row_alone(family: str) -> None:
    settings: dict[str, Any] = {"guidance": 3.0, "temperature": 0.8, "top_k": 20, "seed": 4}
    plain = draw(family, 3, **settings).sequences
    for recipe in RECIPES[1:]:
        assert torch.equal(draw(family, 3, recipe, **settings).sequences, plain)
    drafted = draw(family, 3, "coupled", drawing.noisy(family), **settings)
    assert torch.equal(drafted.sequences, plain)
    assert drafted.stats.num_accepted_draft_tokens > 0
    single: dict[str, Any] = {
        k: v[1:2] for k, v in request(family, 3).items() if isinstance(v, Tensor)
    }
    if "negative" in request(family, 3):
        single["negative"] = {k: v[1:2] for k, v in request(family, 3)["negative"].items()}
    fast = mmspec.accelerate(model(family), "plain")
    alone = fast.generate_images(**single, **drawing.sized(family), **settings, row_ids=[1])
    assert torch.equal(alone.sequences, plain[1:2])
    assert not torch.equal(draw(family, 3, **{**settings, "seed": 5}).sequences, plain)


@pytest.mark.parametrize("sees", ["nothing", "placeholders"])
def test_a_prompt_of_other_words_cannot_be_read_as_tokens(sees: str) -> None:
    """The recipe of another modality is refused."""
    toy = model("janus")
    with pytest.raises(ValueError, match=rf"sees='{sees}' reads the prompt as tokens.*'coupled'"):
        mmspec.accelerate(toy, "coupled", drafter=toy, sees=sees)
    with pytest.raises(ValueError, match=r"sees='nothing' reads the prompt as tokens"):
        mmspec.accelerate(toy, "spd-mllm", drafter=toy)


@pytest.mark.parametrize("family", ["janus", "llamagen_class"])
def test_a_model_of_smaller_images_drafts_for_mulo_sd_only(family: str) -> None:
    make = getattr(image_models, family)
    target, small = make(), make(side=2)
    with pytest.raises(ValueError, match=r"2 x 2 codes, the target 4 x 4.*recipe='mulo-sd'"):
        mmspec.accelerate(target, "coupled", drafter=small)
    mmspec.accelerate(target, "coupled", drafter=make())


def test_what_is_no_whole_model_is_refused_by_its_type() -> None:
    with pytest.raises(ValueError, match="holds a feature_head, which is not a draft model"):
        mmspec.accelerate(model("emu3"), "spd-mllm", drafter="zoo:image-head")


class Spy(Drafter):
    """Drafts nothing, and records its inputs."""

    kinds: tuple[Kind, ...] = (Kind.DET,)

    def begin(self, context: Context) -> None:
        self.shared = dict(context.shared)

    def propose(self, context: Context, state: None) -> Draft:
        return Draft.empty(context.batch, context.device)

    def observe(self, *_: Any) -> None:
        return None


def test_drafters_are_shown_the_grid() -> None:
    spy = Spy()
    draw("emu3", 1, "plain", spy, guidance=1.0)
    grid = spy.shared["grid"]
    assert (grid.height, grid.width, grid.separator) == (2, 3, image_models.EOL)


# --- memory and cost ------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "scale"), covering(FAMILIES, (3.0, 1.0), strength=1))
@torch.no_grad()
def test_logits_after_a_rollback_are_those_from_scratch(family: str, scale: float) -> None:
    toy = model(family)
    image_family, fast = image.image_family(toy), mmspec.accelerate(toy, "plain")
    arguments = request(family, 3)
    given = image_family.request({k: v for k, v in arguments.items() if k in image_family.inputs})
    unconditional = image_family.unconditional
    other: Any = unconditional(given) if unconditional else arguments["negative"]
    inputs = {**given, "guidance_scale": scale, "negative": other}
    backbone = fast.session.bound.backbone
    memory, first, _ = backbone.prefill(inputs, extra_slots=32)
    codes = image_family.codebook.ids
    drafted = Draft.chain(codes[torch.arange(1, 10).view(3, 3)], Kind.DET)
    start = [[int(codes[row])] for row in range(3)]
    backbone.read(memory, build_block(start, drafted, memory.like))
    memory.commit([1, 1, 1], [(), (0,), (0, 1)], 3)  # rows keep 0, 1 and 2 of 3 nodes
    last = codes[[20, 21, 22]][:, None].tolist()
    logits, _ = backbone.read(memory, build_block(last, None, memory.like))
    for row in range(3):
        kept = [*start[row], *drafted.tokens[row, :row].tolist(), *last[row]]
        for new, ours in (([], first[row]), (kept, logits[row, -1])):
            tokens = torch.tensor(new, dtype=torch.int64)
            cond = drawing.logits_of(toy, family, given, row, tokens)
            uncond = drawing.logits_of(toy, family, other, row, tokens)
            wanted = (uncond + scale * (cond - uncond)).log_softmax(-1)
            assert_close(ours.log_softmax(-1), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scale_of_one_reads_no_second_branch(family: str) -> None:
    rows: dict[float, set[int]] = {}
    decoder = mmspec.accelerate(model(family), "plain").session.bound.backbone.decoder
    for scale in (1.0, 2.0):
        seen = rows.setdefault(scale, set())

        def note(_: Any, args: Any, kwargs: Any, seen: set[int] = seen) -> None:
            carrier = kwargs.get("inputs_embeds")
            carrier = kwargs["input_ids"] if carrier is None else carrier
            seen.add(len(carrier))

        handle = decoder.register_forward_pre_hook(note, with_kwargs=True)
        draw(family, 3, guidance=scale)
        handle.remove()
    assert rows == {1.0: {3}, 2.0: {6}}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_codebook_is_that_of_the_decoder(family: str) -> None:
    book = image.image_family(model(family)).codebook
    assert book.size == image_models.CODES
    plain = family in ("emu3", "chameleon")
    assert book.metric == ("raw" if plain else "normalised")
    assert int(book.ids[0]) == (image_models.FIRST if plain else 0)


def test_emu3_still_writes() -> None:
    given = request("emu3", 3)
    del given["negative"]
    theirs = model("emu3").generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=199)
    fast = mmspec.accelerate(model("emu3"), "prompt-lookup")
    ours = fast.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=199)
    assert torch.equal(ours.sequences, theirs)


# --- pictures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_cells_become_pixels_of_the_expected_size(family: str) -> None:
    out = draw(family, 3, guidance=1.0)
    height, width = drawing.GRIDS.get(family, (image_models.SIDE,) * 2)
    assert out.ids.shape == (3, height, width)
    assert [picture.size for picture in out.images] == [(2 * width, 2 * height)] * 3


def test_emu3_decodes_as_transformers_does() -> None:
    toy, out = model("emu3"), draw("emu3", 3, guidance=1.0)
    image_family = image.image_family(toy)
    theirs = toy.decode_image_tokens(image_tokens=out.sequences, height=2, width=3)
    assert_close(image_family.decode(out.ids - image_models.FIRST), theirs)


# --- bad input ------------------------------------------------------------------------------------


def small(family: str) -> Any:
    if family == "janus":  # head and codebook share a number in its configuration
        toy = image_models.janus()
        toy.model.vqmodel.quantize.embedding = torch.nn.Embedding(image_models.CODES - 1, 8)
        return toy
    size = "codebook_size" if family == "emu3" else "num_embeddings"
    return image_models.PAINTERS[family](**{size: image_models.CODES - 1})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_codebook_of_another_size_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match=r"64 image tokens.*63 codes"):
        mmspec.accelerate(small(family), "plain")


def test_models_without_image_generation_are_refused() -> None:
    from tests import toys

    fast = mmspec.accelerate(toys.model("llama"), "plain")
    message = r"has no generate_images\(\) here; call generate\(\)"
    with pytest.raises(AttributeError, match=message):
        fast.generate_images(input_ids=torch.ones(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="ChameleonForImageGeneration"):
        image.image_family(image_models.stock_chameleon())
    fast = mmspec.accelerate(model("janus"), "plain")
    with pytest.raises(AttributeError, match=r"no generate\(\) here; call generate_images\(\)"):
        fast.generate(**request("janus", 1))


@pytest.mark.parametrize(
    ("family", "grid", "message"),
    [
        ("janus", (3, 4), "4 x 4 codes"),
        ("llamagen-class", (5, 5), "4 x 4 codes"),
        ("emu3", None, "give grid="),
        ("emu3", (20, 20), "smaller grid="),
        ("emu3", 7, "is not a size"),
        ("chameleon", (0, 4), r"grid=\(0, 4\) is not a size; .* at least 1"),
    ],
)
def test_grids_that_do_not_fit_are_refused(family: str, grid: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate(model(family), "plain").generate_images(**request(family, 1), grid=grid)


def test_a_grid_of_foreign_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="are not image tokens"):
        draw("emu3", 1, grid=Grid(2, 2, (0, 64)), guidance=1.0)


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_an_invalid_scale_is_refused(scale: float) -> None:
    fast = mmspec.accelerate(model("janus"), "sjd")
    with pytest.raises(ValueError, match=rf"guidance={scale} must be a number of at least 0; give"):
        fast.generate_images(**request("janus", 1), guidance=scale)


def test_guidance_without_an_unconditional_prompt_is_refused() -> None:
    given = request("emu3", 1)
    del given["negative"]
    fast = mmspec.accelerate(model("emu3"), "plain")
    with pytest.raises(ValueError, match=r"needs an unconditional prompt.*negative="):
        fast.generate_images(**given, grid=(2, 2))
    assert fast.generate_images(**given, grid=(2, 2), guidance=1.0).ids.shape == (1, 2, 2)


@pytest.mark.parametrize("family", ["emu3", "chameleon"])
def test_a_prompt_with_an_image_placeholder_is_refused(family: str) -> None:
    """Image inputs would be ignored: generation is conditioned on text."""
    toy = model(family)
    ids = torch.tensor([[1, 30, toy.config.image_token_id, image_models.BOI]])
    fast = mmspec.accelerate(toy, "plain")
    with pytest.raises(
        ValueError, match=r"the prompt has image tokens .* conditioned on text only"
    ):
        fast.generate_images(input_ids=ids, guidance=1, **drawing.sized(family))


def test_misspelt_and_malformed_arguments_are_refused() -> None:
    fast = mmspec.accelerate(model("chameleon"), "plain")
    with pytest.raises(ValueError, match="did you mean 'guidance'"):
        fast.generate_images(**request("chameleon", 1), gidance=2.0)
    with pytest.raises(ValueError, match="no prompt"):
        fast.generate_images(grid=(2, 2))
    with pytest.raises(ValueError, match="classes"):
        mmspec.accelerate(model("llamagen-class"), "plain").generate_images(class_ids=[9])
    fast, caption = mmspec.accelerate(model("llamagen-caption"), "plain"), torch.zeros(1, 3, 3)
    with pytest.raises(ValueError, match="caption has shape"):
        fast.generate_images(caption=caption)


@pytest.mark.parametrize("given", [[], (), {"input_ids": "x"}, 5])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_an_unconditional_prompt_that_is_none_is_refused_by_its_name(
    given: Any, scale: float
) -> None:
    fast = mmspec.accelerate(model("chameleon"), "plain")
    with pytest.raises(ValueError, match="negative"):
        fast.generate_images(**request("chameleon", 1), grid=(2, 2), guidance=scale, negative=given)


@pytest.mark.parametrize("family", ["emu3", "chameleon"])
def test_padding_is_inferred_without_a_mask(family: str) -> None:
    asked = {"grid": (2, 2), "guidance": 1.0, "seed": 3}
    given, fast = request(family, 3), mmspec.accelerate(model(family), "plain")
    told = fast.generate_images(**given, **asked)
    other = {**given, "attention_mask": given.pop("attention_mask").float()}
    assert fast.generate_images(**given, **asked).ids.equal(told.ids)
    assert fast.generate_images(**other, **asked).ids.equal(told.ids)


def test_padding_of_janus_needs_its_mask() -> None:
    given, fast = request("janus", 3), mmspec.accelerate(model("janus"), "plain")
    del given["attention_mask"]
    with pytest.raises(ValueError, match=r"input_ids hold the padding id 0.*attention_mask"):
        fast.generate_images(**given, guidance=1.0)
    alone = request("janus", 1)  # nothing is padded
    told = fast.generate_images(**alone, seed=1)
    del alone["attention_mask"]
    assert fast.generate_images(**alone, seed=1).ids.equal(told.ids)
