"""RigLSTM in NumPy float64, one loop per index: a witness written from the paper alone.

Shapes: T steps, B samples, D input size, N cells, K views, d cell size. Weights carry the
paper's names; gates are in the order f, i, o, g and their columns in the order of Eq. (17).
"""

import numpy as np

Array = np.ndarray
RULES = ("top", "all", "random", "soft")


def transform(x_t: Array, p: dict[str, Array], K: int, d: int) -> Array:
    """Before Eq. (13): the views x^k of one input (D,), as (K, d)."""
    if "W_in" not in p:
        assert x_t.size == K * d, f"without W_in, D must be K * d = {K * d}, got {x_t.size}"
    x = np.zeros((K, d))
    for k in range(K):
        x[k] = p["W_in"][k] @ x_t if "W_in" in p else x_t[k * d : (k + 1) * d]
        x[k] += p["b_in"][k] if "b_in" in p else 0.0
    return x


def inner_products(h: Array, v: Array) -> Array:
    """Eq. (13) with v the views; before Eq. (16), with v the hidden states: entry [j, k]."""
    s = np.zeros((len(h), len(v)))
    for j in range(len(h)):
        for k in range(len(v)):
            s[j, k] = np.dot(h[j], v[k])
    return s


def cell_scores(s: Array) -> Array:
    """Eq. (14): s_j, the sum over k of the view scores (N, K), as (N,)."""
    s_j = np.zeros(len(s))
    for j in range(len(s)):
        for k in range(s.shape[1]):
            s_j[j] += s[j, k]
    return s_j


def softmax(z: Array) -> Array:
    """Eq. (21) and the soft ablations: normalised exponentials of a vector."""
    if z.size == 0:  # a lone cell has no peers to weigh
        return z
    e = np.exp(z - z.max())
    a: Array = e / e.sum()
    return a


def weigh(rule: str, s: Array, count: int, candidates: list[int]) -> Array:
    """Eqs. (15)-(16), the case distinction: a weight per entry of s, 0 outside candidates."""
    weights = np.zeros(len(s))
    if rule == "soft":
        weights[candidates] = softmax(s[candidates])
        return weights

    def rank(i: int) -> tuple[bool, float, int]:
        # NaN is neither above nor below a number, so it gets a place of its own, ahead of all.
        # The index decides last: a zero state ties every score, and a tie needs one answer.
        nan = bool(np.isnan(s[i]))
        return not nan, 0.0 if nan else -float(s[i]), i

    chosen = candidates if rule == "all" else sorted(candidates, key=rank)[:count]
    weights[chosen] = 1.0
    return weights


def weighted(vectors: Array, weights: Array) -> Array:
    """Eqs. (15)-(16), the outcome: x^{k,j} or h^{k,j} over k, for one cell j."""
    return np.array([weights[k] * vectors[k] for k in range(len(vectors))])


def sigmoid(z: Array) -> Array:
    """Eqs. (1)-(3): the logistic function, in a form that cannot overflow."""
    y: Array = np.exp(-np.logaddexp(0.0, -z))
    return y


def lstm(H: Array, c_prev: Array, W: Array, b: Array) -> tuple[Array, Array]:
    """Eqs. (1)-(6), called by (18): the proposal h~ and the memory c of one cell."""
    f = sigmoid(W[0] @ H + b[0])
    i = sigmoid(W[1] @ H + b[1])
    o = sigmoid(W[2] @ H + b[2])
    g = np.tanh(W[3] @ H + b[3])
    c = f * c_prev + i * g
    return o * np.tanh(c), c


def query(x_j: Array, h_j: Array, W_q: Array, j: int) -> Array:
    """Eq. (19): W_q Q of cell j, where Q leaves out the cell's own hidden state."""
    K, d = x_j.shape
    own = slice((K + j) * d, (K + j + 1) * d)
    assert not W_q[:, own].any(), f"W_q[{j}] must be zero in columns {own.start}:{own.stop}"
    Q = np.concatenate([*x_j, *h_j[:j], *h_j[j + 1 :]])
    q: Array = np.delete(W_q, own, axis=1) @ Q
    return q


def mix(h_prev: Array, h_tilde: Array, q: Array, scale: float, bias: float) -> tuple[Array, float]:
    """Eqs. (20)-(21): the mixed state and the weight of the old one."""
    pair = np.stack([h_prev, h_tilde], axis=1)  # (d, 2)
    a = softmax(scale * (pair.T @ q) + np.array([0.0, bias]))
    return pair @ a, float(a[0])


def run(
    x: Array,
    h: Array,
    c: Array,
    p: dict[str, Array],
    *,
    K_a: int,
    K_x: int,
    K_h: int,
    cells: str = "top",
    views: str = "top",
    peers: str = "top",
    soft_update: bool = True,
    update_scale: float = 1.0,
    noise: dict[str, Array] | None = None,
    live: Array | None = None,
    reset: Array | None = None,
) -> dict[str, Array]:
    """Eqs. (13)-(21) over a sequence: x (T, B, D) from the state h, c (B, N, d)."""
    assert cells in RULES[:3], f"cells must be one of {RULES[:3]}, got {cells!r}"
    assert {views, peers} <= {*RULES}, f"views, peers must be in {RULES}, got {views!r}, {peers!r}"
    x, h, c = (np.array(value, dtype=np.float64) for value in (x, h, c))
    p = {name: np.asarray(value, dtype=np.float64) for name, value in p.items()}
    (T, B, _), (_, N, d) = x.shape, h.shape
    K = len(p["W_in"]) if "W_in" in p else p["W_gates"].shape[3] // d - N
    b_gates = p.get("b_gates", np.zeros((N, 4, d)))
    update_bias = p.get("update_bias", np.zeros(N))
    sizes = {"output": (N, d), "views": (N, K), "peers": (N, N), "keep": (N,)}
    sizes |= {"active": (N,), "view_scores": (N, K), "peer_scores": (N, N)}
    out = {name: np.zeros((T, B, *size)) for name, size in sizes.items()}

    for t in range(T):
        for b in range(B):
            if reset is not None and reset[t, b]:
                h[b], c[b] = 0.0, 0.0
            x_t = transform(x[t, b], p, K, d)
            h_prev = h[b].copy()  # a cell reads its peers as they were before any of them moved
            # Eq. (13) prints h_t, which these scores help to make: only h_{t-1} exists here.
            s_x = inner_products(h_prev, x_t)
            s_h = inner_products(h_prev, h_prev)
            # A random choice is the best of drawn scores.
            drawn = {name: np.asarray(value)[t, b] for name, value in (noise or {}).items()}
            by_cell = drawn["cells"] if cells == "random" else cell_scores(s_x)
            by_view = drawn["views"] if views == "random" else s_x
            by_peer = drawn["peers"] if peers == "random" else s_h

            active = weigh(cells, by_cell, K_a, list(range(N)))
            if live is not None and not live[t, b]:
                active[:] = 0.0
            for j in range(N):
                w_x = weigh(views, by_view[j], K_x, list(range(K)))
                w_h = weigh(peers, by_peer[j], K_h, [i for i in range(N) if i != j])
                w_h[j] = 1.0
                keep = 1.0
                if active[j]:
                    x_j, h_j = weighted(x_t, w_x), weighted(h_prev, w_h)
                    H = np.concatenate([*x_j, *h_j])  # Eq. (17)
                    h[b, j], c[b, j] = lstm(H, c[b, j], p["W_gates"][j], b_gates[j])
                    keep = 0.0
                    if soft_update:
                        q = query(x_j, h_j, p["W_q"][j], j)
                        h[b, j], keep = mix(h_prev[j], h[b, j], q, update_scale, update_bias[j])
                out["views"][t, b, j], out["peers"][t, b, j] = w_x, w_h
                out["keep"][t, b, j] = keep
            out["output"][t, b], out["active"][t, b] = h[b], active
            out["view_scores"][t, b], out["peer_scores"][t, b] = s_x, s_h
    return out | {"h": h, "c": c, "active": out["active"].astype(bool)}
