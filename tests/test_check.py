"""Any text class either gives `generate()`'s own greedy tokens or is refused with one error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import mmspec
from mmspec.drafters.oracle import Oracle
from mmspec.targets import check
from mmspec.trees import Tree
from tests import toys
from tests.conftest import unchecked
from tests.toys.texts import TEXTS, prompts, text

ROOM = 10
WIDE = Tree.branching([2, 2, 1])
# Read right, whatever the shape; a class that is refused though it could be read would fail here.
READ = ("arcee", "bert", "codegen", "cohere2", "falcon", "gpt2", "gpt-bigcode", "gptj", "mixtral")
READ_IN_CHAINS = ("bamba", "nemotron-h", "qwen3-next")
# Each of these gave wrong tokens without a word, or crashed.
REFUSED = (
    *("bart", "mbart", "plbart", "marian", "blenderbot", "bigbird-pegasus", "whisper-decoder"),
    *("gpt-neo", "mpt", "bloom", "falcon-alibi", "imagegpt", "git", "openai-gpt", "xlm", "xlnet"),
    *("rwkv", "xlstm", "mamba", "mamba2", "falcon-mamba", "minimax", "jamba", "recurrent-gemma"),
    *("blt", "prophetnet", "trocr", "pegasus", "mvp", "cpmant"),
)
OTHERS = tuple(name for name in TEXTS if name not in (*READ, *READ_IN_CHAINS, *REFUSED))
SHAPES: dict[str, tuple[int, Any]] = {"chain": (1, 4), "tree": (1, WIDE), "ragged": (3, 4)}
Request = dict[str, Tensor]


def is_exact(model: Any, request: Request, shape: Any) -> bool:
    """Whether a drafter that is often right changes nothing; ValueError where it is refused."""
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    rows = expected[:, request["input_ids"].shape[1] :].tolist()
    fast = mmspec.accelerate(model, "coupled", drafter=Oracle(rows, 0.4, tree=shape, seed=1))
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.fallback is None
    return torch.equal(out.sequences, expected)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *[(name, shape) for name in READ for shape in SHAPES],
        *[(name, shape) for name in READ_IN_CHAINS for shape in SHAPES if shape != "tree"],
    ],
)
def test_what_can_be_read_is_read(name: str, shape: str) -> None:
    batch, draft = SHAPES[shape]
    assert is_exact(text(name), prompts(batch), draft)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(name: str, shape: str) -> None:
    model = text(name)
    batch, draft = SHAPES[shape]
    request = prompts(batch)
    drafter = Oracle([[5, 6, 7, 8]] * batch, tree=draft)
    with pytest.raises(
        ValueError, match=type(model).__name__.removesuffix("ForCausalLM")
    ) as caught:
        mmspec.accelerate(model, "coupled", drafter=drafter).generate(**request, max_new_tokens=4)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OTHERS)
def test_any_other_is_exact_or_refused(name: str, shape: str) -> None:
    batch, draft = SHAPES[shape]
    try:
        exact = is_exact(text(name), prompts(batch), draft)
    except ValueError:
        return
    assert exact


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["gpt2", "gptj", "codegen", "gpt-bigcode", "bert"])
def test_token_types_go_on_with_the_last_one(name: str, batch: int) -> None:
    """`generate()` repeats the last type for every new token; these classes add its embedding."""
    model, request = text(name), prompts(batch)
    request["token_type_ids"] = torch.ones_like(request["input_ids"])
    plain = model.generate(**prompts(batch), max_new_tokens=ROOM, do_sample=False)
    with_types = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert not torch.equal(plain, with_types)
    for shape in (4, WIDE):
        assert is_exact(model, request, shape)


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_a_sequence_to_sequence_model_is_refused_for_what_it_lacks(name: str) -> None:
    sizes = {"vocab_size": 96, "d_model": 32, "num_layers": 2, "encoder_layers": 2}
    config = getattr(hf, f"{name}Config")(**sizes, decoder_layers=2, d_ff=48, d_kv=8, num_heads=4)
    model = getattr(hf, f"{name}ForConditionalGeneration")(config)
    with pytest.raises(ValueError, match=rf"{name}For.* takes no decoder_position_ids"):
        mmspec.accelerate(model, "plain")


@pytest.mark.parametrize("family", ["llama", "llava", "idefics3", "smolvlm"])
def test_a_stray_window_masks_as_generate_does(family: str) -> None:
    """Llama's mask knows no window, but the cache that transformers makes of one forgets."""
    model = toys.model(family, sliding_window=toys.WINDOW)
    for shape, (batch, draft) in SHAPES.items():
        assert is_exact(model, toys.inputs(family, batch=batch, ragged=batch > 1), draft), shape


class Counter:
    """Counts forwards of a model's embedding table."""

    def __init__(self, model: Any) -> None:
        self.calls = 0
        model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1


def test_a_model_is_asked_once_and_statistics_do_not_count_it() -> None:
    model, request = toys.model("qwen3"), toys.inputs("qwen3")
    counter, found = Counter(model), []
    for _ in range(3):
        counter.calls = 0
        out = mmspec.decode_plain(model, **request, max_new_tokens=4)
        found.append((counter.calls, out.stats.target_calls))
    assert found == [(8, 3), (4, 3), (4, 3)]


def test_the_check_can_be_left_out() -> None:
    model, request = text("jamba"), prompts(1)
    drafter = Oracle([[5, 6, 7, 8]], tree=3)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    with pytest.raises(ValueError, match=r"JambaForCausalLM scores a chain.*model.generate"):
        fast.generate(**request, max_new_tokens=4)
    assert unchecked(fast).generate(**request, max_new_tokens=4).sequences.shape[1] == 17


def test_the_difference_is_that_of_the_best_scores() -> None:
    """Ids that are ruled out, by whatever number, say nothing."""
    theirs = torch.randn(3, 200)
    theirs[:, 100:] = -1e4
    ours = theirs.clone()
    ours[:, 100:] = -2e4
    assert check.difference(ours, theirs) == 0
    shifted = theirs.roll(1, 0)
    assert check.difference(shifted, theirs) > 0.5
