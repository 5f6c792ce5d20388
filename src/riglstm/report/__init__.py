"""Figures and one page from run folders alone.

>>> from riglstm.report import report
>>> report(["runs/mnist"], "report.html")
"""

from riglstm.report.build import report

__all__ = ["report"]
