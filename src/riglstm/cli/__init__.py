"""The command line: one file per verb, each a frozen dataclass of flags and a function `run`."""


class UsageError(Exception):
    """What was asked for cannot be done; the message says expected, got and the way out."""
