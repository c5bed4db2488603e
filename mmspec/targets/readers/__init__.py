"""How a model of transformers is read: prompts, blocks of draft tokens, features for drafters."""
