"""The non-linearities of a cell, in the kernels.

Compiled, they are instructions that approximate, of full precision to a few last bits unless a
name says otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from riglstm.scan.kernels.common import _INTERPRETED

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _at_once(x, how: tl.constexpr):
    """What one instruction of this name makes of x."""
    return tl.inline_asm_elementwise(how + " $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _inverse(x):
    """1 / x, for x of at least one; a division would mind smaller ones, too."""
    return 1.0 / x if _INTERPRETED else _at_once(x, "rcp.approx.ftz.f32")


@triton.jit
def sigmoid(x):
    return _inverse(1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    return 2.0 * sigmoid(2.0 * x) - 1.0


@triton.jit
def _exp_at_most(x):
    """The exponential of x, up to 2^40: the product of three is still a number. NaN stays NaN."""
    x = tl.minimum(x * _LOG2_E, 40.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(x) if _INTERPRETED else _at_once(x, "ex2.approx.ftz.f32")


@triton.jit
def cell(f, i, o, g, c, COARSE: tl.constexpr, MANY: tl.constexpr):
    """Eqs. (1)-(6): f, i, o and g from their arguments, the new c, and o tanh c.

    COARSE, to eleven bits, all but f and i: what these are off by, c adds up at every step, and a
    closed gate would be off by all of it. MANY, where a program has so many units that their
    exponentials and reciprocals bound it.
    """
    if COARSE and not _INTERPRETED:
        n_f, n_i = 1.0 + _exp_at_most(-f), 1.0 + _exp_at_most(-i)
        share = _inverse(n_f * n_i)
        f, i = n_i * share, n_f * share
        o = 0.5 + 0.5 * _at_once(0.5 * o, "tanh.approx.f32")
        g = _at_once(g, "tanh.approx.f32")
        c = f * c + i * g
        return f, i, o, g, c, o * _at_once(c, "tanh.approx.f32")
    elif MANY:
        # With e the exponential of -x, sigmoid x is 1 / (1 + e), and of -2x, tanh x is
        # (1 - e) / (1 + e): several of them share a reciprocal.
        e_g = _exp_at_most(-2.0 * g)
        n_f, n_i, n_g = 1.0 + _exp_at_most(-f), 1.0 + _exp_at_most(-i), 1.0 + e_g
        both = n_i * n_g
        share = _inverse(n_f * both)
        f, rest = both * share, n_f * share
        new = (1.0 - e_g) * rest
        i, g = n_g * rest, n_i * new
        c = f * c + new
        e_c = _exp_at_most(-2.0 * c)
        n_o, n_c = 1.0 + _exp_at_most(-o), 1.0 + e_c
        share = _inverse(n_o * n_c)
        return f, i, n_c * share, g, c, (1.0 - e_c) * share
    else:
        f, i, o, g = sigmoid(f), sigmoid(i), sigmoid(o), tanh(g)
        c = f * c + i * g
        return f, i, o, g, c, o * tanh(c)
