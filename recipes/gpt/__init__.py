"""A GPT that a newcomer reads top to bottom: options, model, training module."""
