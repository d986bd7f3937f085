"""A reward that depends on what was sampled alone."""


def digits(completion: str) -> float:
    """Return the share of digits."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))
