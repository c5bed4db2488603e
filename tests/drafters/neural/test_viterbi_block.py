"""Blocks from heads: neutral options, block ends, and invalid options."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.drafters.neural.multi_token import MULTI_TOKEN_HEADS
from mmspec.models.heads.multi_token import MultiTokenHeads, MultiTokenHeadsConfig
from tests import toys
from tests.toys.readers import backbone

torch.set_num_threads(1)

ROOM = 13
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 30, "seed": 5}


@lru_cache(maxsize=2)
def heads(family: str = "llava") -> MultiTokenHeads:
    made: MultiTokenHeads = MULTI_TOKEN_HEADS.random(backbone(toys.model(family)), 0)
    return made


def read_nodes(batch: int, how: dict[str, Any], recipe: str = "codec-mtp", **options: Any) -> Any:
    drafter = None if recipe == "plain" else heads()
    fast = mmspec.accelerate(toys.model("llava"), recipe, drafter=drafter, **options)
    given = toys.inputs("llava", batch=batch, ragged=batch > 1)
    out = fast.generate(**given, max_new_tokens=ROOM, **how)
    assert out.stats.fallback is None
    return out


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
def test_blocks_of_one_token_are_plain_decoding(batch: int, how: dict[str, Any]) -> None:
    plain = read_nodes(batch, how, "plain").sequences
    assert torch.equal(read_nodes(batch, how, n=1).sequences, plain)
    assert torch.equal(read_nodes(batch, how, verifier="coupled").sequences, plain)
    assert not torch.equal(read_nodes(batch, how).sequences, plain)


@pytest.mark.parametrize("n", [2, 4, 5])
def test_every_forward_keeps_a_block(n: int) -> None:
    out = read_nodes(1, GREEDY, n=n)
    assert out.stats.num_new_tokens == ROOM
    assert out.stats.target_calls == -(-(ROOM - 1) // n)  # the first token comes of the prefill
    assert not out.stats.exact
    assert out.stats.over_accepted_mass is not None


@torch.no_grad()
def test_without_transitions_each_head_says_its_own_best() -> None:
    """The whole output, by hand: the target's token, then the argmax of each head."""
    model, reader, n = toys.model("llava"), backbone(toys.model("llava")), 4
    given = toys.inputs("llava", batch=1)
    ids = given["input_ids"]
    expected: list[int] = []
    while len(expected) < ROOM:
        more: Tensor = torch.tensor([expected], dtype=torch.int64)
        row = torch.cat((ids, more), 1)
        read = {**given, "input_ids": row, "attention_mask": torch.ones_like(row)}
        state = model(**read, output_hidden_states=True).hidden_states[-1][0, -1]
        block = [reader.head(state), *reader.head(heads()(state))[: n - 1]]
        expected += [int(logits.argmax()) for logits in block]
    for options in ({"lam": 0.0}, {"lam": 0.0, "k": 1}, {"k": 1}):
        out = read_nodes(1, GREEDY, n=n, **options).sequences[0, ids.shape[1] :]
        assert out.tolist() == expected[:ROOM]
    assert (
        read_nodes(1, GREEDY, n=n, lam=5.0).sequences[0, ids.shape[1] :].tolist() != expected[:ROOM]
    )


def test_the_end_inside_a_block_cuts_it() -> None:
    whole = read_nodes(1, GREEDY)
    length = toys.inputs("llava")["input_ids"].shape[1]
    said = whole.sequences[0, length:].tolist()
    place = next(at for at in range(2, ROOM) if said[at] not in said[:at] and at % 4)
    out = read_nodes(1, {**GREEDY, "eos_token_id": said[place]}).sequences[0, length:].tolist()
    assert out == said[: place + 1]


def test_a_row_does_not_depend_on_the_others() -> None:
    both = read_nodes(3, SAMPLED).sequences
    given = toys.inputs("llava", batch=3, ragged=True)
    fast = mmspec.accelerate(toys.model("llava"), "codec-mtp", drafter=heads())
    for row in range(3):
        alone = {name: one[row : row + 1] for name, one in given.items()}
        keep = alone["attention_mask"][0].bool()
        alone = {
            name: one[:, keep] if name in ("input_ids", "attention_mask") else one
            for name, one in alone.items()
        }
        out = fast.generate(**alone, max_new_tokens=ROOM, **SAMPLED, row_ids=[row]).sequences
        assert torch.equal(out[0, int(keep.sum()) :], both[row, len(keep) :])


def test_a_saved_folder_speaks_alike(tmp_path: Any) -> None:
    fast = mmspec.accelerate(toys.model("llava"), "codec-mtp", drafter=heads(), k=3)
    fast.save_pretrained(tmp_path)
    again = mmspec.load(tmp_path, toys.model("llava"))
    given = toys.inputs("llava", batch=1)
    one, two = (
        speaker.generate(**given, max_new_tokens=ROOM, **SAMPLED) for speaker in (fast, again)
    )
    assert torch.equal(one.sequences, two.sequences)
    assert_close(one.stats.over_accepted_mass, two.stats.over_accepted_mass)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 6}, "n=6 tokens a block need 5 heads .* there are 4; give n=5 or less"),
        ({"n": 0}, "n=0"),
        ({"k": 0}, "k=0"),
        ({"lam": -1.0}, "lam=-1.0"),
        ({"length": 3}, "do not give length= or tree="),
        ({"tree": [2, 1]}, "do not give length= or tree="),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate(toys.model("llava"), "codec-mtp", drafter=heads(), **options)


def test_heads_without_counts_need_no_transitions() -> None:
    reader = backbone(toys.model("llava"))
    bare = MultiTokenHeads(MultiTokenHeadsConfig.of(reader.config, reader.vocabulary))
    with pytest.raises(ValueError, match=r"carry no counts of them; give lam=0"):
        mmspec.accelerate(toys.model("llava"), "codec-mtp", drafter=bare)
    fast = mmspec.accelerate(toys.model("llava"), "codec-mtp", drafter=bare, lam=0)
    out = fast.generate(**toys.inputs("llava"), max_new_tokens=ROOM, **GREEDY)
    assert out.stats.fallback is None


def test_vadusa_with_one_draw_or_without_a_choice_is_exact() -> None:
    exact = read_nodes(3, GREEDY, "vadusa", draws=1)
    assert exact.stats.exact
    plain = read_nodes(3, GREEDY, "plain").sequences
    assert torch.equal(exact.sequences, plain)
    lossy = read_nodes(3, GREEDY, "vadusa", draws=3)
    assert not lossy.stats.exact
    assert torch.equal(lossy.sequences, plain)
    with pytest.raises(ValueError, match="draws=0"):
        read_nodes(1, GREEDY, "vadusa", draws=0)
