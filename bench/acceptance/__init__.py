"""Does acceptance grow? A target trained here, answers of its own, a drafter trained on them, held-out
prompts. No network."""
