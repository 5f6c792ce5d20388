"""The `triton` kernels are compiled for GPUs that are not here, by Triton's own compiler.

What the interpreter runs may still be refused by the compiler: a name that holds two shapes, say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
pytest.importorskip("riglstm.scan.triton.kernels.common", reason="the kernels are not in this copy")

CODE = r"""
import json, re, sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from riglstm.scan.triton import plan
from riglstm.scan.triton.plan import inner_map, map_of, map_tiles
from riglstm.scan.triton.kernels.backward import backward_kernel, views_kernel
from riglstm.scan.triton.kernels.tiled import tiled_kernel
from riglstm.scan.triton.kernels.input_map import halve_kernel, map_kernel
from riglstm.scan.triton.kernels.pack import hold_kernel, pack_kernel
from riglstm.scan.triton.kernels.resident import resident_kernel
from riglstm.scan.triton.kernels.weights import inputs_kernel, lines_kernel, split_kernel

ARCH, ROOM, MULTIPROCESSORS = (int(a) for a in sys.argv[1:])
plan.chip = lambda device: (MULTIPROCESSORS, ROOM)
STEPS = (tiled_kernel, resident_kernel)
INTEGERS = {"ACT", "BITS", "LIST", "COUNT", "COUNTER", "ZERO"}
NUMBERS = {"B", "T", "R", "Z", "first", "t0", "t1", "zeros", "numbers"}
CHOICE = {"SCALE": 1.0, "WIDE": False, "K_a": 1, "K_x": 1, "K_h": 0, "X_ROW": 40, "X_SLOT": 20}
NAMES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
IN_REGISTERS = "wgmma[.]mma_async[^{]*[{][^}]*[}], *[{]"


def built(kernel, z, tile, **constants):
    given = {**z._asdict(), "S": z.S, **CHOICE, **tile, **constants}
    held, product, back = NAMES[z.held], NAMES[z.dtype], NAMES[z.back]
    kinds = {"WOKE": "*i1", "LIVE": "*i1", "RESET": "*i1", "XH": held, "H": back, "DV": product,
             "D5": back, "GATES": product, "X": product, "W": held if kernel in STEPS else back}
    kinds |= {"PART": "*fp32" if z.back == torch.float16 else back}
    if kernel is tiled_kernel:
        kinds |= {"INPUT": held if z.held == torch.float16 else "*fp32", "W_IN": held, "LOW": held}
    if kernel in (lines_kernel, pack_kernel):
        kinds |= {"W": "*fp32", "OUT": held if kernel is pack_kernel else back, "OUT_IN": held}
    if kernel in (map_kernel, halve_kernel):
        halved = kernel is map_kernel and z is tf32
        kinds |= {"X": held if halved else "*fp32", "W": held, "OUT": held, "LINES": held}
    signature, values, attrs = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in given:
            signature[name], values[(i,)] = "constexpr", given[name]
        elif name in NUMBERS:
            signature[name] = "i32"
            # `Launch` takes it that no value of theirs asks for a kernel of its own.
            assert kernel.params[i].do_not_specialize, name
        else:
            signature[name] = kinds.get(name, "*i32" if name in INTEGERS else "*fp32")
            attrs[(i,)] = [["tt.divisibility", 16]]
    options = {"num_warps": tile.get("num_warps", 4)}
    source = ASTSource(kernel, signature, values, attrs)
    made = compile(source, target=GPUTarget("cuda", ARCH, 32), options=options)
    ptx = made.asm["ptx"]
    # A product that reads registers is waited for before a loop's next turn writes to them.
    for product in re.finditer(IN_REGISTERS, ptx):
        turn = ptx[product.end() : ptx.index("bra", product.end())]
        assert "wgmma.wait_group.sync.aligned 0" in turn, kernel.__name__
    polls = given.get("POLLING") and (kernel is resident_kernel or "RESET" in given)
    asked = [line for line in made.asm["ttgir"].splitlines() if "ld.relaxed.gpu" in line]
    # What is waited for is loaded once in the loop over steps, and once after it.
    assert len(asked) == (2 if polls else 0), len(asked)
    for line in asked:
        layout = re.search(r"tensor<\w+, (#\w+)>", line)[1]
        laid = re.search(rf"^{layout} = (.*)", made.asm["ttgir"], re.M)[1]
        # A thread has fours of it, side by side.
        assert re.search(r"sizePerThread = \[1, 1, (4|8)\].*order = \[2,", laid), laid
    return made.metadata.shared


def sizes(product, held, G, d=20):
    P, L = plan.aligned(d, held), plan.in_pieces(d * G)
    return plan.Sizes(2, 2, d, P, L, G, product, held, held)


f16, b16, f32 = torch.float16, torch.bfloat16, torch.float32
tf32, bf16, exact = sizes(f32, f16, 5), sizes(b16, b16, 4), sizes(f32, f32, 5)
folded = sizes(f32, f16, 5, 36)
plain = {"X_UNIT": None, "W_UNIT": None, "IN_SIZE": None}
every, place = {"LIVE": None, "RESET": None}, {"PHASE": 15}
peers = {"N": 3, "K_h": 1}  # three cells, so that they choose among peers
done = {}
for name, z, B, more in (
    ("tf32, few", tf32, 64, {"SAVE": True, "PRECISION": "ieee", **peers}),
    (
        *("tf32, many", tf32, 257),
        {"SAVE": False, "PRECISION": "ieee", "UPDATE_BIAS": None} | peers | every,
    ),
    ("bf16, few", bf16, 64, {"SAVE": False, "PRECISION": "ieee", **plain, **every}),
    ("bf16, many", bf16, 65, {"SAVE": True, "PRECISION": "ieee", **plain}),
    ("bf16, many, polling", bf16, 65, {"SAVE": False, "PRECISION": "ieee"} | plain | every),
    ("exact", exact, 64, {"SAVE": True, "PRECISION": "tf32x3", **plain, **every}),
):
    # With a multiprocessor for each tile, few sequences in halves take the resident kernel.
    if ("many" if ARCH < 90 else "few") in name:
        continue
    tile = plan.forward_tiles(z, B, None)
    of = map_of(z, 100, None) if "many" in name else None
    if of is None:
        more |= dict.fromkeys(("INPUT", "IN_SIZE", "W_IN", "IN_BIAS"))
    if not (of and z is bf16):
        more["LOW"] = None
    inner = inner_map(of, z, tile, None)
    done[name] = built(tiled_kernel, z, tile, **inner, **more, **place)
whole = {"W_UNIT": None, "D_UNIT": None}
for name, z, B, phase, how, more in (
    ("back, tf32, few", tf32, 64, 7, "tf32", {}),
    ("back, tf32, many", tf32, 257, 7, "tf32", {}),
    ("back, bf16, many", bf16, 65, 7, "ieee", whole),
    ("back, exact", exact, 64, 7, "tf32x3", whole),
    ("back, the end", tf32, 64, 8, "tf32", {}),
):
    if name == ("back, tf32, many" if ARCH < 90 else "back, exact"):
        continue
    tile = plan.backward_tiles(z, B, None)
    done[name] = built(
        backward_kernel, z, tile, PHASE=phase, PRECISION=how, **more
    )
place_of = {"BS": 4, "BP": 32}
of_pack = {"BN": 32, "BP": 32, "BW": 64, "D": 20, "TILES": 4}
no_lines = {"W_IN": None, "OUT_IN": None, "SIZES": None}
of_halves = {"BR": 2, "BD": 32, "BW": 64, "BH": 64}
of_halves |= {"D": 20, "X_ROW": 24, "BIASES": 40, "STATES": 40}
done |= {
    "views": built(views_kernel, tf32, plan.views_tiles(tf32, None), PRECISION="tf32"),
    "views, bf16": built(
        *(views_kernel, bf16, plan.views_tiles(bf16, None)),
        **{"PRECISION": "ieee", "SUMS": None, **whole},
    ),
    "inputs": built(inputs_kernel, tf32, place_of, WIDTH=96, ONE=20),
    "inputs, bf16": built(
        inputs_kernel, bf16, place_of, WIDTH=104, ONE=96, X_UNIT=None, D_UNIT=None, TOP=None
    ),
    "lines": built(lines_kernel, tf32, {"BL": 1, "BG": 128, "BQ": 64}, PER_CELL=True),
    "lines, no query": built(
        lines_kernel, bf16, {"BL": 1, "BG": 128, "BQ": 64}, PER_CELL=False, W_UNIT=None
    ),
    "split": built(
        split_kernel, tf32, {"BL": 4, "BG": 128}, WIDTH=96, ONE=20
    ),
    "split, no query": built(
        *(split_kernel, bf16, {"BL": 4, "BG": 128}),
        **{"WIDTH": 104, "ONE": -1, "TOP": None, "OUT_Q": None, "OUT_B": None},
    ),
    "hold": built(hold_kernel, tf32, {"BK": 2, "BP": 32, "BH": 64}),
    "hold, plain": built(hold_kernel, bf16, {"BK": 2, "BP": 32, "BH": 64}, X_UNIT=None),
    "map": built(map_kernel, tf32, map_tiles(f16, None), D=20, X_ROW=24),
    "map, bf16": built(
        *(map_kernel, bf16, map_tiles(b16, None)),
        **{"D": 100, "X_ROW": 100, "X_SIZE": None, "X_UNIT": None, "VIEWS": None},
    ),
    "halves": built(halve_kernel, tf32, of_halves),
    "halves, no bias, no state": built(halve_kernel, tf32, of_halves, BIAS=None, h0=None),
    # With the last of W_q Q beside the last units.
    "pack": built(
        *(pack_kernel, folded, {**of_pack, "BP": 64, "BW": 128, "TILES": 6}),
        **{"PER_CELL": True, "BY_GATE": True},
    ),
    "pack, no map": built(
        *(pack_kernel, tf32, of_pack), **no_lines, C0=None, PER_CELL=True, BY_GATE=False
    ),
    "pack, plain": built(
        *(pack_kernel, bf16, of_pack),
        **{"PER_CELL": False, "W_UNIT": None, "BY_GATE": False},
        **{"COUNTER": None, "H": None, "SIZES": None},
    ),
}
for name, chip, apart, rows, z, more in (
    # Programs that select, of one sequence and of two; and too few for that.
    ("resident, tf32", 132, True, 1, tf32, {"SAVE": True, **peers}),
    # Where a thread has two fours of what is waited for.
    ("resident, polling", 66, True, 2, sizes(f32, f16, 5, 100), {"SAVE": False, **peers}),
    # Likewise folded, and of two pieces.
    ("resident, tf32, both", 20, False, 2, folded, {"SAVE": True, **peers}),
    ("resident, bf16", 48, True, 2, bf16, {"SAVE": False, "UPDATE_BIAS": None, **plain, **every}),
):
    if apart != (ARCH >= 90):
        continue
    plan.chip = lambda device: (chip, ROOM)
    tile = plan.resident_tiles(z, 64, None)
    assert (tile["APART"], tile["RB"]) == (apart, rows), (name, tile)
    done[name] = built(resident_kernel, z, tile, PRECISION="ieee", **more, **place)
print(json.dumps(done))
"""


# A few multiprocessors of an A100, which get the widest tiles; a whole H100.
CHIPS = [(80, 166_912, 4, 25), (90, 232_448, 132, 28)]


@pytest.mark.parametrize(("chip", "room", "multiprocessors", "kinds"), CHIPS)
def test_every_kernel_compiles_and_fits(
    chip: int, room: int, multiprocessors: int, kinds: int
) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    machine = [str(n) for n in (chip, room, multiprocessors)]
    command = [sys.executable, "-c", CODE, *machine]
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    shared = json.loads(ran.stdout)
    assert len(shared) == kinds
    assert max(shared.values()) <= room
