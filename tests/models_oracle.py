"""RMC and EntNet in NumPy float64, one loop per index: witnesses written from the equations alone.

Shapes: T steps, B samples, D input size; RMC: S slots of size m = heads · head size; EntNet:
N slots of size d. Matrices are for column vectors.
"""

import numpy as np

Array = np.ndarray


def sigmoid(z: Array) -> Array:
    """The logistic function, in a form that cannot overflow."""
    y: Array = np.exp(-np.logaddexp(0.0, -z))
    return y


def layer_norm(z: Array, gain: Array, shift: Array) -> Array:
    """A row with mean 0 and variance 1, then scaled and shifted."""
    mean = sum(z) / len(z)
    variance = sum((v - mean) ** 2 for v in z) / len(z)
    normal: Array = (z - mean) / np.sqrt(variance + 1e-5) * gain + shift
    return normal


def attention(Z: Array, p: dict[str, Array], heads: int) -> Array:
    """Multi-head attention of all rows of Z (S+1, m) to all rows.

    One map gives each row's q, k and v, of which the row is normalised as a whole; it holds head
    after head, each with q, k, v in this order.
    """
    rows, m = Z.shape
    size = m // heads
    qkv = [
        layer_norm(p["W_qkv"] @ Z[r] + p["b_qkv"], p["gain_qkv"], p["shift_qkv"])
        for r in range(rows)
    ]
    out = np.zeros((rows, m))
    for n in range(heads):
        at = 3 * n * size
        q = [v[at : at + size] / np.sqrt(size) for v in qkv]
        k = [v[at + size : at + 2 * size] for v in qkv]
        v = [v[at + 2 * size : at + 3 * size] for v in qkv]
        for r in range(rows):
            scores = np.array([np.dot(q[r], k[s]) for s in range(rows)])
            e = np.exp(scores - scores.max())
            for s in range(rows):
                out[r, n * size : (n + 1) * size] += e[s] / e.sum() * v[s]
    return out


def rmc_step(x: Array, M: Array, p: dict[str, Array], heads: int) -> Array:
    """One step of the Relational Memory Core: the memory M (S, m) after the input x (D,)."""
    S, m = M.shape
    x = p["W"] @ x + p["b"]
    Z = np.concatenate([M, x[None]])
    attended = attention(Z, p, heads)
    new = np.zeros((S, m))
    for r in range(S):  # the input's own row is dropped
        z = layer_norm(Z[r] + attended[r], p["gain_1"], p["shift_1"])
        hidden = np.maximum(p["W_mlp1"] @ z + p["b_mlp1"], 0.0)
        z = layer_norm(z + p["W_mlp2"] @ hidden + p["b_mlp2"], p["gain_2"], p["shift_2"])
        gates = p["W_x"] @ x + p["b_x"] + p["W_m"] @ np.tanh(M[r]) + p["b_m"]
        i, f = gates[:m], gates[m:]
        new[r] = sigmoid(i + 0.0) * np.tanh(z) + sigmoid(f + 1.0) * M[r]
    return new


def rmc(x: Array, p: dict[str, Array], S: int, heads: int, start: Array | None = None) -> Array:
    """A sequence x (T, B, D), from `start` (B, S·m) or its own, to outputs (T, B, S·m)."""
    T, B, _ = x.shape
    m = len(p["b"])
    out = np.zeros((T, B, S * m))
    for b in range(B):
        M = np.zeros((S, m))
        for s in range(min(S, m)):
            M[s, s] = 1.0
        if start is not None:
            M = start[b].reshape(S, m)
        for t in range(T):
            M = rmc_step(x[t, b], M, p, heads)
            out[t, b] = M.reshape(-1)
    return out


def entnet_step(x: Array, h: Array, p: dict[str, Array]) -> Array:
    """One step of the Recurrent Entity Network: the slots h (N, d) after the input x (D,)."""
    s = p["W_in"] @ x
    new = np.zeros_like(h)
    for j in range(len(h)):
        g = sigmoid(np.dot(s, h[j]) + np.dot(s, p["w"][j]) + p["b_gate"][j])
        z = p["U"] @ h[j] + p["V"] @ s + p["W"] @ p["w"][j] + p["b"]
        candidate = np.array([v if v > 0 else a * v for v, a in zip(z, p["slope"], strict=True)])
        new[j] = h[j] + g * candidate
        norm = np.sqrt(sum(v * v for v in new[j]))
        if norm > 0:
            new[j] /= norm
    return new


def entnet(x: Array, p: dict[str, Array], start: Array | None = None) -> Array:
    """A sequence x (T, B, D), from `start` (B, N·d) or the slots' keys, to outputs (T, B, N·d)."""
    T, B, _ = x.shape
    N, d = p["w"].shape
    out = np.zeros((T, B, N * d))
    for b in range(B):
        h = p["w"].copy() if start is None else start[b].reshape(N, d)
        for t in range(T):
            h = entnet_step(x[t, b], h, p)
            out[t, b] = h.reshape(-1)
    return out
