"""Other models in NumPy float64, one loop per index: witnesses written from the equations alone.

Shapes: T steps, B samples, D input size; RMC: S slots of size m = heads · head size; EntNet:
N slots of size d; RIM and BRIM: N cells of size d, S slots beside the null slot, M heads. Matrices
are for column vectors. Weights of RMC and EntNet have the models' names.

Of RIM and BRIM: an input map W_k[s] is (M, d_k, D_s), a map per cell C_k (N, M, d_k, d), and gates
are in the order f, i, o, g. Dropout is off, unless the weights hold factors for it: `drop_u`
(N, M·d_v) on what a cell takes in and `drop_update` (N, d) on F a_j + b_f. `held` (T, B, N, d) is
what the communication reads of a cell that sleeps, in place of its candidate. With the candidates
of another run it makes the gradient mask visible to finite differences: the candidates of sleeping
cells are constants.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from oracle import lstm, sigmoid, softmax, weigh

Array = np.ndarray
Weights = dict[str, Any]


def linear(z: Array, p: dict[str, Array], name: str) -> Array:
    """The affine map of that name."""
    y: Array = p[f"{name}.weight"] @ z + p[f"{name}.bias"]
    return y


def layer_norm(z: Array, p: dict[str, Array], name: str) -> Array:
    """A row with mean 0 and variance 1, then scaled and shifted."""
    mean = sum(z) / len(z)
    variance = sum((v - mean) ** 2 for v in z) / len(z)
    normal: Array = (z - mean) / np.sqrt(variance + 1e-5)
    return normal * p[f"{name}.weight"] + p[f"{name}.bias"]


def attend(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Rows of q (R, d_k) weigh those of k (S, d_k): v (S, d_v) mixed, (R, d_v), and the weights."""
    mixed, weights = np.zeros((len(q), v.shape[1])), np.zeros((len(q), len(k)))
    for r in range(len(q)):
        weights[r] = softmax(np.array([q[r] @ k_s / np.sqrt(len(k_s)) for k_s in k]))
        for s in range(len(k)):
            mixed[r] += weights[r, s] * v[s]
    return mixed, weights


def attention(Z: Array, p: dict[str, Array], heads: int) -> Array:
    """Multi-head attention of all rows of Z (S+1, m) to all rows.

    One map gives each row's q, k and v, of which the row is normalised as a whole; it holds head
    after head, each with q, k, v in this order.
    """
    qkv = [layer_norm(linear(z, p, "qkv"), p, "norm_qkv") for z in Z]
    of_heads = np.array(qkv).reshape(len(Z), heads, 3, -1)
    out = [attend(*(of_heads[:, n, i] for i in range(3)))[0] for n in range(heads)]
    return np.concatenate(out, axis=1)


def rmc_step(x: Array, M: Array, p: dict[str, Array], heads: int) -> Array:
    """One step of the Relational Memory Core: the memory M (S, m) after the input x (D,)."""
    S, m = M.shape
    x = linear(x, p, "input")
    Z = np.concatenate([M, x[None]])
    attended = attention(Z, p, heads)
    new = np.zeros((S, m))
    for r in range(S):  # the input's own row is dropped
        z = layer_norm(Z[r] + attended[r], p, "norm_attention")
        hidden = np.maximum(linear(z, p, "mlp_in"), 0.0)
        z = layer_norm(z + linear(hidden, p, "mlp_out"), p, "norm_mlp")
        gates = linear(x, p, "gates_input") + linear(np.tanh(M[r]), p, "gates_memory")
        i, f = gates[:m], gates[m:]
        new[r] = sigmoid(i + 0.0) * np.tanh(z) + sigmoid(f + 1.0) * M[r]
    return new


def outputs(x: Array, start: Array, step: Callable[[Array, Array], Array]) -> Array:
    """A sequence x (T, B, D), each sample from its own start (B, ...), to all states, flat."""
    out = np.zeros((*x.shape[:2], start[0].size))
    for b, state in enumerate(start):
        for t in range(len(x)):
            state = step(x[t, b], state)
            out[t, b] = state.reshape(-1)
    return out


def rmc(x: Array, p: dict[str, Array], S: int, heads: int, start: Array | None = None) -> Array:
    """A sequence x (T, B, D), from `start` (B, S·m) or its own, to outputs (T, B, S·m)."""
    own = np.zeros((x.shape[1], S, len(p["input.bias"])))
    for s in range(min(own.shape[1:])):
        own[:, s, s] = 1.0
    given = own if start is None else start.reshape(own.shape)
    return outputs(x, given, lambda x, M: rmc_step(x, M, p, heads))


def entnet_step(x: Array, h: Array, p: dict[str, Array]) -> Array:
    """One step of the Recurrent Entity Network: the slots h (N, d) after the input x (D,)."""
    s = p["weight_in"] @ x
    new = np.zeros_like(h)
    for j in range(len(h)):
        key = p["keys"][j]
        g = sigmoid(np.dot(s, h[j]) + np.dot(s, key) + p["bias_gate"][j])
        z = p["weight_state"] @ h[j] + p["weight_input"] @ s + p["weight_key"] @ key + p["bias"]
        candidate = np.array([v if v > 0 else a * v for v, a in zip(z, p["slope"], strict=True)])
        new[j] = h[j] + g * candidate
        norm = np.sqrt(sum(v * v for v in new[j]))
        if norm > 0:
            new[j] /= norm
    return new


def entnet(x: Array, p: dict[str, Array], start: Array | None = None) -> Array:
    """A sequence x (T, B, D), from `start` (B, N·d) or the slots' keys, to outputs (T, B, N·d)."""
    own = np.stack([p["keys"]] * x.shape[1])
    given = own if start is None else start.reshape(own.shape)
    return outputs(x, given, lambda x, h: entnet_step(x, h, p))


def rim_attention(h: Array, p: Weights) -> tuple[Array, Array]:
    """Communication: a_j (N, M·d_v) and the weights (N, M, N)."""
    N, M = p["C_q"].shape[:2]
    heads, weights = [], []
    for m in range(M):
        maps = (p[name][:, m] for name in ("C_q", "C_k", "C_v"))
        q, k, v = (np.array([C[j] @ h[j] for j in range(N)]) for C in maps)
        a, of_head = attend(q, k, v)
        heads.append(a)
        weights.append(of_head)
    return np.concatenate(heads, axis=1), np.stack(weights, axis=1)


def rim_step(
    slots: list[Array], h: Array, c: Array, p: Weights, K_a: int, held: Array | None
) -> dict[str, Array]:
    """Section 1.1, with the several heads and slots of section 2: one step of one sample."""
    N, M = p["W_q"].shape[:2]
    views = np.zeros((N, M, 1 + len(slots)))
    u = np.zeros((N, M, p["W_v"][0].shape[1]))
    for j, m in np.ndindex(N, M):
        q = p["W_q"][j, m] @ h[j]
        keys, values = [np.zeros(len(q))], [np.zeros(u.shape[2])]
        for s, x in enumerate(slots):
            keys.append(p["W_k"][s][m] @ x)
            values.append(p["W_v"][s][m] @ x)
        (u[j, m],), (views[j, m],) = attend(q[None], np.array(keys), np.array(values))
    null = np.array([np.mean([views[j, m, 0] for m in range(M)]) for j in range(N)])
    active = weigh("top", -null, K_a, list(range(N))) > 0

    h_tilde, c_tilde = np.zeros_like(h), np.zeros_like(c)
    for j in range(N):
        taken = u[j].reshape(-1) * p["drop_u"][j] if "drop_u" in p else u[j].reshape(-1)
        h_tilde[j], c_tilde[j] = lstm(np.concatenate([taken, h[j]]), c[j], p["W"][j], p["b"][j])
    read = h_tilde.copy()
    if held is not None:
        read[~active] = held[~active]
    a, peers = rim_attention(read, p)
    h_next, c_next = h.copy(), c.copy()
    for j in range(N):
        if active[j]:
            gate, update = sigmoid(p["G"] @ a[j] + p["b_g"]), p["F"] @ a[j] + p["b_f"]
            if "drop_update" in p:
                update = update * p["drop_update"][j]
            h_next[j], c_next[j] = h_tilde[j] + gate * np.tanh(update), c_tilde[j]
    return {
        **{"h": h_next, "c": c_next, "active": active, "candidates": h_tilde},
        **{"views": views.mean(axis=1), "peers": peers.mean(axis=1)},
    }


def rim(
    x: Array,
    h: list[Array],
    c: list[Array],
    p: list[Weights],
    K_a: list[int],
    held: list[Array] | None = None,
) -> list[dict[str, Array]]:
    """RIM, of one layer, or BRIM, section 2, of two: what happened in each layer, time first.

    x is (T, B, D), and all else has an entry for each layer: h and c (B, N, d). The lower layer of
    two has a second slot, the upper one's state before the step.
    """
    h, c = [s.copy() for s in h], [s.copy() for s in c]
    layers: list[list[list[dict[str, Array]]]] = [[[] for _ in x] for _ in p]
    for t, b in np.ndindex(*x.shape[:2]):
        slots = [x[t, b]] if len(p) == 1 else [x[t, b], h[1][b].reshape(-1)]
        for n, steps in enumerate(layers):
            constants = None if held is None else held[n][t, b]
            one = rim_step(slots, h[n][b], c[n][b], p[n], K_a[n], constants)
            h[n][b], c[n][b], slots = one["h"], one["c"], [one["h"].reshape(-1)]
            steps[t].append(one)
    return [_stack(steps) for steps in layers]


def _stack(steps: list[list[dict[str, Array]]]) -> dict[str, Array]:
    """A record per step and sample to one array (T, B, ...) per name."""
    return {name: np.array([[one[name] for one in row] for row in steps]) for name in steps[0][0]}
