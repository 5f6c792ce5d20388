"""All cells of a step at once, and a backward pass written by hand.

Both passes are custom operators: torch.compile sees each as one node, so a sequence of any length
compiles at once and its data-dependent row counts stay out of the graph.
"""

from riglstm.scan.batched import backward as backward
from riglstm.scan.batched.forward import scan as scan
