"""The contents of rows: conversations, prompts and completions, preference pairs, images, videos."""
