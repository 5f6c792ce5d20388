"""The `triton` backend: a whole sequence in one launch on a GPU, forward and back; needs Triton."""

from riglstm.scan.triton import backward as backward
from riglstm.scan.triton.forward import refusal as refusal
from riglstm.scan.triton.forward import scan as scan
