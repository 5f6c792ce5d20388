"""What went wrong, in one line for users; what is a bug of ours has none."""

from __future__ import annotations

import dis

import torch

NO_MEMORY = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
"""What torch says where a tensor is too large for a CPU's memory."""
LESS_MEMORY = "a smaller model or batch needs less (--hidden-size, --batch-size)"
FEWER_RUNS = "fewer runs at a time need less (--jobs)"


def in_words(error: Exception, less_memory: str = LESS_MEMORY) -> str | None:
    """The line; None: a bug, whose traceback is to be shown. `less_memory`: a way to need less."""
    if isinstance(error, OSError):
        return str(error)
    if not isinstance(error, ValueError | RuntimeError | MemoryError):
        return None
    if _is_out_of_memory(error):
        said = next(iter(str(error).splitlines()), type(error).__name__)
        return f"out of memory ({said}); {less_memory}"
    return str(error) if _is_ours(error) else None


def _is_ours(error: BaseException) -> bool:
    """Whether a `raise` of ours made it, with a message for users; all else is a bug, and shown.

    What C code raises has the frame of ours that called it, but no `raise` there.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    raiser = str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
    operation = trace.tb_frame.f_code.co_code[trace.tb_lasti]
    return raiser == "riglstm" and operation == dis.opmap["RAISE_VARARGS"]


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be had; on a CPU torch has no class of its own for that."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in NO_MEMORY)
