"""RigLSTM: a recurrent layer for sequences longer or finer than those of training.

>>> from riglstm import RigLSTM
>>> rnn = RigLSTM(input_size=20, hidden_size=60)          # in place of nn.LSTM(20, 60)
>>> output, (h_n, c_n) = rnn(torch.randn(50, 8, 20))      # (T, B, D) -> (T, B, 60)
"""

from riglstm import command as command  # first: it is for the seconds that the others take
from riglstm.layer import VARIANTS, RigLSTM, RigLSTMCell
from riglstm.parameters import no_decay_parameters
from riglstm.scan import BackendError

__version__ = "0.1.0"

__all__ = [
    "VARIANTS",
    "BackendError",
    "RigLSTM",
    "RigLSTMCell",
    "__version__",
    "no_decay_parameters",
]
