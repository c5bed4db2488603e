"""Groups of commands that are also a command themselves."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class RecipeGroup(TyperGroup):
    """What is no command of the group is a recipe, for its command `recipe`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = (*self.commands, *ctx.help_option_names)
        found = args if not args or args[0] in known else ["recipe", *args]
        parsed: list[str] = super().parse_args(ctx, found)
        return parsed
