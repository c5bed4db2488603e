"""Where drafts come from, one source per file."""
