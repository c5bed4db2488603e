"""Drafts copied from what was said."""
