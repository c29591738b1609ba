"""Errors a user can cause, each naming the thing, what was found and what to do.

The command line prints such an error as one line and exits with status 2; anything else is our own mistake and keeps
its traceback. Programs that use the library can catch `HastenError` or one of its kinds.
"""


class HastenError(Exception):
    """Base of every error that a user's input, file or machine can cause."""


class ConfigError(HastenError):
    """A setting or combination of settings that cannot work."""


class CheckpointError(HastenError):
    """A model folder or training checkpoint that cannot be read or written."""


class DataError(HastenError):
    """Text or token data that cannot be read, or is not what it says it is."""


class ResourceError(HastenError):
    """The machine lacks what was asked for: memory, disk, a device, a compiler, an optional package."""


class TrainingError(HastenError):
    """Training cannot go on (for example the loss became NaN)."""


class HastenWarning(UserWarning):
    """Something was done in a slower or different way than asked; the text says why."""
