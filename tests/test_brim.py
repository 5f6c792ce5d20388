"""BRIM: against the NumPy version, and who sees what of whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rim_oracle
from riglstm.models.base import State
from riglstm.models.brim import BRIM, PRESETS
from test_rim import (
    TOL,
    a_state,
    check_compiled_step,
    check_gradients,
    compiles,
    known_dropout,
    ops_of_a_step,
    oracle_weights,
    random,
    same,
    scramble,
    seeded,
    stored,
)

SMALL = {"num_cells": (4, 2), "active_cells": (2, 1), "key_size": 3, "comm_size": 2}


def a_brim(gen: torch.Generator, D: int = 5, H: int = 8, **options: Any) -> BRIM:
    model = BRIM(D, H, dtype=torch.float64, **{**SMALL, **options})
    scramble(model, gen)
    return model.eval()


def run_oracle(
    model: BRIM,
    x: Tensor,
    state: State,
    held: tuple[np.ndarray, np.ndarray] | None = None,
    weights: tuple[rim_oracle.Weights, rim_oracle.Weights] | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    N = model.num_cells
    h, c = (
        (
            s[0].detach().unflatten(1, (N[0], -1)).numpy(),
            s[1].detach().unflatten(1, (N[1], -1)).numpy(),
        )
        for s in state
    )
    p = weights or (oracle_weights(model.lower), oracle_weights(model.upper))
    K_a = model.active_cells[0], model.active_cells[1]
    return rim_oracle.run_brim(x.detach().numpy(), h, c, p, K_a, held)


def check_against_numpy(model: BRIM, x: Tensor, state: State) -> None:
    want = run_oracle(model, x, state)
    output, (h, c) = model(x, state)
    traces = model.trace(x, state)
    T, B = x.shape[:2]
    for layer, (trace, layer_want) in enumerate(zip(traces, want, strict=True)):
        assert trace.layer == layer
        assert trace.active is not None
        assert trace.views is not None
        assert trace.peers is not None
        assert np.array_equal(trace.active.numpy(), layer_want["active"])
        same(trace.output, layer_want["h"].reshape(T, B, -1))
        same(trace.views, layer_want["views"])
        same(trace.peers, layer_want["peers"])
        same(h[layer], layer_want["h"][-1].reshape(B, -1))
        same(c[layer], layer_want["c"][-1].reshape(B, -1))
    same(output, want[1]["h"].reshape(T, B, -1))


@pytest.mark.parametrize("seed", range(5))
def test_equals_numpy(seed: int) -> None:
    gen = seeded(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=gen))

    N = (1, 2, 3, 4, 6)[draw(0, 4)], (1, 2, 3, 4, 6)[draw(0, 4)]
    options = {
        "num_cells": N,
        "active_cells": (draw(1, N[0]), draw(1, N[1])),
        "input_heads": (1, 2, 4)[draw(0, 2)],
        "key_size": draw(1, 4),
        "comm_heads": draw(1, 3),
        "comm_size": draw(1, 3),
    }
    model = a_brim(gen, D=draw(1, 6), H=12, **options)
    B = draw(1, 3)
    check_against_numpy(model, random(gen, 4, B, model.input_size), a_state(gen, model, B))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_equal_numpy_from_the_zero_state(preset: str) -> None:
    gen = seeded(9)
    model = a_brim(gen, H=12, **PRESETS[preset])
    check_against_numpy(model, random(gen, 4, 2, 5), model.initial_state(2))


def test_exactly_the_active_cells_move_and_the_others_keep_h_and_c() -> None:
    gen = seeded(2)
    model = a_brim(gen, num_cells=(4, 4), active_cells=(2, 3)).train()
    x, state = random(gen, 8, 3, 5), a_state(gen, model, 3)
    torch.manual_seed(0)
    traces = model.trace(x, state)
    for trace, K_a in zip(traces, (2, 3), strict=True):
        assert trace.active is not None
        assert (trace.active.sum(dim=2) == K_a).all()
    torch.manual_seed(0)
    for t, x_t in enumerate(x):
        _, after = model.step(x_t, state)
        for old, new in zip(state, after, strict=True):
            moved = (old != new).unflatten(2, (4, 2)).any(dim=3)
            for layer, trace in enumerate(traces):
                assert trace.active is not None
                assert torch.equal(moved[layer], trace.active[t])
        state = after


def test_the_mean_null_weight_of_the_heads_decides() -> None:
    gen = seeded(3)
    model = a_brim(gen)
    for trace in model.trace(random(gen, 20, 3, 5), a_state(gen, model, 3)):
        assert trace.active is not None
        assert trace.views is not None
        null = trace.views[..., 0]
        sleeps = null.masked_fill(trace.active, 1).amin(dim=2)
        wakes = null.masked_fill(~trace.active, 0).amax(dim=2)
        assert (wakes < sleeps).all()
        assert len(set(map(tuple, trace.active.flatten(0, 1).tolist()))) > 1


def test_the_tie_at_the_zero_state_goes_to_the_lower_index() -> None:
    traces = BRIM(5, 12).trace(torch.randn(1, 3, 5))
    for trace, (N, K_a) in zip(traces, ((6, 4), (3, 2)), strict=True):
        assert trace.view_scores is not None
        assert not trace.view_scores.any()
        assert trace.active is not None
        assert trace.active[0].tolist() == [[True] * K_a + [False] * (N - K_a)] * 3


def slots_seen(model: BRIM, x: Tensor, state: State) -> dict[str, tuple[Tensor, ...]]:
    """What each layer was given to look at in one step."""
    seen: dict[str, tuple[Tensor, ...]] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, name=name: seen.__setitem__(name, tuple(args[0]))
        )
        for name, layer in (("lower", model.lower), ("upper", model.upper))
    ]
    model.step(x, state)
    for hook in hooks:
        hook.remove()
    return seen


def test_the_lower_layer_sees_the_input_and_the_old_upper_state() -> None:
    gen = seeded(4)
    model = a_brim(gen)
    x, state = random(gen, 3, 5), a_state(gen, model, 3)
    seen = slots_seen(model, x, state)["lower"]
    assert len(seen) == 2
    assert torch.equal(seen[0], x)
    assert torch.equal(seen[1], state[0][1])


def test_the_upper_layer_sees_the_new_lower_state_with_sleeping_cells_included() -> None:
    gen = seeded(5)
    model = a_brim(gen)
    x, state = random(gen, 3, 5), a_state(gen, model, 3)
    (seen,) = slots_seen(model, x, state)["upper"]
    _, (h, _) = model.step(x, state)
    assert torch.equal(seen, h[0])
    active = model.trace(x.unsqueeze(0), state)[0].active
    assert active is not None
    asleep = ~active[0]
    old, new = (s[0].unflatten(1, (4, 2)) for s in (state[0], seen.unsqueeze(0)))
    assert torch.equal(new[asleep], old[asleep])
    assert new[asleep].all()


def test_top_down_enters_the_lower_layer_alone() -> None:
    """The slot's maps at zero: the lower layer no longer depends on the upper one's state."""
    gen = seeded(6)
    model = a_brim(gen)
    x, (h, c) = random(gen, 3, 5), a_state(gen, model, 3)
    other = torch.stack((h[0], random(gen, 3, 8)))
    assert not torch.equal(model.step(x, (h, c))[1][0][0], model.step(x, (other, c))[1][0][0])
    assert len(model.upper.input_attention.keys) == len(model.upper.input_attention.values) == 1
    with torch.no_grad():
        for maps in (model.lower.input_attention.keys, model.lower.input_attention.values):
            maps[1].zero_()
    assert torch.equal(model.step(x, (h, c))[1][0][0], model.step(x, (other, c))[1][0][0])


def test_the_input_reaches_the_upper_layer_through_the_lower_one_alone() -> None:
    gen = seeded(7)
    model = a_brim(gen)
    state = a_state(gen, model, 3)
    with torch.no_grad():
        model.lower.input_attention.keys[0].zero_()
        model.lower.input_attention.values[0].zero_()
    outputs = [model.step(random(gen, 3, 5), state)[0] for _ in range(2)]
    assert torch.equal(*outputs)


def test_a_sleeping_cells_lstm_gets_no_gradient_and_its_messages_learn() -> None:
    gen = seeded(8)
    model = a_brim(gen, num_cells=(4, 4), active_cells=(2, 2))
    x = random(gen, 1, 5)
    state = tuple(s.requires_grad_() for s in a_state(gen, model, 1))
    traces = model.trace(x.unsqueeze(0), state)
    _, (h, c) = model.step(x, state)
    (h.sum() + c.sum()).backward()
    for trace, layer in zip(traces, (model.lower, model.upper), strict=True):
        assert trace.active is not None
        active = trace.active[0, 0]
        lstm, qkv = layer.lstm, layer.communication.qkv.weight
        for parameter in (lstm.weight, lstm.bias_ih, lstm.bias_hh):
            assert parameter is not None
            assert parameter.grad is not None
            assert torch.equal(parameter.grad.flatten(1).any(dim=1), active)
        assert qkv.grad is not None
        q, k, v = qkv.grad.unflatten(2, (4, -1)).chunk(3, dim=3)
        assert torch.equal(q.flatten(1).any(dim=1), active)
        assert k.flatten(1).any(dim=1).all()
        assert v.flatten(1).any(dim=1).all()


def test_gradients_equal_central_differences_with_sleeping_candidates_held() -> None:
    """As for RIM: the candidates of sleeping cells are constants of the backward pass."""
    gen = seeded(10)
    model = a_brim(gen, input_heads=2, comm_heads=2)
    x = random(gen, 3, 2, 5).requires_grad_()
    state = tuple(s.requires_grad_() for s in a_state(gen, model, 2))
    first = run_oracle(model, x, state)
    held = first[0]["candidates"], first[1]["candidates"]
    weight = random(gen, *first[1]["h"].shape)

    def loss() -> Tensor:
        y, (_, c) = model(x, state)
        return (y * weight.flatten(2)).sum() + c.sum()

    def oracle_loss() -> float:
        now = run_oracle(model, x, state, held)
        for layer in range(2):
            assert np.array_equal(now[layer]["active"], first[layer]["active"])
        memory = now[0]["c"][-1].sum() + now[1]["c"][-1].sum()
        return float((now[1]["h"] * weight.numpy()).sum() + memory)

    assert abs(loss().item() - oracle_loss()) < TOL
    check_gradients([x, *state, *model.parameters()], loss, oracle_loss)


def test_gradcheck_with_every_cell_awake() -> None:
    gen = seeded(11)
    model = a_brim(gen, num_cells=(2, 2), active_cells=(2, 2), input_heads=2, comm_heads=2)
    x = random(gen, 2, 2, 5).requires_grad_()
    state = tuple(s.requires_grad_() for s in a_state(gen, model, 2))
    names = [name for name, _ in model.named_parameters()]

    def run(x: Tensor, h: Tensor, c: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        replaced = dict(zip(names, values, strict=True))
        y, state = torch.func.functional_call(model, replaced, (x, (h, c)))
        return y, *state

    assert torch.autograd.gradcheck(run, (x, *state, *model.parameters()), fast_mode=True)


def test_dropout_acts_in_training_only() -> None:
    gen = seeded(12)
    model, plain = a_brim(gen, dropout=0.5), a_brim(gen, dropout=0.0)
    plain.load_state_dict(model.state_dict())
    x, state = random(gen, 4, 2, 5), a_state(gen, model, 2)
    want = plain(x, state)[0]
    assert torch.equal(model(x, state)[0], want)
    model.train()
    assert not torch.equal(model(x, state)[0], model(x, state)[0])


def test_steps_with_carried_state_equal_one_long_run() -> None:
    gen = seeded(13)
    model = a_brim(gen)
    x = random(gen, 7, 2, 5)
    whole, last = model(x)
    state = model.initial_state(2)
    pieces = []
    for piece in x.split((1, 4, 2)):
        y, state = model(piece, state)
        pieces.append(y)
    assert torch.equal(torch.cat(pieces), whole)
    for got, want in zip(state, last, strict=True):
        assert torch.equal(got, want)


@pytest.mark.slow
@compiles
def test_compiled_steps_equal_eager_ones_forward_and_backward() -> None:
    gen = seeded(14)
    model = a_brim(gen).train()
    check_compiled_step(model, random(gen, 3, 2, 5), a_state(gen, model, 2))


def test_a_step_runs_without_reading_any_value() -> None:
    model = BRIM(5, 12, device="meta")
    output, state = model.step(torch.empty(2, 5, device="meta"), model.initial_state(2))
    assert output.shape == (2, 12)
    assert [s.shape for s in state] == [(2, 2, 12)] * 2


def test_a_step_is_as_many_operations_for_any_number_of_cells() -> None:
    counts = {
        ops_of_a_step(BRIM(5, 12, num_cells=(N, N), active_cells=(N - 1, N - 1)), 5) for N in (2, 6)
    }
    assert len(counts) == 1


def test_trace_says_what_forward_did_in_each_layer() -> None:
    gen = seeded(15)
    model = a_brim(gen, batch_first=True)
    x, state = random(gen, 3, 6, 5), a_state(gen, model, 3)
    output, (h, _) = model(x, state)
    lower, upper = model.trace(x, state)
    assert torch.equal(upper.output.transpose(0, 1), output)
    assert torch.equal(torch.stack((lower.output[-1], upper.output[-1])), h)
    for trace, N, K in ((lower, 4, 3), (upper, 2, 2)):
        assert trace.active is not None
        assert trace.views is not None
        assert trace.peers is not None
        assert trace.view_scores is not None
        assert trace.peer_scores is not None
        assert trace.keep is not None
        assert trace.active.shape == trace.keep.shape == (6, 3, N)
        assert trace.views.shape == trace.view_scores.shape == (6, 3, N, K)
        assert trace.peers.shape == trace.peer_scores.shape == (6, 3, N, N)
        assert (trace.views.sum(dim=3) - 1).abs().max() < TOL
        assert (trace.peers.sum(dim=3) - 1).abs().max() < TOL
        assert torch.equal(trace.keep == 1, ~trace.active)


def test_scores_and_state_stay_in_float32_under_autocast() -> None:
    model = BRIM(5, 12)
    x = torch.randn(4, 2, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state = model(x)
        traces = model.trace(x)
    assert {v.dtype for v in (output, *state)} == {torch.float32}
    for trace in traces:
        assert trace.view_scores is not None
        assert trace.view_scores.dtype == torch.float32
    output.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def layer_counts(N: int, slots: int, heads: int, key_size: int) -> dict[str, int]:
    """A layer of 300: its parts, and what the source of the specification's figures adds."""
    H, d = 300, 300 // N
    null = H * heads * key_size + H * 4 * d
    return {
        "attention": N * d * heads * key_size + slots * null,
        "lstm": N * 4 * d * (4 * d + d) + 2 * 4 * H,
        "communication": 3 * N * d * 4 * 32 + 2 * (d * 4 * 32 + d),
        "null": null,
        "gate": 4 * d * 4 * d + 4 * d,
        "off_block": 4 * H * (4 * H + H) - N * 4 * d * (4 * d + d),
    }


@pytest.mark.parametrize(
    ("preset", "count", "table", "effective", "dense"),
    [("mnist", 1_797_900, 2 * 300, 2.34, 5.04), ("cifar", 1_089_000, 3 * 256 * 100, 1.39, 4.39)],
)
def test_presets_have_the_specifications_parameters(
    preset: str, count: int, table: int, effective: float, dense: float
) -> None:
    """The specification's "effective" 2.34M and 1.39M are ours and what BRIM's source never trains.

    They count table (2 x 300 pixels; 3 tables of 256 x 100) and readout (300 -> 10), and in both
    layers the null slot's key and value maps (MNIST 333,600, CIFAR 139,200) and the gate of the
    input attention, 4d -> 4d with bias (200,600 and 80,400; its size is inferred from the
    remainder). Without these, what learns is 1.80M and 1.17M with table and readout. Its "stored"
    figures add the off-block weights of the LSTMs. None of these is stored here.
    """
    options = PRESETS[preset]
    layers = [
        layer_counts(N, slots, options["input_heads"], options["key_size"])
        for N, slots in zip(options["num_cells"], (2, 1), strict=True)
    ]
    core = stored(BRIM(300, 300, **options))
    parts = ("attention", "lstm", "communication")
    assert core == sum(layer[part] for layer in layers for part in parts) == count
    around = table + 300 * 10 + 10
    untrained = sum(layer["null"] + layer["gate"] for layer in layers)
    assert round((core + around + untrained) / 1e6, 2) == effective
    off_block = sum(layer["off_block"] for layer in layers)
    assert round((core + around + untrained + off_block) / 1e6, 2) == dense


@pytest.mark.parametrize("preset", PRESETS)
def test_every_stored_parameter_learns(preset: str) -> None:
    gen = seeded(16)
    model = BRIM(6, 24, dtype=torch.float64, **PRESETS[preset])
    scramble(model, gen)
    # From random states, so that every cell of both layers wakes in some sample of the first step.
    model(random(gen, 4, 32, 6), a_state(gen, model, 32))[0].square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        rows = parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad.unsqueeze(0)
        assert rows.any(dim=1).all(), name


def test_start_values_are_the_specifications() -> None:
    model = BRIM(300, 300)
    for layer in (model.lower, model.upper):
        for parameter in layer.lstm.parameters():
            assert 0.9 * 300**-0.5 < parameter.abs().max() <= 300**-0.5
        attention = layer.input_attention
        for weight in (attention.query.weight, *attention.keys, *attention.values):
            assert abs(weight.std().item() - 0.01) < 2e-4


def test_reset_parameters_draws_every_parameter_anew() -> None:
    model = BRIM(5, 12)
    before = [p.detach().clone() for p in model.parameters()]
    model.reset_parameters()
    for old, new in zip(before, model.parameters(), strict=True):
        assert (old != new).all()


def test_the_presets_are_the_authors_two_set_ups() -> None:
    assert PRESETS == {
        "mnist": {"num_cells": (6, 3), "active_cells": (4, 2), "input_heads": 4, "key_size": 64},
        "cifar": {"num_cells": (6, 6), "active_cells": (4, 4), "input_heads": 1, "key_size": 32},
    }


def test_the_default_dropout_is_a_tenth_in_both_layers() -> None:
    model = BRIM(5, 12)
    for layer in (model.lower, model.upper):
        assert layer.dropout == layer.communication.dropout == 0.1


def test_dropout_falls_on_what_cells_take_in_and_before_the_tanh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gen = seeded(17)
    model = a_brim(gen, dropout=0.3, num_cells=(4, 2)).train()
    mask = known_dropout(monkeypatch)
    x, state = random(gen, 3, 2, 5), a_state(gen, model, 2)
    layers = []
    for layer, (N, d) in ((model.lower, (4, 2)), (model.upper, (2, 4))):
        p = oracle_weights(layer)
        layers.append(p | {"drop_u": mask(N, 4 * d), "drop_update": mask(N, d)})
    want = run_oracle(model, x, state, weights=(layers[0], layers[1]))
    same(model(x, state)[0], want[1]["h"].reshape(3, 2, -1))


def test_the_default_is_the_mnist_preset() -> None:
    want = BRIM(5, 12, **PRESETS["mnist"])
    got = BRIM(5, 12)
    assert [p.shape for p in got.parameters()] == [p.shape for p in want.parameters()]
    assert (got.num_cells, got.active_cells) == (want.num_cells, want.active_cells)
    assert "5, 12, num_cells=(6, 3), active_cells=(4, 2)" in repr(got)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_size": 0}, r"input_size must be a whole number of at least 1, got 0"),
        ({"hidden_size": 9}, r"multiple of num_cells = 6, got 9; take hidden_size=6 or 12"),
        ({"num_cells": (6, 5)}, r"multiple of num_cells = 5, got 12; take hidden_size=10 or 15"),
        ({"num_cells": 6}, r"num_cells must be a pair, .* got 6; give it as \(6, 3\)"),
        ({"num_cells": (6, 3, 2)}, r"num_cells must be a pair, .* got \(6, 3, 2\)"),
        ({"active_cells": (4,)}, r"active_cells must be a pair, .* got \(4,\)"),
        ({"active_cells": (4, 4)}, r"active_cells must be .* = \[1, 3\], got 4"),
        ({"input_heads": 3}, r"input_heads must divide .* = 8 .* num_cells = 6, got 3; take 1, 2"),
        ({"input_heads": 0}, r"input_heads must be a whole number of at least 1, got 0"),
        ({"key_size": 0}, r"key_size must be a whole number of at least 1, got 0"),
        ({"comm_heads": 0}, r"comm_heads must be a whole number of at least 1, got 0"),
        ({"comm_size": 0}, r"comm_size must be a whole number of at least 1, got 0"),
        ({"dropout": -0.1}, r"dropout must be a probability in \[0, 1\], got -0.1"),
    ],
)
def test_errors_say_expected_got_and_the_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BRIM(**{"input_size": 5, "hidden_size": 12, **options})


def test_a_wrong_input_or_state_is_refused() -> None:
    model = BRIM(5, 12)
    x, (h, c) = torch.randn(3, 2, 5), model.initial_state(2)
    for call in (model, model.trace):
        with pytest.raises(ValueError, match=r"input_size = 5, got shape \(3, 2, 4\)"):
            call(x[..., :4])
        with pytest.raises(ValueError, match=r"the state must be a tuple of tensors of shapes"):
            call(x, (h[:1], c[:1]))
