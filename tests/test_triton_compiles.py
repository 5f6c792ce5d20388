"""The `triton` kernels are compiled for GPUs that are not here, by Triton's own compiler.

What the interpreter runs may still be refused by the compiler: a name that holds two shapes, say.
The host's part of a call runs, with launches that only write down what they would launch; so what
is compiled is what a call of that size compiles.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from helpers import kernels, python

pytestmark = pytest.mark.slow

kernels("forward")

CODE = r"""
import json, re, subprocess, sys, tempfile

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from riglstm.cell import Weights
from riglstm.parameters import shapes
from riglstm.scan.triton import backward, forward, plan
from riglstm.selection import Selection

ARCH, ROOM = int(sys.argv[1]), int(sys.argv[2])
NAMES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
         torch.int32: "*i32", torch.bool: "*i1"}
IN_REGISTERS = "wgmma[.]mma_async[^{]*[{][^}]*[}], *[{]"
launched = []


def kind_of(argument):
    if isinstance(argument, int):
        return "i32"
    return None if argument is None else NAMES[argument.dtype]


def write_down(self, grid, arguments):
    launched.append((self.kernel, self.constants, [*map(kind_of, arguments)]))


plan.Launch.__call__ = write_down


def call(N, K, d, B, mode, multiprocessors, soft=True, save=True, masks=False, query="shared"):
    # The host's part of a call, and of its backward pass.
    plan.chip = lambda device: (multiprocessors, ROOM)
    torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
    product = torch.bfloat16 if mode == "bf16" else torch.float32
    sel = Selection(N, K, max(1, N // 2), max(1, K // 2), min(N - 1, max(1, N // 2)))
    query = query if soft else None
    made = shapes(20, N, K, d, linear=True, bias=True, query=query, learned=save and soft)
    weights = Weights(*(None if s is None else torch.zeros(s) for s in made))
    x, state = torch.zeros(2, B, 20), torch.zeros(B, N, d)
    wake, take = torch.zeros(2, B, dtype=torch.int32), torch.zeros(2, B, N, dtype=torch.int32)
    given = (wake, take, torch.zeros(2, B, dtype=torch.bool)) if masks else (None,) * 3
    begun = state if masks else None
    y, _, _, kept = forward.forward(x, begun, begun, weights, sel, *given, product, save, save)
    if save:
        needs = backward.Needs(True, True, True, True)
        backward.backward(y, None, None, x, state, y, kept, weights, sel, product, needs)


def built(kernel, constants, kinds):
    signature, values, attrs, kinds = {}, {}, {}, iter(kinds)
    for i, name in enumerate(kernel.arg_names):
        kind = None if name in constants else next(kinds)
        if kind is None:
            signature[name], values[(i,)] = "constexpr", constants.get(name)
            continue
        signature[name] = kind
        if kind == "i32":
            # `Launch` takes it that no value of theirs asks for a kernel of its own.
            assert kernel.params[i].do_not_specialize, name
        else:
            attrs[(i,)] = [["tt.divisibility", 16]]
    options = {"num_warps": constants.get("num_warps", 4)}
    source = ASTSource(kernel, signature, values, attrs)
    made = compile(source, target=GPUTarget("cuda", ARCH, 32), options=options)
    ptx = made.asm["ptx"]
    # A product that reads registers is waited for before a loop's next turn writes to them.
    for product in re.finditer(IN_REGISTERS, ptx):
        turn = ptx[product.end() :].split("bra")[0]
        assert "wgmma.wait_group.sync.aligned 0" in turn, kernel.__name__
    tiled = "COMPACT" in constants
    polls = constants.get("POLLING") and not (tiled and signature["RESET"] != "constexpr")
    asked = [line for line in made.asm["ttgir"].splitlines() if "ld.relaxed.gpu" in line]
    # What is waited for is loaded once in the loop over steps, and once after it.
    assert len(asked) == (2 if polls else 0), len(asked)
    for line in asked:
        layout = re.search(r"tensor<\w+, (#\w+)>", line)[1]
        laid = re.search(rf"^{layout} = (.*)", made.asm["ttgir"], re.M)[1]
        # A thread has fours of it, side by side.
        assert re.search(r"sizePerThread = \[1, 1, (4|8)\].*order = \[2,", laid), laid
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Bytes of shared memory of a program, and of a thread's registers that lie in memory.
    return made.metadata.shared, int(re.search(r"STACK:(\d+)", said)[1])


done, kinds = {}, []
for problem in json.loads(sys.argv[3]):
    name = " ".join(map(str, problem.values()))
    launched.clear()
    call(**problem)
    for kernel, constants, arguments in launched:
        what = (kernel.fn.__name__, constants, arguments)
        if what not in kinds:
            kinds.append(what)
            done[f"{name}: {len(kinds)} {what[0]}"] = built(kernel, constants, arguments)
print(json.dumps(done))
"""


def problem(N: int, K: int, d: int, B: int, mode: str, multiprocessors: int, **more: object) -> Any:
    sizes = {"N": N, "K": K, "d": d, "B": B, "mode": mode, "multiprocessors": multiprocessors}
    return {**sizes, **more}


# A few multiprocessors of an A100, which get the widest tiles; a whole H100, where it is cells of
# any size, too.
A100: list[dict[str, Any]] = [
    problem(3, 2, 20, 64, "tf32", 4, masks=True, query="per_cell"),
    problem(3, 2, 18, 64, "fp32", 4, soft=False),
    # The resident kernel, whose programs select and multiply; the last of W_q Q beside units.
    problem(3, 2, 36, 64, "tf32", 20),
]
H100: list[dict[str, Any]] = [
    problem(3, 2, 20, 64, "tf32", 132, masks=True, query="per_cell"),
    problem(3, 2, 20, 257, "tf32", 132, save=False),
    problem(2, 2, 20, 65, "bf16", 132, masks=True, soft=False),
    problem(2, 2, 20, 65, "bf16", 132, save=False),
    problem(2, 2, 20, 64, "fp32", 132),
    # A thread has two fours of what is polled for.
    problem(3, 2, 100, 64, "tf32", 66, save=False),
    problem(2, 2, 20, 64, "bf16", 48, save=False, soft=False),
    problem(1, 1, 1, 20, "fp32", 132),
    problem(1, 1, 1, 20, "bf16", 132),
    problem(6, 6, 200, 32, "fp32", 132),
    problem(16, 16, 256, 20, "tf32", 132),
    problem(16, 16, 256, 70, "bf16", 132, masks=True),
]


@pytest.mark.parametrize(
    ("chip", "room", "spills", "problems"),
    # Wide tiles of float32 without TF32 do not fit the registers of the former.
    [(80, 166_912, 10_000, A100), (90, 232_448, 512, H100)],
    ids=["A100", "H100"],
)
def test_every_kernel_compiles_and_fits(chip, room, spills, problems):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ran = python("-c", CODE, str(chip), str(room), json.dumps(problems), env=env)
    assert ran.returncode == 0, ran.stderr[-2000:]
    made = json.loads(ran.stdout)
    kernels = {name.split()[-1] for name in made}
    assert kernels == {
        *("pack_kernel", "hold_kernel", "halve_kernel", "map_kernel", "tiled_kernel"),
        *("resident_kernel", "backward_kernel", "views_kernel", "lines_kernel", "inputs_kernel"),
        "split_kernel",
    }
    for name, (shared, spilled) in made.items():
        assert shared <= room, name
        assert spilled <= spills, name
