"""What commands and groups of them do that typer's own do not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import typer
from typer.core import TyperGroup


class RecipeGroup(TyperGroup):
    """What is no command of the group is a recipe, for its command `recipe`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = (*self.commands, *ctx.help_option_names)
        found = args if not args or args[0] in known else ["recipe", *args]
        parsed: list[str] = super().parse_args(ctx, found)
        return parsed


ASKED = ("prompt", "image", "video", "audio")  # what is asked; of a setting the last word counts


def once(command: Any) -> None:
    """Let a command, and all below it, refuse a question that is said twice and can be put once.

    The parser would take the last and lose the others without a word.
    """
    making = command.make_parser

    def make(context: Any) -> Any:
        parser = making(context)
        parsing = parser.parse_args

        def parse(args: list[str]) -> Any:
            found = parsing(args)
            for one, count in Counter(found[-1]).items():
                if count > 1 and one.name in ASKED and not one.multiple:
                    raise typer.BadParameter(
                        f"{one.opts[0]} is given {count} times and takes one value; give it once",
                        ctx=context,
                    )
            return found

        parser.parse_args = parse
        return parser

    command.make_parser = make
    for one in getattr(command, "commands", {}).values():
        once(one)
