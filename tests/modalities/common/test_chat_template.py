"""Chat templates: those of models are used as they are, hostile ones end soon in one error."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mmspec.modalities.common import chat_template
from mmspec.modalities.common.chat_template import apply_chat_template

TURN = [{"role": "user", "content": "hello"}]
PLAIN = (
    "{% macro show(role, text) %}**{{ role }}**: {{ text }}{% endmacro %}"
    "{% for one in messages %}{{ show(**{'role': one.role, 'text': one.content * 2}) }}{% endfor %}"
)
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
HOSTILE = {
    "steps": (LOOP + "{% endfor %}" * 3, "runs for more than 0.5 s"),
    "a long string": ("{{ 'a' * 20000000000 }}", "MemoryError"),
    "a wide string": ("{{ 'a'.center(20000000000) }}", "MemoryError"),
    "long output": ("{{ 'a' * 5000 }}", "more than 4096 characters"),
    "a power": ("{{ 9 ** 999999999 }}", "it computes a power"),
    "a power of a name": ("{% set n = 9 %}{{ n**(9**9) }}", "it computes a power"),
    "doubling": (
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}",
        "MemoryError|runs for more",
    ),
    "an escape": ("{{ messages.__class__.__mro__ }}", "SecurityError"),
    "no template": ("{% for %}", "TemplateSyntaxError"),
    "its own refusal": ("{{ raise_exception('no user') }}", "TemplateError: no user"),
}


def processor(template: Any) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"hello": 0}, unk_token="hello"))
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template)


@pytest.mark.parametrize("template", [PLAIN, {"default": PLAIN}], ids=["one", "named"])
def test_a_template_is_used_as_it_is(template: Any) -> None:
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    made = apply_chat_template(processor(template), TURN, **options)
    assert made == processor(template).apply_chat_template(TURN, **options)
    assert made == "**user**: hellohello"
    assert apply_chat_template(processor(template), [TURN, TURN], **options) == [made, made]


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_template_ends_soon(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template, reason = HOSTILE[case]
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(chat_template, "MAX_BYTES", 64 << 20)
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 4096)
    before = resource.getrlimit(resource.RLIMIT_DATA), sys.gettrace()
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"chat template cannot be used.*({reason})"):
        apply_chat_template(processor(template), TURN, tokenize=False)
    assert time.monotonic() - began < 10
    assert (resource.getrlimit(resource.RLIMIT_DATA), sys.gettrace()) == before
