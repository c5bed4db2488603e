"""One clear error per mistake: what was given, which rule it breaks, what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer

import mmspec
from mmspec.drafters.oracle import Oracle, RandomDrafter
from mmspec.trees import Tree
from mmspec.verifiers.rank_limit import RankLimit
from tests import toys
from tests.toys.texts import text

Call = Callable[[], Any]
Request = dict[str, Tensor]


def fast(family: str = "llama", **parts: Any) -> mmspec.Accelerated:
    return mmspec.accelerate(toys.model(family), **parts)


def generate(
    family: str = "llama", request: dict[str, Any] | None = None, **settings: Any
) -> mmspec.Output:
    request = toys.inputs(family) if request is None else request
    out: mmspec.Output = fast(family).generate(**request, **{"max_new_tokens": 4, **settings})
    return out


def drafted(inputs: Any) -> mmspec.Output:
    """A request with these inputs for the draft model alone."""
    out: mmspec.Output = fast(drafter=small()).generate(
        **toys.inputs("llama"), max_new_tokens=4, drafter_inputs=inputs
    )
    return out


def _save(folder: Any) -> None:
    fast().save_pretrained(folder)


def small() -> Any:
    return toys.model("llama")


def unmarked() -> Request:
    """A picture, but no image token in the prompt."""
    request = toys.inputs("llava")
    words = request["input_ids"].clone()
    words[words == toys.IMAGE] = 7
    return {**request, "input_ids": words}


def without_picture() -> Request:
    request = toys.inputs("llava")
    return {name: value for name, value in request.items() if name != "pixel_values"}


def padded_right() -> Request:
    request = toys.inputs("llama", batch=2)
    mask = request["attention_mask"].clone()
    mask[0, -3:] = 0
    return {**request, "attention_mask": mask}


def picture_for_text() -> Request:
    return {**toys.inputs("llama"), "pixel_values": torch.randn(1, 3, 16, 16)}


def empty() -> Request:
    nothing = torch.zeros(1, 0, dtype=torch.int64)
    return {"input_ids": nothing, "attention_mask": nothing}


def padded_by_another_token() -> Request:
    """Padding that only this call says is padding, and no mask."""
    ids = toys.inputs("llama", batch=2, ragged=True)["input_ids"]
    return {"input_ids": ids.masked_fill(ids == toys.PAD, 141)}


def changed(**tensors: Any) -> dict[str, Any]:
    """A sound request with other tensors."""
    return {**toys.inputs("llama"), **tensors}


NAMELESS: Any = {"": 1}

AT_CONSTRUCTION: dict[str, tuple[Call, list[str]]] = {
    "another vocabulary": (
        lambda: fast(drafter=toys.model("llama", vocab_size=1024)),
        ["1024", "160", "tokenizer"],
    ),
    "unknown recipe": (
        lambda: fast(recipe="prompt-lokup"),
        ["'prompt-lokup'", "did you mean 'prompt-lookup'?"],
    ),
    "a draft model in place of the recipe": (
        lambda: fast(recipe=small()),
        ["recipe=LlamaForCausalLM", "neither a name nor a Recipe", "a draft model as drafter="],
    ),
    "a rule in place of a verifier": (
        lambda: fast(recipe="prompt-lookup", verifier=RankLimit(2)),
        ["RankLimit", "is not a verifier", "recursive.Recursive(rule)"],
    ),
    "the class of a drafter": (
        lambda: fast(drafter=RandomDrafter),
        ["the class RandomDrafter", "an object of it"],
    ),
    "a draft length for a drafter that has its own": (
        lambda: fast(drafter=RandomDrafter(tree=2), length=3),
        ["length=", "RandomDrafter", "drop it"],
    ),
    "the processor's output in one piece": (
        lambda: fast(recipe="prompt-lookup").generate(toys.inputs("llama"), max_new_tokens=4),
        ["input_ids is a dict", "generate(**inputs)"],
    ),
    "unknown keyword": (
        lambda: fast(recipe="prompt-lookup", longst=4),
        ["longst", "did you mean 'longest'", "accelerate()"],
    ),
    "keyword of another recipe": (
        lambda: fast(recipe="coupled", drafter=small(), longest=4),
        ["longest", "accelerate()", "known:"],
    ),
    "unknown verifier": (
        lambda: fast(recipe="prompt-lookup", verifier="exakt"),
        ["'exakt'", "exact", "mmspec.verifiers.names()"],
    ),
    "verifier biased for the proposals": (
        lambda: fast(recipe="prompt-lookup", verifier="greedy-multi-draft"),
        ["GreedyMultiDraft", "PromptLookup", "DET", "another verifier"],
    ),
    "tree for a verifier of chains": (
        lambda: fast(recipe="block", drafter=small(), tree=[2, 2]),
        ["Block", "verifies chains", "length="],
    ),
    "tree on a recurrent model": (
        lambda: mmspec.accelerate(text("recurrent-gemma"), drafter=text("granite"), tree=[2, 2]),
        ["RecurrentGemmaForCausalLM", "recurrent state", "length="],
    ),
    "tree of a model-free recipe on a recurrent model": (
        lambda: mmspec.accelerate(text("recurrent-gemma"), recipe="token-recycling"),
        ["RecurrentGemmaForCausalLM", "recurrent state"],
    ),
    "tree grown by a recurrent draft model": (
        lambda: fast("llama", drafter=toys.model("lfm2"), tree=[2, 2]),
        ["Lfm2ForCausalLM", "recurrent", "length="],
    ),
    "missing drafter": (
        lambda: fast(recipe="coupled"),
        ["'coupled'", "needs a draft model", "drafter="],
    ),
    "drafter nobody asked for": (
        lambda: fast(recipe="prompt-lookup", drafter=small()),
        ["'prompt-lookup'", "takes no draft model", "drop drafter="],
    ),
    "neither a model nor a drafter": (
        lambda: fast(drafter={"name": "small"}),
        ["needs a draft model", "drafter= is a dict", "inherits mmspec.draft.Drafter"],
    ),
    "pixels for a text drafter": (
        lambda: fast("llava", drafter=small(), sees="pixels"),
        ["sees='pixels'", "LlamaForCausalLM", "sees='nothing'"],
    ),
    "unknown sight": (
        lambda: fast("llava", drafter=small(), sees="sounds"),
        ["'sounds'", "pixels", "nothing"],
    ),
    "tree and length": (
        lambda: fast(drafter=small(), tree=[2], length=3),
        ["tree=", "length=", "give one of them"],
    ),
    "no topology": (lambda: fast(drafter=small(), tree="wide"), ["'wide'", "[3, 2, 1]", "dynamic"]),
    "no draft length": (
        lambda: fast(drafter=small(), length="long"),
        ["'long'", "'auto'"],
    ),
    "negative draft length": (lambda: fast(drafter=small(), length=-1), ["-1", "0 or more"]),
    "tree for copies": (
        lambda: fast(recipe="prompt-lookup", tree=[2, 2]),
        ["chains", "length= instead of tree="],
    ),
    "chain for token recycling": (
        lambda: fast(recipe="token-recycling", length=4),
        ["static tree", "tree="],
    ),
    "option of another kind": (
        lambda: fast(recipe="prompt-lookup", longest="many"),
        ["longest='many'", "whole number"],
    ),
    "option that is a tensor": (
        lambda: fast(recipe="gsd", gap=torch.zeros(0)),
        ["gap=", "must be a number"],
    ),
    "tensor in the place of a name": (
        lambda: fast(recipe="sjd", initial=torch.zeros(0)),
        ["initial=", "such as 'random'"],
    ),
    "option below nought": (lambda: fast(recipe="gsd", gap=-0.5), ["gap=-0.5", "at least 0"]),
    "object in the place of a name": (
        lambda: fast(recipe="sjd", initial=b"x"),
        ["initial=b'x'", "such as 'random'"],
    ),
    "widths of a tree that are none": (
        lambda: fast(drafter=small(), tree=[2, -1]),
        ["tree=[2, -1]", "[3, 2, 1]"],
    ),
    "sight that is not a string": (
        lambda: fast("llava", drafter=small(), sees={}),
        ["sees={}", "view"],
    ),
    "sight of a recipe without draft model": (
        lambda: fast("llava", recipe="suffix", sees="pixels"),
        ["'suffix'", "drop sees="],
    ),
    "sight without a name": (
        lambda: fast("llava", drafter=small(), sees=""),
        ["sees='' does not fit", "drop sees="],
    ),
    "check that is neither": (lambda: fast(check=""), ["check=''", "True nor False"]),
    **{
        f"keys and values of {given!r}": (
            partial(fast, recipe="std", kv=given),
            [f"kv={given!r}", "choose one of same"],
        )
        for given in ["", [], 0, False]
    },
    "draft length of another library": (
        lambda: fast(recipe="prompt-lookup", num_speculative_tokens=4),
        ["num_speculative_tokens", "did you mean 'length'"],
    ),
    "draft model of another library": (
        lambda: fast(assistant_model=small()),
        ["assistant_model", "did you mean 'drafter'"],
    ),
    "compressor that compresses nothing": (
        lambda: fast("llava", drafter=small(), compressor=True),
        ["compressor=True", "mmspec.compressors"],
    ),
    "layers that are none": (
        lambda: fast(recipe="draft-verify", skip=7),
        ["skip=7", "0 to 1"],
    ),
    "recipe that is not a name": (lambda: fast(recipe=5), ["recipe=5", "mmspec.recipes.names()"]),
    "model without a head": (
        lambda: mmspec.accelerate(toys.model("llava").model),
        ["LlavaModel", "no output head", "AutoModelForImageTextToText"],
    ),
    "draft model without a head": (
        lambda: fast(drafter=toys.model("llama").model),
        ["LlamaModel", "no output head", "AutoModelForCausalLM"],
    ),
    "model in a wrapper": (
        lambda: mmspec.accelerate(torch.nn.DataParallel(toys.model("llama"))),
        ["DataParallel is a wrapper", "give the model that it holds: model.module"],
    ),
    "a draft model in a wrapper": (
        lambda: fast(drafter=torch.nn.DataParallel(small())),
        ["DataParallel is a wrapper", "give the model that it holds: model.module"],
    ),
    "a draft model in an adapter": (
        lambda: fast(drafter=Adapted(small())),
        ["Adapted is a wrapper", "give the model that it holds: model.base_model.model"],
    ),
    "modality that there is not": (
        lambda: fast(modality="music"),
        ["'music'", "choose one of", "vlm"],
    ),
    "folder that is not there": (
        lambda: mmspec.accelerate("./nowhere"),
        ["./nowhere", "give a folder, a hub name or zoo:NAME"],
    ),
    "file in the place of a folder": (
        lambda: mmspec.accelerate(__file__, modality="vlm"),
        [__file__, "is a file", "give the folder"],
    ),
    **{
        f"saved to {given!r}": (
            partial(_save, given),
            [f"folder={given!r} must be a path"],
        )
        for given in ["", 1.5, None]
    },
    "saved model that is none": (lambda: mmspec.load("tests"), ["tests", "save_pretrained wrote"]),
    "attention without a tree mask": (
        lambda: _with_kernel("flash_attention_2"),
        ["'sdpa'", "flash"],
    ),
    "attention over pages": (lambda: _with_kernel("paged|eager"), ["'sdpa'", "paged"]),
}


def _with_kernel(kernel: str) -> Any:
    """As if loaded with that kernel, which may not be installed here."""
    model = toys.model("llama")
    model.config._attn_implementation_internal = kernel
    return mmspec.accelerate(model, "prompt-lookup")


AT_THE_CALL: dict[str, tuple[Call, list[str]]] = {
    "picture for a text model": (
        lambda: generate(request=picture_for_text()),
        ["pixel_values", "LlamaForCausalLM", "text model"],
    ),
    "picture without image token": (
        lambda: generate("llava", unmarked()),
        ["image was given", "no image token", "processor"],
    ),
    "image token without picture": (
        lambda: generate("llava", without_picture()),
        ["image tokens", "no image was given", "images="],
    ),
    "unknown keyword": (
        lambda: generate(temprature=0.5),
        ["temprature", "did you mean temperature"],
    ),
    "beams": (lambda: generate(num_beams=2), ["num_beams=2", "num_beams=1"]),
    "several answers": (
        lambda: generate(num_return_sequences=2, do_sample=True),
        ["num_return_sequences=2", "repeat the inputs"],
    ),
    "empty prompt": (lambda: generate(request=empty()), ["prompt is empty", "at least one token"]),
    "no prompt, and nothing to begin with": (
        lambda: fast().generate(max_new_tokens=4, bos_token_id=None),
        ["bos_token_id", "input_ids", "check these"],
    ),
    "hook that is called": (
        lambda: fast()("hello"),
        ["custom_generate hook", "call generate(**inputs)"],
    ),
    "mask without a prompt": (
        lambda: fast().generate(attention_mask=torch.ones(1, 7).long(), max_new_tokens=2),
        ["attention_mask (1, 7)", "give input_ids"],
    ),
    "hook without a prompt": (lambda: fast()(small()), ["custom_generate hook"]),
    "sparse picture": (
        lambda: generate(
            "llava",
            {
                **toys.inputs("llava"),
                "pixel_values": toys.inputs("llava")["pixel_values"].to_sparse(),
            },
        ),
        ["pixel_values is torch.sparse_coo", "pixel_values.to_dense()"],
    ),
    "nested picture": (
        lambda: generate(
            "llava",
            {
                **toys.inputs("llava"),
                "pixel_values": torch.nested.nested_tensor(list(torch.rand(1, 3, 16, 16))),
            },
        ),
        ["pixel_values is nested", "give a plain tensor"],
    ),
    "no room": (lambda: generate(max_new_tokens=0), ["max_new_tokens=0", "at least 1"]),
    "negative temperature": (
        lambda: generate(temperature=-1.0),
        ["temperature=-1.0", "give 0 for greedy decoding"],
    ),
    "temperature that is a flag": (
        lambda: generate(temperature=False),
        ["temperature=False", "must be a number"],
    ),
    **{
        f"a configuration with {name}={value!r}": (
            partial(generate, generation_config=GenerationConfig(**{name: value})),
            [f"{name}={value!r}"],
        )
        for name, value in {
            **{"max_time": "x", "repetition_penalty": -1, "top_k": "x", "output_scores": 2},
            "temperature": "x",
        }.items()
    },
    "first token that is none": (lambda: fast().generate(bos_token_id="x"), ["bos_token_id='x'"]),
    "time without length": (lambda: generate(max_time=0), ["max_time=0", "above 0", "seconds"]),
    "n-gram without bound": (
        lambda: generate(encoder_no_repeat_ngram_size=10**20),
        ["encoder_no_repeat_ngram_size=10", "at most"],
    ),
    "flag that is a tensor": (
        lambda: generate(use_mtp=torch.zeros(0)),
        ["use_mtp=float32 (0,)", "not supported"],
    ),
    "share outside of its range": (
        lambda: generate(top_h="x"),
        ["top_h='x'", "at least 0 and at most 1"],
    ),
    "number in the place of a flag": (
        lambda: generate(remove_invalid_values=1.5),
        ["remove_invalid_values=1.5", "True nor False"],
    ),
    "name of another library": (
        lambda: generate(max_tokens=4),
        ["max_tokens", "did you mean max_new_tokens"],
    ),
    "draft length in the call": (
        lambda: generate(num_speculative_tokens=4),
        ["num_speculative_tokens", "accelerate(model, drafter=..., length=...)"],
    ),
    "callback of another library": (
        lambda: generate(callback_on_step_end=print),
        ["callback_on_step_end", "on_round="],
    ),
    "row ids in bytes": (lambda: generate(row_ids=b"x"), ["row_ids=b'x'", "one per row"]),
    "inputs of no draft model": (
        lambda: generate(drafter_inputs=toys.inputs("llama")),
        ["drafter_inputs has input_ids", "PromptLookup reads no prompt", "drop"],
    ),
    "inputs that no draft model takes": (
        lambda: drafted({"nope": 1}),
        ["unknown keyword nope for drafter_inputs", "known: "],
    ),
    "inputs of a draft model that are none": (
        lambda: drafted({"input_ids": 5}),
        ["drafter_inputs: input_ids is a int", 'return_tensors="pt"'],
    ),
    "inputs of a draft model in a list": (
        lambda: drafted([]),
        ["drafter_inputs=[]", "not a mapping", "by name"],
    ),
    "rows of a draft model": (
        lambda: drafted(toys.inputs("llama", batch=2)),
        ["drafter_inputs: input_ids has 2 rows for 1 requests"],
    ),
    "padding on the right": (
        lambda: generate(request=padded_right()),
        ["attention_mask", "left", "padding_side = 'left')"],
    ),
    "padding of this call only, without a mask": (
        lambda: generate(request=padded_by_another_token(), pad_token_id=141),
        ["pad_token_id=141", "the model's own (0)", "attention_mask"],
    ),
    "an assistant": (
        lambda: generate(assistant_model=small()),
        ["assistant_model", "accelerate(model, drafter=...)"],
    ),
    "guidance": (lambda: generate(guidance_scale=2.0), ["guidance_scale=2.0", "doubled batch"]),
    "ids beyond the vocabulary": (
        lambda: generate(request=changed(input_ids=toys.inputs("llama")["input_ids"] + 10**6)),
        ["input_ids hold 100", "160 tokens", "processor"],
    ),
    "ids that are not whole numbers": (
        lambda: generate(request=changed(input_ids=torch.rand(1, 4))),
        ["input_ids are torch.float32", "torch.int64"],
    ),
    "picture without rows": (
        lambda: generate("llava", {**toys.inputs("llava"), "pixel_values": torch.tensor(1.0)}),
        ["pixel_values has no rows"],
    ),
    "encoded pictures that are none": (
        lambda: generate("llava", {**toys.inputs("llava"), "mm_encoder_outputs": torch.ones(3)}),
        ["mm_encoder_outputs=float32 (3,)"],
    ),
    "ids without rows": (
        lambda: generate(request=changed(input_ids=torch.ones(4).long())),
        ["input_ids", "(4,)", "(rows, tokens)"],
    ),
    "ids as a list": (
        lambda: generate(request=changed(input_ids=[[1, 2, 3]])),
        ["input_ids is a list", 'return_tensors="pt"'],
    ),
    "mask of another length": (
        lambda: generate(request=changed(attention_mask=torch.ones(1, 3).long())),
        ["attention_mask has shape (1, 3)", "the same text"],
    ),
    "mask of other numbers": (
        lambda: generate(
            request=changed(attention_mask=2 * toys.inputs("llama")["attention_mask"])
        ),
        ["attention_mask holds 2", "0 for padding"],
    ),
    "film for a model of pictures": (
        lambda: generate(
            "llava", {**toys.inputs("llava"), "pixel_values_videos": torch.rand(1, 3, 16, 16)}
        ),
        ["pixel_values_videos", "forward() of LlavaForConditionalGeneration", "drop it"],
    ),
    "picture that must be a number": (
        lambda: generate(
            "llava", {**toys.inputs("llava"), "pixel_values": torch.full((1, 3, 16, 16), torch.nan)}
        ),
        ["pixel_values holds NaN", "processor"],
    ),
    "picture of a wrong shape": (
        lambda: generate("llava", {**toys.inputs("llava"), "pixel_values": torch.rand(3, 16)}),
        ["LlavaForConditionalGeneration", "pixel_values=float32 (3, 16)", "processor"],
    ),
    "nothing to listen to": (
        lambda: generate("whisper", {}),
        ["there is no audio", "input_features"],
    ),
    "seed that must be a number": (lambda: generate(seed=1.5), ["seed=1.5", "whole number"]),
    "row ids that are no list": (lambda: generate(row_ids=7), ["row_ids=7", "one per row"]),
    "watcher that cannot be called": (lambda: generate(on_round=5), ["on_round=5", "function"]),
    "temperature without bound": (
        lambda: generate(temperature=1e300),
        ["temperature=1e+300", "at most"],
    ),
    "setting that must be a number": (
        lambda: generate(top_p="x"),
        ["top_p='x'", "must be a number"],
    ),
    "setting that is not a truth": (
        lambda: generate(do_sample="yes"),
        ["do_sample='yes'", "True nor False"],
    ),
    "ids of a setting that are none": (
        lambda: generate(eos_token_id="x"),
        ["eos_token_id='x'", "whole number"],
    ),
    "list of a setting that is none": (
        lambda: generate(bad_words_ids=5),
        ["bad_words_ids=5", "not a list"],
    ),
    "processors that are none": (
        lambda: generate(logits_processor=5),
        ["logits_processor=5", "list of functions"],
    ),
    "configuration that is none": (
        lambda: generate(generation_config=5),
        ["generation_config=5", "GenerationConfig"],
    ),
    "streamer that is none": (lambda: generate(streamer=5), ["streamer=5", "put() or end()"]),
    "setting without a name": (lambda: generate(**NAMELESS), ["''", "known:"]),
    "row ids": (lambda: generate(row_ids=[1, 2]), ["row_ids", "2 entries for 1 rows"]),
    "stop strings without a tokenizer": (lambda: generate(stop_strings=["."]), ["tokenizer"]),
}


@pytest.mark.parametrize("mistake", AT_CONSTRUCTION)
def test_a_mistake_is_said_at_construction(mistake: str) -> None:
    call, words = AT_CONSTRUCTION[mistake]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert_says(caught.value, words)


@pytest.mark.parametrize("mistake", AT_THE_CALL)
def test_a_mistake_is_said_before_anything_runs(mistake: str) -> None:
    call, words = AT_THE_CALL[mistake]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert_says(caught.value, words)


def assert_says(error: BaseException, words: list[str]) -> None:
    message = str(error)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    assert "\n" not in message.strip()


@pytest.mark.parametrize(
    "setting", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}]
)
def test_the_hook_refuses_what_generate_refuses(setting: dict[str, Any]) -> None:
    """`custom_generate` must not answer a beam search with something else in silence."""
    model = small()
    fast = mmspec.accelerate(model, "prompt-lookup")
    request = toys.inputs("llama")
    with pytest.raises(ValueError, match=next(iter(setting))):
        model.generate(**request, max_new_tokens=4, custom_generate=fast, **setting)


def test_padding_on_the_right_does_not_blame_the_class() -> None:
    with pytest.raises(ValueError, match="pad on the left") as caught:
        generate(request=padded_right())
    assert "LlamaForCausalLM" not in str(caught.value)


@pytest.mark.parametrize("names", ["args", "others"])
def test_a_forward_may_take_anything(names: str) -> None:
    kind: Any = type(toys.model("llama"))

    class Wrapped(kind):  # type: ignore[misc]
        if names == "args":

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return super().forward(*args, **kwargs)
        else:

            def forward(self, input_ids: Any = None, *others: Any, **more: Any) -> Any:
                return super().forward(input_ids, *others, **more)

    model, request = copy.copy(toys.model("llama")), toys.inputs("llama")
    expected = model.generate(**request, max_new_tokens=8, do_sample=False)
    model.__class__ = Wrapped
    out = mmspec.accelerate(model, "prompt-lookup").generate(**request, max_new_tokens=8)
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize("family", ["llama", "llava", "qwen2_5_vl"])
def test_a_request_without_a_prompt_begins_as_in_generate(family: str) -> None:
    model, how = toys.model(family), {"max_new_tokens": 6, "do_sample": False, "bos_token_id": 3}
    expected = model.generate(**how)
    fast = mmspec.accelerate(model, "prompt-lookup")
    assert torch.equal(fast.generate(**how).sequences, expected)
    assert torch.equal(model.generate(**how, custom_generate=fast), expected)
    assert sum(len(turn.tokens[0]) for turn in fast.stream(**how)) == expected.shape[1] - 1


def test_none_for_pixels_is_a_request_without_pixels() -> None:
    """`generate()` of LLaVA ends in an AttributeError there; the forward takes None."""
    text = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "max_new_tokens": 6, "do_sample": False}
    model = toys.model("llava")
    out = mmspec.accelerate(model, "prompt-lookup").generate(**text, pixel_values=None)
    assert torch.equal(out.sequences, model.generate(**text))


def trees() -> list[Any]:
    return [
        RandomDrafter(tree=Tree.branching([2, 2])),
        Oracle([[5, 6, 7, 8]], tree=Tree.branching([2, 2])),
    ]


@pytest.mark.parametrize("drafter", trees(), ids=lambda drafter: type(drafter).__name__)
def test_a_tree_of_a_ready_made_drafter_is_refused_where_nothing_branches(drafter: Any) -> None:
    with pytest.raises(ValueError, match="recurrent state"):
        mmspec.accelerate(text("recurrent-gemma"), "coupled", drafter=drafter)
    with pytest.raises(ValueError, match="verifies chains"):
        mmspec.accelerate(small(), "block", drafter=drafter)


@pytest.mark.parametrize("suffix", [".bin", ".pt"])
def test_a_pickled_checkpoint_is_not_opened(tmp_path: Path, suffix: str) -> None:
    model = small()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / f"pytorch_model{suffix}")
    with pytest.raises(ValueError, match=r"pickled weights.*unpickling runs code.*safetensors"):
        mmspec.accelerate(model, "coupled", drafter=tmp_path)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a model folder: it has no config.json"):
        mmspec.accelerate(small(), "coupled", drafter=str(tmp_path))


class Adapted(torch.nn.Module):
    """As an adapter of peft: it answers by what it holds, and names fewer arguments."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = torch.nn.Module()
        self.base_model.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model.model, name)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        held: Any = self.base_model.model
        return held(input_ids, attention_mask, **more)


class OpaqueLayer(DynamicLayer):
    """A layer that holds what nobody can copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handle = object()


def test_a_model_whose_cache_cannot_be_copied_is_refused_at_construction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", OpaqueLayer)
    with pytest.raises(
        ValueError, match=r"layer 0 of LlamaConfig cannot be rolled back: OpaqueLayer.handle is"
    ):
        mmspec.accelerate(small(), "prompt-lookup")


def test_a_family_on_no_list_is_read_by_what_the_model_tells() -> None:
    model, request = toys.model("qwen2_5_vl"), toys.inputs("qwen2_5_vl")
    expected = model.generate(**request, max_new_tokens=12, do_sample=False)
    model.config.model_type = "qwen_of_tomorrow"
    fast = mmspec.accelerate(model, "prompt-lookup")
    assert fast.session.bound.backbone.family.name == "qwen_of_tomorrow"
    out = fast.generate(**request, max_new_tokens=12, do_sample=False)
    assert torch.equal(out.sequences, expected)
    blind = {"input_ids": request["input_ids"]}
    with pytest.raises(ValueError, match="image tokens, but no image was given"):
        fast.generate(**blind, max_new_tokens=12)


def test_only_named_recipes_are_saved(tmp_path: Path) -> None:
    recipe = mmspec.Recipe(
        mmspec.recipes.get("plain").architecture,
        mmspec.recipes.get("plain").execution,
        mmspec.recipes.get("plain").verifier,
    )
    with pytest.raises(ValueError, match="made by hand"):
        mmspec.accelerate(small(), recipe).save_pretrained(tmp_path)
    made = mmspec.accelerate(small(), "coupled", drafter=RandomDrafter())
    with pytest.raises(ValueError, match="RandomDrafter was made by hand"):
        made.save_pretrained(tmp_path)


def hooked(request: dict[str, Any]) -> Any:
    model = toys.model("llava")
    return model.generate(
        **request, max_new_tokens=2, do_sample=False, custom_generate=mmspec.accelerate(model)
    )


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda r: {"attention_mask": 2 * r["attention_mask"]}, "attention_mask holds 2; give 1"),
        (lambda r: {"attention_mask": r["attention_mask"] * 0.5}, r"attention_mask holds 0\.5"),
        (lambda r: {"attention_mask": r["attention_mask"][:, 1:]}, "attention_mask has shape"),
        (lambda r: {"pixel_values_videos": r["pixel_values"][None]}, "pixel_values_videos was gi"),
        (lambda r: {"pixel_values": r["pixel_values"][0]}, r"cannot take this request.*check"),
    ],
)
def test_the_hook_refuses_the_inputs_that_generate_refuses(
    harm: Callable[[Request], Request], message: str
) -> None:
    request = toys.inputs("llava")
    with pytest.raises(ValueError, match=message):
        hooked({**request, **harm(request)})
