"""The `triton` kernels are compiled for GPUs that are not here, by Triton's own compiler.

What the interpreter runs may still be refused by the compiler: a name that holds two shapes, say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("riglstm.scan.triton_common", reason="the kernels are not in this copy")

CODE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from riglstm.scan.triton_backward import backward_kernel
from riglstm.scan.triton_forward import forward_kernel
from riglstm.scan.triton_products import hold_kernel, inputs_kernel, pack_kernel, views_kernel

INTEGERS = {"ACT", "BITS", "LIST", "COUNT", "COUNTER"}
SIZES = {"N": 2, "K": 2, "d": 20, "P": 24, "L": 104, "G": 5, "S": 4, "SCALE": 1.0, "WIDE": False}
CHOICE = {"K_a": 1, "K_x": 1, "K_h": 0, "X_ROW": 40, "X_SLOT": 20}
FEW = {"BM": 64, "BN": 32, "BK": 32, "BP": 32, "RB": 1, "LINES": 8, "STAGES": 3, "COMPACT": False}
MANY = {**FEW, "BM": 128, "BN": 128, "RB": 4, "LINES": 2, "COMPACT": True}


def built(kernel, held, product, chip, **constants):
    constants = {n: v for n, v in {**SIZES, **constants}.items() if n in kernel.arg_names}
    kinds = {"B": "i32", "T": "i32", "R": "i32", "first": "i32", "t0": "i32", "t1": "i32",
             "WOKE": "*i1", "XH": "*" + held, "D5": "*" + product, "GATES": "*" + product,
             "H": "*" + product, "DV": "*" + product}
    signature, values, attrs = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
            continue
        other = "*i32" if name in INTEGERS else "*fp32"
        if name == "W" and kernel is not pack_kernel:
            other = "*" + (held if kernel is forward_kernel else product)
        signature[name] = kinds.get(name, other)
        if signature[name][0] == "*":
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attrs)
    options = {"num_warps": 8}
    return compile(source, target=GPUTarget("cuda", chip, 32), options=options).metadata.shared


chip = int(sys.argv[1])
none = {"LIVE": None, "RESET": None}
bf16, tf32 = ("bf16", "bf16", chip), ("fp16", "fp32", chip)
plain = {"X_UNIT": None, "W_UNIT": None}
done = {
    "few": built(forward_kernel, *tf32, **CHOICE, **FEW, SAVE=True, PHASE=15, PRECISION="ieee"),
    "many": built(
        forward_kernel, *bf16, **CHOICE, **MANY, **plain, **none, SAVE=True, PHASE=15,
        PRECISION="ieee",
    ),
    "back, few": built(backward_kernel, *tf32, **FEW, PHASE=7, PRECISION="tf32"),
    "back, many": built(backward_kernel, *bf16, **MANY, PHASE=7, PRECISION="ieee"),
    "the end": built(backward_kernel, *tf32, **FEW, PHASE=8, PRECISION="tf32"),
    "views": built(views_kernel, *tf32, **FEW, PRECISION="tf32"),
    "inputs": built(inputs_kernel, *tf32, BS=4, BP=32),
    "hold": built(hold_kernel, *tf32, BK=2, BP=32),
    "pack": built(pack_kernel, *tf32, BN=32, BP=32, PER_CELL=True, TILED=True),
}
print(json.dumps(done))
"""


@pytest.mark.parametrize("chip", [80, 90])
def test_every_kernel_compiles(chip: int) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", CODE, str(chip)], env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    shared = json.loads(ran.stdout)
    assert len(shared) == 9
    assert max(shared.values()) < 160 * 1024
