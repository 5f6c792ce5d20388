"""RIM and BRIM in NumPy float64, one loop per index, from the specification.

Shapes: T steps, B samples, N cells of size d, S slots beside the null slot, M heads. Weights are
for column vectors: an input map W_k[s] (M, d_k, D_s), a map per cell C_k (N, M, d_k, d). Gates are
in the order i, f, g, o. Dropout is off, unless the weights hold factors for it: `drop_u` (N, M·d_v)
on what a cell takes in and `drop_update` (N, d) on F a_j + b_f.

`held` (T, B, N, d): what the communication reads of a cell that sleeps, in place of its candidate.
With the candidates of another run it makes the gradient mask visible to finite differences: the
candidates of sleeping cells are constants.
"""

from typing import Any

import numpy as np

Array = np.ndarray
Weights = dict[str, Any]


def sigmoid(z: Array) -> Array:
    """The logistic function, in a form that cannot overflow."""
    y: Array = np.exp(-np.logaddexp(0.0, -z))
    return y


def softmax(z: Array) -> Array:
    """Normalised exponentials of a vector."""
    e = np.exp(z - z.max())
    a: Array = e / e.sum()
    return a


def keep_best(score: Array, count: int) -> Array:
    """True for the `count` largest; of equals, for the lower index."""
    order = sorted(range(len(score)), key=lambda j: (-score[j], j))
    chosen = np.zeros(len(score), dtype=bool)
    chosen[order[:count]] = True
    return chosen


def lstm(u: Array, h: Array, c: Array, p: Weights, j: int) -> tuple[Array, Array]:
    """Cell j's candidates h~, c~."""
    gates = []
    for gate in range(4):
        z = p["W_ih"][j][gate] @ u + p["W_hh"][j][gate] @ h
        gates.append(z + p["b_ih"][j][gate] + p["b_hh"][j][gate])
    i, f, g, o = sigmoid(gates[0]), sigmoid(gates[1]), np.tanh(gates[2]), sigmoid(gates[3])
    c = f * c + i * g
    return o * np.tanh(c), c


def attend(h: Array, p: Weights) -> tuple[Array, Array]:
    """Communication: a_j (N, M·d_v) and the weights (N, M, N)."""
    N, M = p["C_q"].shape[:2]
    a = [[np.zeros(0)] * M for _ in range(N)]
    weights = np.zeros((N, M, N))
    for j in range(N):
        for m in range(M):
            q = p["C_q"][j, m] @ h[j]
            s = np.zeros(N)
            for i in range(N):
                k = p["C_k"][i, m] @ h[i]
                s[i] = q @ k / np.sqrt(len(k))
            weights[j, m] = softmax(s)
            a[j][m] = sum(weights[j, m, i] * (p["C_v"][i, m] @ h[i]) for i in range(N))
    return np.array([np.concatenate(heads) for heads in a]), weights


def step(
    slots: list[Array], h: Array, c: Array, p: Weights, K_a: int, held: Array | None
) -> dict[str, Array]:
    """Section 1.1, with the several heads and slots of section 2: one step of one sample."""
    N, M = p["W_q"].shape[:2]
    views = np.zeros((N, M, 1 + len(slots)))
    u = np.zeros((N, M, p["W_v"][0].shape[1]))
    for j in range(N):
        for m in range(M):
            q = p["W_q"][j, m] @ h[j]
            keys, values = [np.zeros(len(q))], [np.zeros(u.shape[2])]
            for s, x in enumerate(slots):
                keys.append(p["W_k"][s][m] @ x)
                values.append(p["W_v"][s][m] @ x)
            views[j, m] = softmax(np.array([q @ k / np.sqrt(len(q)) for k in keys]))
            for s in range(len(values)):
                u[j, m] += views[j, m, s] * values[s]
    null = np.array([np.mean([views[j, m, 0] for m in range(M)]) for j in range(N)])
    active = keep_best(-null, K_a)

    h_tilde, c_tilde = np.zeros_like(h), np.zeros_like(c)
    for j in range(N):
        taken = u[j].reshape(-1) * p["drop_u"][j] if "drop_u" in p else u[j].reshape(-1)
        h_tilde[j], c_tilde[j] = lstm(taken, h[j], c[j], p, j)
    read = h_tilde.copy()
    if held is not None:
        read[~active] = held[~active]
    a, peers = attend(read, p)
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


def run(
    x: Array, h: Array, c: Array, p: Weights, K_a: int, held: Array | None = None
) -> dict[str, Array]:
    """RIM over a sequence: x (T, B, D) from the state h, c (B, N, d); what happened, time first."""
    h, c = h.copy(), c.copy()
    steps: list[list[dict[str, Array]]] = []
    for t in range(x.shape[0]):
        row = []
        for b in range(x.shape[1]):
            constants = None if held is None else held[t, b]
            row.append(step([x[t, b]], h[b], c[b], p, K_a, constants))
            h[b], c[b] = row[b]["h"], row[b]["c"]
        steps.append(row)
    return _stack(steps)


def run_brim(
    x: Array,
    h: tuple[Array, Array],
    c: tuple[Array, Array],
    p: tuple[Weights, Weights],
    K_a: tuple[int, int],
    held: tuple[Array, Array] | None = None,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """BRIM, section 2, over a sequence: the lower and the upper layer, each like `run`'s result."""
    h_1, h_2, c_1, c_2 = (s.copy() for s in (*h, *c))
    lower: list[list[dict[str, Array]]] = []
    upper: list[list[dict[str, Array]]] = []
    for t in range(x.shape[0]):
        lower.append([])
        upper.append([])
        for b in range(x.shape[1]):
            top_down = h_2[b].reshape(-1)
            constants = (None, None) if held is None else (held[0][t, b], held[1][t, b])
            below = step([x[t, b], top_down], h_1[b], c_1[b], p[0], K_a[0], constants[0])
            bottom_up = below["h"].reshape(-1)
            above = step([bottom_up], h_2[b], c_2[b], p[1], K_a[1], constants[1])
            lower[t].append(below)
            upper[t].append(above)
            h_1[b], c_1[b], h_2[b], c_2[b] = below["h"], below["c"], above["h"], above["c"]
    return _stack(lower), _stack(upper)


def _stack(steps: list[list[dict[str, Array]]]) -> dict[str, Array]:
    """A record per step and sample to one array (T, B, ...) per name."""
    return {name: np.array([[one[name] for one in row] for row in steps]) for name in steps[0][0]}
