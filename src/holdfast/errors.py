"""Every error a user can meet, as one tree.

    HoldfastError            exit code 1
    |- UserError             exit code 2: what was asked for cannot work; nothing was changed
    |  |- ConfigError        a key, a value, or a combination of values in the configuration
    |  |- DataError          a file, a row or a column
    |  |- ModelError         a model directory, a tokenizer, a parameter
    |  `- PlanError          a way of sharding that cannot work
    |- RunStopped            exit code 3: the run stopped and can be started again
    `- RankFailed            exit code 3: a rank died; its first cause travels with the error

A message is one paragraph: what happened with its values, where, and what to do. It can be printed and written
anywhere, because `str` of an error escapes whatever it quotes of a user's text. Errors stay picklable, since ranks send
them to each other so that all ranks raise the same one.
"""

from __future__ import annotations

from holdfast.text.escaping import escaped_paragraph


class HoldfastError(Exception):
    """The root of all errors of Holdfast; `str(error)` is the paragraph that a user reads."""

    exit_code = 1

    def __str__(self) -> str:
        """Return the paragraph; what it cites of foreign text is escaped, so that it can be printed anywhere."""
        # Exceptions are made in many places and shown in one: escaping here cannot be forgotten by whoever
        # raises.
        return escaped_paragraph(super().__str__())


class UserError(HoldfastError):
    """A request that cannot work; it is raised before anything is changed."""

    exit_code = 2


class ConfigError(UserError):
    """A key, a value or a combination of values of the configuration that cannot work."""


class DataError(UserError):
    """A file of data, a row or a column that is missing or malformed."""


class ModelError(UserError):
    """A model directory, a tokenizer or a parameter that is missing or does not fit."""


class PlanError(UserError):
    """A sharding plan that cannot work; the message names the parameters."""


class RunStopped(HoldfastError):
    """A run that stopped before its end; the same command or call continues it."""

    exit_code = 3


class RankFailed(HoldfastError):
    """A failure of another rank; the message names the rank, its phase and the first cause."""

    exit_code = 3


def how_to_go_on(step: int | None) -> str:
    """Return the sentence that tells a user how to continue a run that broke off.

    Args:
        step: Number of updates that the run had made; None if it failed before training began.
    """
    if not step:  # the cause lies in what was read or built, as a rule, and will be there again
        return "It made no step: once the cause is mended, the same command starts the run."
    return "The same command starts the run again, from its newest verified checkpoint."
