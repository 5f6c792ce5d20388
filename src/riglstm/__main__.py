"""`python -m riglstm` is `riglstm`."""

import sys

from riglstm.lab.cli.main import main

sys.exit(main())
