"""A given text is followed, resumed after mismatches, and always verified."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import mmspec
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.given_text import GivenText
from mmspec.modalities.vlm.documents import parse_page
from tests import toys
from tests.drafters.driving import VOCABULARY, context, greedy, inputs, tiny
from tests.toys.folders import WORDS, save_text

LENGTH = 4
GREEDY = {"do_sample": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


def fast(model: Any, **options: Any) -> mmspec.Accelerated:
    return mmspec.accelerate(model, "hsd", length=LENGTH, check=False, **options)


def test_an_answer_known_before_takes_a_pass_for_every_draft(model: Any) -> None:
    """ceil((T - 1) / (length + 1)) calls behind the prefill; without a text T - 1, as plain."""
    request, room = inputs(), 24
    (said,) = greedy(model, request, room)
    found = {}
    for name, draft in {"whole": said, "long": [*said, 1, 2, 3], "none": None, "empty": []}.items():
        more = {} if draft is None else {"drafter_inputs": {"draft": [draft]}}
        out = fast(model).generate(**request, **GREEDY, max_new_tokens=room, **more)
        assert out.sequences[0, -room:].tolist() == said
        found[name] = out.stats.target_calls
    best = math.ceil((room - 1) / (LENGTH + 1))
    assert found == {"whole": best, "long": best, "none": room - 1, "empty": room - 1}


def test_rows_have_texts_of_their_own(model: Any) -> None:
    """Ragged rows: a full text, a short one, an unrelated one, none; greedy and sampled."""
    request, room = inputs((0, 3, 1, 5)), 16
    said = greedy(model, request, room)
    drafts = [said[0], said[1][:5], [one for one in range(1, 40)], None]
    own = fast(model)
    out = own.generate(**request, **GREEDY, max_new_tokens=room, drafter_inputs={"draft": drafts})
    assert out.sequences[:, -room:].tolist() == said
    assert out.stats.num_accepted_draft_tokens >= 12 + 3  # of the first row, and of the second
    again = own.generate(**request, **GREEDY, max_new_tokens=room)  # nothing is remembered
    assert again.stats.num_accepted_draft_tokens == 0
    how: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_new_tokens": room}
    sampled = own.generate(**request, **how, drafter_inputs={"draft": drafts})
    plain = mmspec.decode_plain(model, **request, **how)
    assert sampled.sequences.tolist() == plain.sequences.tolist()
    hooked = model.generate(
        **request,
        **GREEDY,
        max_new_tokens=room,
        custom_generate=own,
        drafter_inputs={"draft": drafts},
    )
    assert hooked[:, -room:].tolist() == said


TEXT = [10, 11, 12, 13, 14, 15, 16, 17, 10, 11, 12, 20, 21]


@pytest.mark.parametrize(
    ("said", "proposed"),
    [
        ([], [10, 11, 12, 13]),
        ([10, 11], [12, 13, 14, 15]),
        ([10, 11, 12, 9], []),  # the target says otherwise, and nothing ends like that
        ([10, 11, 9, 12, 13, 14], [15, 16, 17, 10]),  # a token put in, and three alike
        ([10, 11, 12, 14, 15, 16], [17, 10, 11, 12]),  # one left out
        ([9, 9, 10, 11, 12], [13, 14, 15, 16]),  # of two places the next one
        ([*TEXT[:8], 9, 10, 11, 12], [20, 21]),  # behind the first, the second
        (TEXT, []),
    ],
)
def test_where_a_text_is_taken_up_again(said: list[int], proposed: list[int]) -> None:
    drafter, now = GivenText(Fixed(LENGTH), VOCABULARY), context([1, 2])
    example = drafter.prepare_inputs({"draft": [TEXT]}, 1)
    now = replace(now, request=replace(now.request, drafter_inputs=example))
    state = drafter.begin(now)
    for end in range(len(said) + 1):  # token by token
        behind = replace(now, history=([1, 2, *said[:end]],))
        draft = drafter.propose(behind, state)
    assert draft.tokens[0].tolist() == proposed


def test_texts_are_cut_into_tokens_behind_a_difference(tmp_path: Any) -> None:
    """The same characters in other tokens: the rest is tokenized again."""

    class Letters:
        """Two letters a token where they stand at an even place of what is cut."""

        def __call__(self, text: str, add_special_tokens: bool) -> Any:
            pairs = [text[at : at + 2] for at in range(0, len(text), 2)]
            ids = [ord(one) - 97 if len(one) == 1 else 26 + ord(one[0]) - 97 for one in pairs]
            return type("Cut", (), {"input_ids": ids})

        def decode(self, ids: list[int]) -> str:
            return "".join(
                chr(97 + one) if one < 26 else chr(71 + one) + chr(72 + one) for one in ids
            )

    text = "abcdefghij"
    drafter, now = GivenText(Fixed(2), 60, tokenizer=Letters(), ends=(59,)), context([1])
    example = drafter.prepare_inputs({"draft": text}, 1)
    assert example["draft"][0].tokens == [26, 28, 30, 32, 34, 59]
    now = replace(now, request=replace(now.request, drafter_inputs=example))
    state = drafter.begin(now)
    said = [26, 2, 29, 31]  # ab, c, de, fg: no pair of the text, but its letters
    behind = replace(now, history=([1, *said],), vocabulary=60)
    assert drafter.propose(replace(behind, history=([1, 26, 2],)), state).nodes == 0
    draft = drafter.propose(replace(behind, history=([1, *said[:3], 31],)), state)
    assert draft.nodes == 0  # "cdefg" begins with a letter alone, and is cut in pairs
    draft = drafter.propose(replace(behind, history=([1, 29, 31, 33],)), drafter.begin(now))
    assert draft.tokens[0].tolist() == [9, 59]  # defghi, and j is left


def test_a_folder_brings_its_tokenizer(tmp_path: Any) -> None:
    """From text to the model's output; also from a file, and on a page of regions."""
    small = toys.model("llama")
    save_text(small, tmp_path / "text", WORDS[: small.config.vocab_size])
    (tmp_path / "page.md").write_text("w5 w6 w7 w8")
    how: dict[str, Any] = {"recipe": "hsd", "length": LENGTH}
    own = mmspec.accelerate(str(tmp_path / "text"), **how)
    words = own.session.bound.drafter.tokenizer
    page = words(["w3 w4 w9"], return_tensors="pt")
    page.pop("token_type_ids", None)
    page = dict(page)
    plain = own.model.generate(**page, **GREEDY, max_new_tokens=12)
    text = words.decode(plain[0, page["input_ids"].shape[1] :])
    out = own.generate(**page, **GREEDY, max_new_tokens=12, drafter_inputs={"draft": text})
    assert out.sequences.tolist() == plain.tolist()
    assert out.stats.target_calls <= math.ceil(11 / LENGTH)
    filed = mmspec.accelerate(own.model, **how, draft_file=str(tmp_path / "page.md"))
    assert filed.session.bound.drafter.default.tokens[:4] == words("w5 w6 w7 w8").input_ids[-4:]
    assert filed.generate(**page, **GREEDY, max_new_tokens=12).sequences.tolist() == plain.tolist()
    filed.save_pretrained(tmp_path / "saved")
    assert mmspec.load(tmp_path / "saved").session.bound.drafter.default is not None
    regions = {name: value.repeat(2, 1) for name, value in page.items()}
    parsed = parse_page(own, page, regions, ["w1 w2", ""], words, **GREEDY, max_new_tokens=12)
    assert parsed.output.sequences.tolist() == plain.tolist()
    assert parsed.regions is not None
    assert parsed.regions.sequences[0].tolist() == plain[0].tolist()
    assert parsed.draft == "\n\n".join([text.strip()] * 2)
    assert parsed.output.stats.num_accepted_draft_tokens > 0
    assert parse_page(own, page, None, ["w1"], words, **GREEDY, max_new_tokens=3).draft == "w1"


def test_a_tolerance_of_edits_says_what_the_text_says(model: Any) -> None:
    """A wrong token passes where the target agrees with all after it; tau=0 is plain."""
    request, room = inputs(), 10
    (said,) = greedy(model, request, room)
    wrong = (said[1] + 1) % VOCABULARY
    longer = torch.cat((request["input_ids"], torch.tensor([[said[0], wrong]])), 1)
    (behind,) = greedy(model, {"input_ids": longer}, room - 2)
    text = [said[0], wrong, *behind]
    found = {}
    for tau in (0, 0.5):
        lax = mmspec.accelerate(model, "hsd-tolerance", length=LENGTH, check=False, tau=tau)
        out = lax.generate(
            **request, **GREEDY, max_new_tokens=room, drafter_inputs={"draft": [text]}
        )
        found[tau] = out.sequences[0, -room:].tolist()
        assert out.stats.exact is (tau == 0)
    assert found == {0: said, 0.5: text}


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        ({}, {"draft": ["a", "b"]}, "2 drafts for 1 requests"),
        ({}, {"draft": ["a b"]}, "tokenizer was not found beside its weights"),
        ({}, {"draft": [[1, 900]]}, "a list of token ids below 48, not"),
        ({}, {"draft": [[0.5]]}, "a list of token ids below 48, not"),
        ({}, {"text": ["a"]}, "drafter_inputs has text, but this recipe drafts from a text"),
        ({"window": 0}, {}, "window=0 leaves nothing to match"),
        ({"draft_file": "nowhere.md"}, {}, "draft_file='nowhere.md' does not exist; give a text"),
        ({"draft_file": 0}, {}, "draft_file=0 does not exist"),
        ({"processor": "x"}, {}, "processor='x' has no tokenizer; give the model's own"),
    ],
)
def test_what_is_no_draft_is_refused(
    model: Any, options: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        fast(model, **options).generate(**inputs(), max_new_tokens=4, drafter_inputs=given)


def test_recipes_that_look_at_no_text_say_so(model: Any) -> None:
    other = mmspec.accelerate(model, "prompt-lookup", check=False)
    with pytest.raises(ValueError, match="has a draft, which PromptLookup would not look at"):
        other.generate(**inputs(), max_new_tokens=4, drafter_inputs={"draft": ["a"]})
