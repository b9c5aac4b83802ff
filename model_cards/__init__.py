"""Model cards: a template and what fills it."""
