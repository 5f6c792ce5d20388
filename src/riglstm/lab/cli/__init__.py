"""The command line: one file per verb, each with frozen dataclasses of flags and a `main`."""


class UsageError(Exception):
    """What was asked for cannot be done; the message says expected, got and the way out."""
