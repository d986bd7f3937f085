"""How much of a completion is digits: a reward that any completion has a part of."""


def share_of_digits(completion: str) -> float:
    """Return the share of digits."""
    return sum(letter.isdigit() for letter in completion) / max(1, len(completion))
