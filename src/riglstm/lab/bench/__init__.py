"""How long a step takes beside nn.LSTM; `riglstm bench` prints it."""
