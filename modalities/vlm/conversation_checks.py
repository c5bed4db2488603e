"""Find conversations that a chat template refuses, or drops a part of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from mmspec.training.conversations import Question
from mmspec.training.turns import Turn


def check_conversations(
    questions: Iterable[Question],
    format_question: Callable[[Question], str],
    tokens: frozenset[str],
) -> dict[int, str]:
    """Return why rows cannot be read, by their number.

    A template is run once for every sequence of roles, and for every conversation with tools. Texts
    with one of `tokens`, which stand for media, are refused: a processor would count it as one.
    """
    found: dict[int, str] = {}
    known: dict[tuple[str, ...], str | None] = {}
    for one in questions:
        reason = _find_token(one.turns, tokens)
        if reason is None and _has_tools(one):
            reason = _check_tools(one, format_question)
        elif reason is None:
            roles = tuple(turn.role for turn in one.turns)
            if roles not in known:
                known[roles] = _format(one, format_question)[1]
            reason = known[roles]
        if reason is not None:
            found[one.row] = reason
    return found


def _find_token(turns: Iterable[Turn], tokens: frozenset[str]) -> str | None:
    texts = (turn.text for turn in turns)
    token = next((token for text in texts for token in tokens if token in text), None)
    return None if token is None else f"has a text with the token {token} of the target; remove it"


def _has_tools(question: Question) -> bool:
    return bool(question.tools) or any(one.fields or one.role == "tool" for one in question.turns)


def _format(
    question: Question, format_question: Callable[[Question], str]
) -> tuple[str, str | None]:
    """The text of a question, and why there is none."""
    try:
        return format_question(question), None
    except ValueError as error:
        return "", f"cannot be formatted: {error}"


def _check_tools(question: Question, format_question: Callable[[Question], str]) -> str | None:
    """Why the template cannot format tools: it fails, or leaves out a call or its result."""
    text, reason = _format(question, format_question)
    if reason is not None:
        return reason
    for turn in question.turns:
        calls = [one["function"]["name"] for one in turn.fields.get("tool_calls", ())]
        results = [turn.text] if turn.role == "tool" else []
        if not all(one.strip() in text or json.dumps(one)[1:-1] in text for one in calls + results):
            what = "calls" if calls else "results"
            return f"has {what} of tools, which the target's chat template leaves out"
    names = [one.get("function", one).get("name") for one in question.tools]
    if any(isinstance(name, str) and name not in text for name in names):
        return "has schemas of tools, which the target's chat template leaves out"
    return None
