"""Figures and one page from run folders alone; README's table and figures from results/.

>>> from riglstm.lab.report import report
>>> report(["runs/mnist"], "report.html")
"""

from riglstm.lab.report.page import report
from riglstm.lab.report.readme import outdated, publish

__all__ = ["outdated", "publish", "report"]
