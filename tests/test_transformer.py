"""The Transformer against torch's own encoder layers, its positions, and why it does not stream."""

import math

import pytest
import torch
from torch import nn

from riglstm.models.base import summary
from riglstm.models.transformer import Transformer, positions


def test_it_equals_torchs_encoder_layers_with_copied_weights() -> None:
    torch.manual_seed(0)
    ours = Transformer(5, 16, num_layers=2, num_heads=4, ffn_size=24, dtype=torch.float64).eval()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.2 * torch.randn_like(p))
    x = torch.randn(7, 3, 5, dtype=torch.float64)
    z = ours.input(x) + positions(7, 16, x).unsqueeze(1)
    for layer in ours.layers:
        theirs = nn.TransformerEncoderLayer(16, 4, 24, norm_first=True, dtype=torch.float64).eval()
        names = {
            "qkv.": "self_attn.in_proj_",
            "attention_out.": "self_attn.out_proj.",
            "norm_attention.": "norm1.",
            "norm_ffn.": "norm2.",
            "ffn_in.": "linear1.",
            "ffn_out.": "linear2.",
        }
        state = {}
        for name, value in layer.state_dict().items():
            prefix, kind = name.rsplit(".", 1)
            state[names[prefix + "."] + kind] = value
        theirs.load_state_dict(state)
        z = theirs(z)
    torch.testing.assert_close(ours(x)[0], ours.norm(z), rtol=0, atol=1e-10)


def test_positions_are_the_sinusoids_of_the_index() -> None:
    p = positions(6, 8, torch.zeros(1, dtype=torch.float64))
    for t in range(6):
        for i in range(4):
            angle = t / 10000 ** (2 * i / 8)
            assert p[t, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert p[t, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_positions_extrapolate_and_stay_distinct() -> None:
    like = torch.zeros(1)
    short, long = positions(196, 256, like), positions(1024, 256, like)
    assert torch.equal(short, long[:196])
    assert torch.cdist(long, long).fill_diagonal_(1).min() > 0.1


def test_half_precision_positions_count_exactly() -> None:
    exact = positions(1024, 8, torch.zeros(1))
    low = positions(1024, 8, torch.zeros(1, dtype=torch.bfloat16))
    assert torch.equal(low, exact.bfloat16())


def test_a_longer_sequence_than_any_before_runs() -> None:
    output, _ = Transformer(5, 16, num_layers=1)(torch.randn(576, 1, 5))
    assert output.shape == (576, 1, 16)


def test_every_step_sees_later_steps() -> None:
    torch.manual_seed(0)
    model = Transformer(5, 16, num_layers=1).eval()
    x = torch.randn(6, 1, 5)
    changed = x.clone()
    changed[-1] += 1
    assert (model(x)[0][0] - model(changed)[0][0]).abs().max() > 1e-4


def test_it_says_why_it_does_not_stream_when_a_state_is_passed() -> None:
    model = Transformer(5, 16, num_layers=1)
    x = torch.randn(6, 2, 5)
    _, state = model(x, model.initial_state(2))
    with pytest.raises(ValueError, match=r"does not stream: every output attends to every step"):
        model(x, state)


def test_a_classifier_reads_the_mean_over_steps() -> None:
    for batch_first in (False, True):
        model = Transformer(5, 16, num_layers=1, batch_first=batch_first).eval()
        output, _ = model(torch.randn(6, 2, 5))
        assert torch.equal(summary(model, output), output.mean(dim=1 if batch_first else 0))


def test_trace_shows_the_attention_of_every_layer_and_head() -> None:
    torch.manual_seed(0)
    model = Transformer(5, 16, num_layers=2, num_heads=4, dtype=torch.float64).eval()
    x = torch.randn(6, 2, 5, dtype=torch.float64)
    traces = model.trace(x)
    assert [trace.layer for trace in traces] == [0, 1]
    torch.testing.assert_close(model.norm(traces[-1].output), model(x)[0])
    layer, z = model.layers[1], traces[0].output.transpose(0, 1)
    views = traces[1].views
    assert views is not None
    assert views.shape == (6, 2, 4, 6)
    _, _, v = layer._heads(z)
    a = torch.einsum("tbhs,bhse->bthe", views, v).flatten(2)
    z = z + layer.attention_out(a)
    z = z + layer.ffn_out(layer.ffn_in(layer.norm_ffn(z)).relu())
    torch.testing.assert_close(traces[1].output, z.transpose(0, 1))


def test_the_default_dropout_is_a_tenth() -> None:
    model = Transformer(5, 16)
    assert model.dropout == 0.1
    assert [layer.dropout for layer in model.layers] == [0.1] * 4


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    model, x = Transformer(5, 16, num_layers=1, dropout=0.5), torch.randn(6, 2, 5)
    assert not torch.equal(model(x)[0], model(x)[0])
    model.eval()
    assert torch.equal(model(x)[0], model(x)[0])


def test_parameters_at_the_specified_size() -> None:
    model = Transformer(600, 256)
    layers = sum(p.numel() for p in model.layers.parameters())
    assert layers == 3_159_040
    assert round(layers / 1e6, 1) == 3.2
    assert sum(p.numel() for p in model.parameters()) == 3_313_408


@pytest.mark.parametrize(
    ("hidden", "options", "message"),
    [
        (20, {}, "multiple of num_heads = 8, got 20; take hidden_size=16 or 24"),
        (15, {"num_heads": 3}, "must be even, as positions are pairs.*take hidden_size=18"),
        (16, {"dropout": 1.5}, r"dropout must be a probability in \[0, 1\], got 1.5"),
        (16, {"num_layers": 0}, "num_layers must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_options_are_refused(hidden: int, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Transformer(5, hidden, **options)
