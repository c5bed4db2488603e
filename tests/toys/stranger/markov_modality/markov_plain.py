"""A chain walks by itself, one state a call; exact."""

from dataclasses import replace

from mmspec.recipes.plain import RECIPE as PLAIN

RECIPE = replace(PLAIN, decodes="states")
