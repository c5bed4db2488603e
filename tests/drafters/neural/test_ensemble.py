"""Mixtures of draft models: exact, and weighted by agreement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoTokenizer

import mmspec
from mmspec.drafters.neural.ensemble import CaptionReader, mix_distributions
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.neural.weighting import Agreement, Evidence, FixedWeights, simplex
from tests import toys
from tests.covering import covering
from tests.toys.folders import WORDS, save_text

torch.set_num_threads(1)

ROOM, LENGTH = 24, 4
VIEWS = ["pixels", "nothing", "pooled"]


def random_distributions(*shape: int) -> Tensor:
    return torch.randn(*shape).softmax(-1)


@pytest.mark.parametrize(("members", "points"), [(1, 1), (2, 11), (3, 66), (4, 286)])
def test_the_grid_has_the_known_size(members: int, points: int) -> None:
    grid = simplex(members, 10)
    assert grid.shape == (points, members)
    assert len({tuple(point) for point in grid.tolist()}) == points
    assert_close(grid.sum(-1), torch.ones(points))


@pytest.mark.parametrize("hard", [False, True])
def test_probabilities_are_mixed_not_logits(hard: bool) -> None:
    distributions = random_distributions(2, 3, 2, 9)
    weights = torch.tensor([[0.2, 0.8], [1.0, 0.0]])
    distribution = mix_distributions(distributions.log(), weights, hard)
    expected = (weights[:, None, :, None] * distributions).sum(-2)
    assert_close(distribution.scores.exp(), expected)
    assert torch.equal(distribution.scores.argmax(-1), expected.argmax(-1))
    assert distribution.hard is hard


def test_impossible_tokens_stay_impossible() -> None:
    distributions = torch.tensor([[[[0.0, 0.5, 0.5], [0.0, 1.0, 0.0]]]])
    distribution = mix_distributions(distributions.log(), torch.tensor([[0.0, 1.0]]), False)
    assert_close(distribution.probs, torch.tensor([[[0.0, 1.0, 0.0]]]))


@pytest.mark.parametrize("perfect", [0, 1, 2])
def test_tabed_picks_the_vertex_of_the_perfect_member(perfect: int) -> None:
    weighting = Agreement()
    state = weighting.begin(2, 3, torch.device("cpu"))
    assert_close(weighting.weights(state), torch.full((2, 3), 1 / 3))
    distributions = random_distributions(5, 3, 20)
    nothing = Evidence(distributions[:0], distributions[:0, 0])
    state = weighting.observe(state, [Evidence(distributions, distributions[:, perfect]), nothing])
    vertex = torch.eye(3)[perfect]
    assert_close(weighting.weights(state), torch.stack((vertex, torch.full((3,), 1 / 3))))


def test_tabed_counts_agreement_first_and_divergence_second() -> None:
    """Brute force over the grid."""
    distributions, target = random_distributions(7, 2, 6), random_distributions(7, 6)
    weighting = Agreement()
    state = weighting.begin(1, 2, torch.device("cpu"))
    for at in range(7):
        state = weighting.observe(
            state, [Evidence(distributions[at : at + 1], target[at : at + 1])]
        )
    ranks = []
    for point in simplex(2, 10):
        mixed = (point[:, None] * distributions).sum(1)
        agrees = int((mixed.argmax(-1) == target.argmax(-1)).sum())
        ranks.append((-agrees, float((target * (target / mixed).log()).sum()), point.tolist()))
    assert weighting.weights(state)[0].tolist() == min(ranks)[2]


def test_a_window_forgets() -> None:
    weighting = Agreement(window=2)
    state = weighting.begin(1, 2, torch.device("cpu"))
    distributions = random_distributions(6, 2, 20)
    for member in (0, 1):
        state = weighting.observe(state, [Evidence(distributions, distributions[:, member])])
    assert weighting.weights(state).tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize(
    ("recipe", "family"), covering(("ibed", "tabed"), ("qwen2_5_vl", "llava"), strength=1)
)
def test_ensembles_are_lossless(recipe: str, family: str) -> None:
    model, request = toys.model(family), toys.inputs(family, batch=3, ragged=True)
    fast = mmspec.accelerate(model, recipe, drafter=toys.model(family, seed=1))
    assert fast.sees == "pixels+nothing+pixels"
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None
    settings = {"max_new_tokens": ROOM, "temperature": 1.0, "seed": 2}
    plain = mmspec.decode_plain(model, **request, **settings)
    assert torch.equal(fast.generate(**request, **settings).sequences, plain.sequences)


def calls(recipe: str, **parts: Any) -> int:
    model, request = toys.model("llava"), toys.inputs("llava", batch=2, ragged=True)
    fast = mmspec.accelerate(model, recipe, drafter=toys.model("llava"), length=LENGTH, **parts)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.fallback is None
    return int(out.stats.target_calls)


def test_one_view_is_plain_drafting() -> None:
    assert calls("ibed", views=["pixels"]) == calls("coupled", sees="pixels") == 5
    assert calls("ibed", views=["nothing"]) == calls("coupled", sees="nothing")


def test_identical_views_do_not_depend_on_weights() -> None:
    twice = ["pooled", "pooled"]
    assert calls("ibed", views=twice) == calls("ibed", views=twice, weights=[0.3, 0.7])


@pytest.mark.parametrize("view", [0, 1, 2])
def test_a_vertex_is_that_view(view: int) -> None:
    """Prompts of different lengths in one batch do not disturb each other."""
    weights = [float(other == view) for other in range(3)]
    alone = calls("ibed", views=[VIEWS[view]])
    assert calls("ibed", views=VIEWS, weights=weights) == alone
    assert view or alone == 5


@pytest.mark.parametrize("batch", [1, 3])
def test_views_of_a_recurrent_model_keep_a_memory_each(batch: int) -> None:
    target, request = toys.model("qwen3_5"), toys.inputs("qwen3_5", batch=batch, ragged=batch > 1)
    views = ["pixels", "nothing"]
    parts: dict[str, Any] = {"drafter": toys.model("qwen3_5"), "length": LENGTH, "views": views}
    fast = mmspec.accelerate(target, "ibed", weights=[1, 0], **parts)
    expected = target.generate(**request, max_new_tokens=ROOM, do_sample=False)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None
    assert out.stats.tokens_per_target_call > LENGTH


def test_tabed_finds_the_view_that_is_a_copy_of_the_target() -> None:
    assert calls("tabed", views=VIEWS) < calls("ibed", views=VIEWS)


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("recipe", ["ibed", "tabed"])
def test_the_mixture_is_recorded_for_rejection(recipe: str, verifier: str) -> None:
    model, request = toys.model("llava"), toys.inputs("llava")
    parts: dict[str, Any] = {"drafter": toys.model("llava"), "verifier": verifier}
    fast = mmspec.accelerate(model, recipe, **parts)
    out = fast.generate(**request, max_new_tokens=ROOM, temperature=1.0, seed=4)
    assert out.stats.fallback is None
    assert out.sequences.shape[1] == request["input_ids"].shape[1] + ROOM


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"views": ["sound"]}, "must be a list out of pixels, nothing, pooled"),
        ({"views": []}, "must be a list"),
        ({"sees": "nothing"}, "has its own views"),
        ({"weights": [1.0]}, r"weights=\[1.0\] must be a list of 3 numbers"),
        ({"weights": 0.5}, "weights=0.5 must be a list"),
        ({"weights": [None, 1, 1]}, "weights=None must be a number"),
    ],
)
def test_unknown_views_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate(toys.model("llava"), "ibed", drafter=toys.model("llava"), **parts)


def test_bad_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="are all 0; give one above 0"):
        FixedWeights((0.0, 0.0))
    with pytest.raises(ValueError, match="2 weights were given for 3 members"):
        FixedWeights((1.0, 2.0)).begin(1, 3, torch.device("cpu"))
    with pytest.raises(ValueError, match="at least 1 step"):
        Agreement(steps=0)


CAPTIONS: list[Any] = [[7, 8, 9], [11]]


def captioned(captions: Any = CAPTIONS, **parts: Any) -> Any:
    """A recipe with the view of captions alone, and the arguments of a call."""
    model, request = toys.model("llava"), toys.inputs("llava", batch=2, ragged=True)
    parts = {"drafter": toys.model("llava", seed=1), "length": LENGTH, **parts}
    fast = mmspec.accelerate(model, "ibed", **{"views": ["caption"], **parts})
    return fast, {**request, "max_new_tokens": ROOM, "drafter_inputs": {"captions": captions}}


@pytest.mark.parametrize("views", [["caption"], ["nothing", "caption"]])
def test_a_caption_stands_for_the_image(monkeypatch: pytest.MonkeyPatch, views: list[str]) -> None:
    """The first draft is what the draft model generates after the prompt with the caption."""
    small, drafts, rounds = toys.model("llava", seed=1), list[Any](), list[Any]()
    propose = Autoregressive.propose

    def noted(self: Any, *args: Any) -> Any:
        drafts.append(propose(self, *args))
        return drafts[-1]

    monkeypatch.setattr(Autoregressive, "propose", noted)
    weights = [float(one == "caption") for one in views]
    fast, request = captioned(views=views, weights=weights)
    fast.generate(**request, do_sample=False, on_round=rounds.append)
    marks = {small.config.image_token_id}
    for row, caption in enumerate(CAPTIONS):
        ids, mask = request["input_ids"][row], request["attention_mask"][row]
        prompt = ids[mask.bool()].tolist()
        first = prompt.index(small.config.image_token_id)
        text = [*prompt[:first], *caption, *(one for one in prompt[first:] if one not in marks)]
        text += rounds[0].tokens[row]  # of the prefill
        expected = small.generate(torch.tensor([text]), max_new_tokens=LENGTH, do_sample=False)
        assert drafts[0].tokens[row].tolist() == expected[0, len(text) :].tolist()


@pytest.mark.parametrize("recipe", ["ibed", pytest.param("tabed", marks=pytest.mark.exhaustive)])
def test_captions_change_drafts_alone(recipe: str) -> None:
    model = toys.model("llava")
    parts: dict[str, Any] = {"drafter": toys.model("llava", seed=1), "views": [*VIEWS, "caption"]}
    fast, request = mmspec.accelerate(model, recipe, **parts), captioned()[1]
    given = request.pop("drafter_inputs")
    for how in ({"do_sample": False}, {"temperature": 1.0, "seed": 2}):
        plain = mmspec.decode_plain(model, **request, **how)
        out = fast.generate(**request, **how, drafter_inputs=given)
        assert torch.equal(out.sequences, plain.sequences)
        assert out.stats.fallback is None
    hooked = model.generate(**request, do_sample=False, custom_generate=fast, drafter_inputs=given)
    assert torch.equal(hooked, model.generate(**request, do_sample=False))


def test_captions_are_read_by_the_tokenizer(tmp_path: Any) -> None:
    save_text(toys.model("llama", layers=1), tmp_path, [*WORDS[:10], "image", ":", "w99"])
    reader = CaptionReader(AutoTokenizer.from_pretrained(tmp_path), 12)
    assert reader.read(["w3 w2", "w99 w4"], 2) == [[10, 11, 3, 2], [10, 11, 4]]
    assert reader.read([torch.tensor([4, 1]), []], 2) == [[4, 1], []]


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        (None, "captions=None for 2 prompts, and the view 'caption' reads one of each"),
        ("a ring", "captions='a ring' for 2 prompts"),
        ([[1]], "captions=1 captions for 2 prompts"),
        (["a ring", [1]], "tokenizer was not found"),
        ([[1], [10**6]], "a list of token ids below"),
        ([[1], [True]], "a list of token ids below"),
        ([[1], 5], "a list of token ids below .* not 5"),
    ],
)
def test_wrong_captions_are_refused(captions: Any, message: str) -> None:
    fast, request = captioned(captions)
    with pytest.raises(ValueError, match=message):
        fast.generate(**request)


def test_captions_without_their_view_are_refused() -> None:
    fast, request = captioned(views=["pixels"])
    with pytest.raises(ValueError, match="captions"):
        fast.generate(**request)


def test_a_caption_of_no_image_is_not_drafted_from() -> None:
    fast, request = captioned()
    ids = torch.tensor([[5, 6], [7, 8]])
    text = {"input_ids": ids, "drafter_inputs": request["drafter_inputs"]}
    out = fast.generate(**text, max_new_tokens=8, do_sample=False)
    assert "prompt 0 has a caption, but no image" in str(out.stats.fallback)
    text["drafter_inputs"] = {"captions": [None, None]}
    assert fast.generate(**text, max_new_tokens=8, do_sample=False).stats.fallback is None
