"""Training: one network on one task, into a folder, stopped and resumed at any moment.

`riglstm.lab.train.loop.fit` does it; not imported here, as Lightning takes seconds to load.
"""

from riglstm.lab.train.config import Fit
from riglstm.lab.train.folder import RunFolder

__all__ = ["Fit", "RunFolder"]
