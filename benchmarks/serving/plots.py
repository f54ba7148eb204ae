"""What the plots have in common. No pyplot: no window system is touched."""

from __future__ import annotations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that can be saved; inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def bar_text(value: float) -> str:
    """What stands on a bar: two digits, or all of a larger number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}"
