"""Conversations with tools: formatted whole by the chat template, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmspec.modalities.vlm.training_data import LanguageTeacher
from mmspec.training.conversations import read_data_set
from mmspec.training.media import MediaFolders
from tests.toys.folders import text_pair

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
)
TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: "
    "{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }} "
    "{{ c.function.arguments.items() | list }}>{% endfor %}\n{% endfor %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "w7", "arguments": '{"w1": "w2"}'}}
TOOL_ROW: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "w3"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "w9"},
    ],
    "tools": [{"type": "function", "function": {"name": "w7"}}],
}
SCHEMA_ROW = {"prompt": "w3", "tools": [{"type": "function", "function": {"name": "w11"}}]}
SYSTEM_ROW = {"system": "w4", "prompt": "w5"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> LanguageTeacher:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("text")
    text_pair(folder)
    source = folder / "text"
    return LanguageTeacher(str(source), AutoModelForCausalLM.from_pretrained(source))


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        (TOOLS, TOOL_ROW, None),
        (PLAIN, TOOL_ROW, "has calls of tools, which the target's chat template leaves out"),
        (TOOLS.replace("tools", "x"), SCHEMA_ROW, "has schemas of tools, which"),
        (None, TOOL_ROW, "has calls of tools"),
        (PLAIN, SYSTEM_ROW, None),
        (STRICT, SYSTEM_ROW, "cannot be formatted: .*no system"),
    ],
    ids=["tools", "plain", "schemas", "no template", "system", "strict"],
)
def test_what_a_template_leaves_out_is_named(
    teacher: LanguageTeacher, tmp_path: Path, template: str | None, row: Any, reason: str | None
) -> None:
    teacher.processor.chat_template = template
    rows = [{"prompt": "w6"}, row]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    data = read_data_set(tmp_path / "a.jsonl", MediaFolders(tmp_path))
    assert not data.bad
    found = teacher.check(data.questions)
    if reason is None:
        assert found == {}
        if row is TOOL_ROW:
            text = teacher._text(data.questions[-1])
            assert "<w7 [('w1', 'w2')]>" in text
            assert "tool: w9" in text
    else:
        data = data.leave_out(found)
        with pytest.raises(ValueError, match=reason):
            data.check(0)
        assert [one.row for one in data.questions] == [0]
