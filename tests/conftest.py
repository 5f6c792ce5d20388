"""Every test runs the same way every time, and buffers that nobody wrote to are seen."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings

# Triton reads it when it is first imported, and any test may be the one whose imports do that.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A shell silences Ctrl-C for what it starts in the background, and tests are about Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("house", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("house")

# Tests that take long alone, whole files of them so that no module's fixtures are made twice.
FIRST = ("test_triton_compiles", "test_install")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first: at the end, one worker would run them and the others wait."""
    assert all(Path(__file__).with_name(f"{name}.py").exists() for name in FIRST)
    items.sort(key=lambda item: item.path.stem not in FIRST)


@pytest.fixture(scope="session", autouse=True)
def _interpreter_does_nothing_twice() -> Iterator[None]:
    """Triton's interpreter looks for what to replace in its language once for each launch.

    Left alone it looks again at each call inside a kernel, finds nothing left to replace, and
    takes a fifth of the time of all that it runs. And it computes every sum of whole numbers again
    to see whether it overflows: half of the time, for an answer that only a debugger gets.
    """
    if "TRITON_INTERPRET" not in os.environ or find_spec("triton") is None:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    replace = getattr(interpreter, "_patch_lang", None)
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)

    def where_it_is_not(kernel: FunctionType) -> Any:
        seen = (v for v in kernel.__globals__.values() if v is tl or v is tl.core)
        if any(tl.core.is_builtin(v.load) for v in seen):
            return replace(kernel)
        # A launch puts back what it is given here: nothing, where nothing was replaced.
        return SimpleNamespace(restore=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        # Another Triton may do this elsewhere; then it is only slower.
        if replace is not None:
            patch.setattr(interpreter, "_patch_lang", where_it_is_not)
        if hasattr(options, "sanitize_overflow"):
            patch.setattr(builder, "options", dataclasses.replace(options, sanitize_overflow=False))
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _onednn() -> Iterator[None]:
    """torch switches oneDNN off for good where it cannot do a product in bfloat16."""
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.set_flags(before, None, None, None)


@pytest.fixture(scope="module")
def nan_filled_empty() -> Iterator[None]:
    """`torch.empty` and its kin give NaN (True, or the largest integer), not old memory."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """As `nan_filled_empty`, on a GPU, where some operations can only warn that they vary."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the kernels are made anew for each call."""
    from riglstm.scan.triton import backward, forward

    monkeypatch.setattr(forward, "plan_forward", forward.plan_forward.__wrapped__)
    monkeypatch.setattr(backward, "plan_backward", backward.plan_backward.__wrapped__)


@pytest.fixture
def precision_as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def tf32(precision_as_before: None) -> None:
    """Products of float32 may round."""
    torch.set_float32_matmul_precision("high")
