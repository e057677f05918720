"""A few SVG primitives: text stays text, colours are classes that the page's style sheet decides."""

import math
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

from model_optimizer.reporting.text import shortened

WIDTH = 680
"""User units; 13 of them are the text size."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps a data interval onto a stretch of the canvas."""

    lower: float
    upper: float
    start: float
    end: float
    shape: Callable[[float], float] = float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value; values outside are drawn at the edge."""
        low, high = self.shape(self.lower), self.shape(self.upper)
        share = (self.shape(min(max(value, self.lower), self.upper)) - low) / (high - low or 1)
        return round(self.start + share * (self.end - self.start), 1)


def ticks(lower: float, upper: float, count: int = 6) -> list[float]:
    """Return round values inside [lower, upper], about `count` of them."""
    raw = (upper - lower) / count or 1
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(lower / step - 1e-9), math.floor(upper / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def text_width(text: str) -> float:
    """Return about how many user units a label takes; wide (CJK) characters take a whole em.

    Source: mean advance of Noto Sans and DejaVu Sans over strategy labels at 13 units, rounded up.
    """
    return sum(13.0 if unicodedata.east_asian_width(character) in "WF" else 7.6 for character in text)


def fitted(text: str, width: float) -> str:
    """Return a label that takes at most `width` user units, its middle left out where it is longer."""
    limit = len(text)
    while limit > 3 and text_width(shortened(text, limit)) > width:
        limit -= 1
    return shortened(text, limit)


@dataclass(slots=True)
class Canvas:
    """Collects elements and closes them into one labelled picture."""

    name: str
    """Unique on the page."""
    height: float
    parts: list[str] = field(default_factory=list)

    def line(self, start: tuple[float, float], end: tuple[float, float], css: str) -> None:
        self.parts.append(f'<line x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}" class="{css}"/>')

    def box(self, corner: tuple[float, float], size: tuple[float, float], css: str, hint: str = "") -> None:
        opening = f'<rect x="{corner[0]}" y="{corner[1]}" width="{size[0]}" height="{size[1]}" class="{css}"'
        self.parts.append(f"{opening}>{_hint(hint)}</rect>" if hint else f"{opening}/>")

    def path(self, data: str, css: str, hint: str = "") -> None:
        self.parts.append(f'<path d="{data}" class="{css}">{_hint(hint)}</path>' if hint else f'<path d="{data}" class="{css}"/>')

    def text(self, at: tuple[float, float], words: str, css: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text x="{at[0]}" y="{at[1]}" text-anchor="{anchor}" class="{css}">{escape(words)}</text>')

    def mark(self, at: tuple[float, float], shape: str, css: str, hint: str = "") -> None:
        """Draw a `circle`, `half`, `square`, `diamond` or `cross` around a point."""
        x, y = at
        data = {
            "circle": f"M{x - 5} {y}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
            "square": f"M{x - 5} {y - 5}h10v10h-10z",
            "diamond": f"M{x} {y - 8}l8 8l-8 8l-8 -8z",
            "half": f"M{x} {y - 6}a6 6 0 0 0 0 12zM{x - 6} {y}a6 6 0 1 0 12 0a6 6 0 1 0 -12 0z",
            "cross": f"M{x - 5} {y - 5}l10 10m0 -10l-10 10",
        }
        self.path(data[shape], css, hint)

    def close(self, title: str, description: str) -> str:
        """Return the picture with its title and description for people who cannot see it."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:g}" role="img"'
            f' aria-labelledby="{self.name}-title {self.name}-desc">'
            f'<title id="{self.name}-title">{escape(title)}</title><desc id="{self.name}-desc">{escape(description)}</desc>'
        )
        return head + "".join(self.parts) + "</svg>"


def _hint(text: str) -> str:
    return f"<title>{escape(text)}</title>"
