"""Consensus of small models by perplexity: the formula, and the whole procedure."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from PIL import Image

from mmspec.modalities.vlm import LanguageSettings
from mmspec.modalities.vlm.consensus import (
    VerdictPrompts,
    consensus,
    extract_boxed,
    generate_answer,
    log_perplexity,
    select_nearest,
    speculative_verdict,
)
from mmspec.modalities.vlm.formatting import LanguageFormatter
from mmspec.modalities.vlm.plug import load
from mmspec.zoo.scene import sample
from mmspec.zoo.scene_tensors import render_pixels
from tests import toys
from tests.toys.readers import backbone


def _drawn(n: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_scores_are_the_sum_of_their_definition() -> None:
    log, n = _drawn(5), 5
    for a, score in enumerate(consensus(log).tolist()):
        others = [abs(float(log[b, a] - log[b, b])) for b in range(n) if b != a]
        assert score == pytest.approx(sum(others))


def test_models_that_are_one_agree_and_order_does_not_matter() -> None:
    same = torch.full((4, 4), 0.7, dtype=torch.float64)
    assert consensus(same).tolist() == [0.0] * 4
    log, order = _drawn(5), torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(consensus(log[order][:, order]), consensus(log)[order])
    fewer = consensus(log[:4, :4])
    assert bool((consensus(log)[:4] >= fewer).all())  # one more model adds to every score
    assert bool((consensus(log) >= 0).all())


def test_a_missing_answer_leaves_pairs_out_and_agrees_with_nobody() -> None:
    log = _drawn(4)
    log[:, 2] = torch.nan  # model 2 said nothing
    found = consensus(log)
    rest = torch.tensor([0, 1, 3])
    torch.testing.assert_close(found[rest], consensus(log[rest][:, rest]))
    assert math.isnan(found[2])
    assert 2 not in select_nearest(found, 4)
    alone = torch.full((2, 2), torch.nan, dtype=torch.float64)
    alone[:, 0] = 1.0
    assert select_nearest(consensus(alone), 2) == ()


def test_the_nearest_come_first_and_ties_are_drawn() -> None:
    scores = torch.tensor([0.5, 0.1, 0.5, 0.3])
    assert {select_nearest(scores, 3, seed) for seed in range(20)} == {(1, 3, 0), (1, 3, 2)}
    assert select_nearest(scores, 2) == (1, 3)
    assert select_nearest(scores, 3, 7) == select_nearest(scores, 3, 7)


def test_perplexity_is_that_of_a_whole_forward() -> None:
    model, request = toys.model("qwen2_5_vl"), toys.inputs("qwen2_5_vl")
    out = model.generate(
        **request,
        max_new_tokens=6,
        do_sample=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[0, request["input_ids"].shape[1] :]
    distribution = torch.stack(out.logits, 1)[0].double().log_softmax(-1)
    expected = -float(distribution.gather(-1, tokens[:, None]).mean())
    found = log_perplexity(backbone(model), request, tokens.tolist())
    assert found == pytest.approx(expected, abs=1e-5)
    one = log_perplexity(backbone(model), request, tokens[:1].tolist())
    assert one == pytest.approx(-float(distribution[0, tokens[0]]), abs=1e-5)


def test_the_last_box_counts() -> None:
    assert extract_boxed(r"first \boxed{a}, then \boxed{ 3 } in the end") == "3"
    assert extract_boxed("nothing") is None
    assert extract_boxed(r"not \boxed{1} but \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert extract_boxed(r"\boxed{a}, or \boxed{b") == "a"


def test_prompts_are_worded_by_templates() -> None:
    ours = VerdictPrompts(None, "{question} ({blocks}) {{x}}", "{number}. {reasoning}", "; ")
    assert ours.write_judge("where?", ["here {a}", "there"]) == "where? (1. here {a}; 2. there) {x}"
    default = VerdictPrompts().write_judge("where?", ["here"])
    assert default.startswith("where?\nSeveral assistants")
    assert "Assistant 1: here" in default
    assert default.endswith("\\boxed{answer}.")


@pytest.mark.parametrize(
    ("templates", "why"),
    [
        ({"reason": "think"}, r"reason='think' lacks \{question\}; its fields are \{question\} "),
        ({"judge": "{question}"}, r"judge=.* lacks \{blocks\}; its fields are \{question\}, "),
        ({"block": "{number}"}, r"block=.* lacks \{reasoning\}"),
        ({"block": "{reasoning} {name}"}, r"block=.* has \{name\}; .* \{reasoning\}, \{number\}"),
        ({"judge": "{question} {blocks} \\boxed{}"}, r"judge=.* has \{\}; .*double the braces"),
        ({"judge": "{question} {blocks"}, r"judge=.* is not one of str.format"),
        ({"judge": None}, r"judge=None is no text"),
        ({"reason": 5}, r"reason=5 is no text"),
    ],
)
def test_a_template_with_other_fields_is_refused(templates: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        VerdictPrompts(**templates)


def test_without_a_second_prompt_the_judge_reads_the_answers() -> None:
    names = ("zoo:llava-drafter", "zoo:qwen2.5-vl-drafter")
    small = [LanguageFormatter(one, load(one), LanguageSettings(max_new_tokens=6)) for one in names]
    ours = VerdictPrompts(None, "{question} {blocks}", "{reasoning}", " ")
    found = speculative_verdict(small, small[0], "where is the star?", _picture(), prompts=ours)
    assert found.reasonings == tuple(found.answers[at] for at in found.selected)
    alone = generate_answer(small[0], ours.write_judge("where is the star?", found.reasonings))
    assert found.text != alone  # which saw no picture
    again = ours.write_judge("where is the star?", found.reasonings)
    assert found.text == generate_answer(small[0], again, _picture())
    explained = speculative_verdict(
        small,
        small[0],
        "where is the star?",
        _picture(),
        keep=1,
        prompts=VerdictPrompts("{question}?"),
    )
    assert len(explained.reasonings) == 1


def _picture() -> Any:
    return Image.fromarray(render_pixels(sample(3)))


@lru_cache(maxsize=1)
def _askers() -> list[Any]:
    names = ("llava-drafter", "llava-text-drafter", "llava-drafter", "llava")
    return [
        LanguageFormatter(f"zoo:{name}", load(f"zoo:{name}"), LanguageSettings(max_new_tokens=24))
        for name in names
    ]


@pytest.mark.exhaustive
def test_models_of_the_zoo_agree_and_the_large_one_decides() -> None:
    """Two that are one have one score; the judge may be sped up and says the same."""
    *small, judge = _askers()
    picture, asked = _picture(), "Describe the picture in detail."
    found = speculative_verdict(small, judge, asked, picture, keep=2)
    assert found.answers[0] == found.answers[2]
    assert found.scores[0] == pytest.approx(found.scores[2], abs=1e-9)
    assert len(found.reasonings) == len(found.selected) == 2
    assert found.text == judge.text(found.output)
    other = speculative_verdict(small, judge, asked, picture, keep=2, recipe="prompt-lookup")
    assert (other.text, other.selected) == (found.text, found.selected)
    with pytest.raises(ValueError, match="1 small models with keep=3 give no consensus"):
        speculative_verdict(small[:1], judge, asked, picture)
