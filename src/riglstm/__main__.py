"""`python -m riglstm` is `riglstm`."""

import sys

from riglstm.cli.main import main

sys.exit(main())
