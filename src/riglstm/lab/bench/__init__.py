"""How long a step takes beside nn.LSTM; `riglstm bench` prints it."""

from riglstm.lab.bench.contestants import per_cell_loop

__all__ = ["per_cell_loop"]
