"""The figures of the paper's tables, as printed there.

Keys are ours: a table; then the setting that a model was trained in and the model's row; then the
condition that it was tested in. Figures are text, so that a table shows the digits that the paper
has; `value` gives the number. A test compares every one with the paper's LaTeX source.
"""

from __future__ import annotations

from typing import TypeAlias

Figures: TypeAlias = dict[tuple[str, str], dict[str, str]]
"""By (setting, row), the figure in each condition."""


def _figures(printed: str) -> Figures:
    """A table's figures; above those of a setting stand `in`, its name and the conditions."""
    found: Figures = {}
    for row, *cells in filter(None, map(str.split, printed.splitlines())):
        if row == "in":
            setting, *conditions = cells
        else:
            found[setting, row] = dict(zip(conditions, cells, strict=True))
    return found


PAPER: dict[str, Figures] = {
    # Test accuracy in percent.
    "mnist": _figures("""
        in 14x14     16x16 19x19 24x24
        lstm         84.5  52.2  21.9
        rim          90.0  73.4  38.1
        entnet       89.2  52.4  23.5
        rmc          89.58 54.23 27.75
        transformer  91.2  51.6  22.9
        gridlstm     88.32 38.1  20.84
        brim         88.6  74.2  51.4
        riglstm      89.50 80.71 59.60
    """),
    "cifar": _figures("""
        in 16x16     19x19 24x24 32x32
        lstm         54.4  44.0  32.2
        rim          56.9  51.4  40.1
        rmc          49.9  44.3  31.3
        transformer  58.5  50.4  43.6
        gridlstm     56.6  46.4  35.3
        brim         60.1  57.7  52.2
        riglstm      60.5  59.5  54.9
    """),
    "ablation": _figures("""
        in 14x14                16x16 19x19 24x24
        riglstm                 89.50 80.71 59.60
        no_input_trans          86.32 55.28 35.75
        all_cells               91.07 77.13 54.01
        rand_cells              84.13 73.27 50.39
        all_inputs              85.48 71.43 50.61
        rand_inputs             83.5  70.26 48.84
        soft_inputs             86.74 73.29 53.97
        all_h                   84.73 71.2  49.71
        rand_h                  85.24 73.56 48.35
        soft_h                  87.35 74.83 51.38
        no_soft_state_updating  90.34 75.86 54.44
    """),
    # Roll-out BCE, "in percent", the best of five runs; the normalisation is not printed.
    "balls": _figures("""
        in 4      4     678   curtain
        rim       32.37 57.11 34.81
        entnet    35.37 66.63 36.76
        lstm      39.23 72.76 43.99
        gridlstm  38.36 72.02 43.22
        riglstm   30.52 49.19 31.72

        in 678    678   4     curtain
        rim       32.64 44.29 33.71
        entnet    34.91 53.99 41.76
        lstm      28.79 54.53 51.73
        gridlstm  37.36 58.1  47.45
        riglstm   31.53 42.64 33.51
    """),
    # Test accuracy in percent.
    "copying": _figures("""
        in M=1    P=100 P=200 P=400
        lstm      45.38 25.19 16.09
        gridlstm  50.26 28.43 20.36
        rim       97.75 95.14 84.85
        riglstm   99.06 98.89 97.66

        in M=2    P=100 P=200 P=400
        lstm      29.74 11.51 10.70
        gridlstm  31.25 15.37 14.26
        rim       94.45 89.30 79.59
        riglstm   98.28 95.43 92.63

        in M=4    P=100 P=200 P=400
        lstm      25.07 12.81 10.06
        gridlstm  29.33 15.94 12.11
        rim       75.91 70.80 63.23
        riglstm   95.61 92.46 89.95

        in M=8    P=100 P=200 P=400
        lstm      18.52 11.74 10.07
        gridlstm  21.25 14.09 12.75
        rim       65.46 52.26 42.27
        riglstm   90.24 87.95 84.59
    """),
    # Inference on one NVIDIA Tesla V100, batches of 64: milliseconds, parameters, memory.
    "complexity": _figures("""
        in B=64  19x19  24x24  32x32  parameters memory
        lstm     66.4   93.5   149.1  2.8M       1621M
        rim      661.2  945.5  1502.4 3.0M       2604M
        riglstm  1133.2 1590.4 2550.2 3.6M       1915M
    """),
}


def value(printed: str) -> float:
    """The number that was printed; "M" stands for a million, or a megabyte."""
    return float(printed[:-1]) * 1e6 if printed.endswith("M") else float(printed)
