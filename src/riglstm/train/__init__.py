"""Training: one network on one task, into a folder, stopped and resumed at any moment.

`riglstm.train.supervised.fit` does it; it is not imported here, as Lightning takes seconds to load.
"""

from riglstm.train.config import Fit
from riglstm.train.folder import RunFolder

__all__ = ["Fit", "RunFolder"]
