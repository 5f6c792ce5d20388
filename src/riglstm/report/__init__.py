"""Figures and one page from run folders alone; README's table and figures from results/.

>>> from riglstm.report import report
>>> report(["runs/mnist"], "report.html")
"""

from riglstm.report.build import report
from riglstm.report.published import outdated, publish, strange

__all__ = ["outdated", "publish", "report", "strange"]
