"""How figures read: a few significant digits, decimal units, a real minus sign, never a bare number."""

import re

from model_optimizer.artifacts.measure import Interval, Measure

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_UNITS = {
    "ratio": "",
    "count": "",
    "perplexity": "",
    "usd_per_1k_requests": "USD per 1,000 requests",
    "tok_per_s": "tok/s",
    "nats": "nats",
    "bits": "bits",
    "usd": "USD",
    "j": "J",
    "w": "W",
}
_MINUS = re.compile(r"(?<![\w.)\]-])-(?=\.?\d)")
_DIFFERENCES = frozenset({"ratio", "count", "nats"})
"""Units whose change is read as a difference, not as a percentage."""


def number(value: float, digits: int = 3) -> str:
    """Return a value with `digits` significant digits and without exponent where that is readable."""
    if value == 0:
        return "0"
    if abs(value) >= 10**digits:
        text = f"{value:,.0f}"
    elif abs(value) < 1e-4:
        text = f"{value:.{digits - 1}e}"
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", "−")


def share(value: float) -> str:
    """Return a ratio with four decimals at most: 1.004 is the point of a perplexity ratio, 0.00042 that of a flip ratio."""
    if abs(value) < 1e-3:
        return number(value)
    return number(value if abs(value) >= 1 else round(value, 4), 4)


def times(value: float) -> str:
    """Return a ratio with two decimals, as factors of speed and size are read."""
    return f"{value:.2f}"


def signed(value: float, digits: int = 3) -> str:
    """Return a difference with its sign."""
    return number(value, digits) if value <= 0 else f"+{number(value, digits)}"


def size(num_bytes: float) -> str:
    """Return bytes in decimal units, e.g. `218 MB`."""
    for scale, unit in _BYTES:
        if abs(num_bytes) >= scale:
            return f"{number(num_bytes / scale)} {unit}"
    return f"{number(num_bytes)} B"


def duration(seconds: float) -> str:
    """Return seconds as `12 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def moment(iso: str) -> str:
    """Return an ISO 8601 time without its fraction: `2026-11-29 20:00:00`."""
    return iso[:19].replace("T", " ")


def quantity(value: float | None, unit: str) -> str:
    """Return a value with its unit; a dash where there is none."""
    if value is None:
        return "–"
    if unit == "bytes":
        return size(value)
    if unit.startswith("bytes_per_"):
        return f"{size(value)}/{unit.removeprefix('bytes_per_')}"
    if unit == "s":
        return duration(value)
    if unit == "flop_per_s":
        return f"{number(value / 1e9)} GFLOP/s"
    if unit == "ratio":
        return share(value)
    return f"{number(value)} {_UNITS.get(unit, unit.replace('_per_', '/').replace('_', ' '))}".rstrip()


def span(interval: Interval | None, unit: str) -> str:
    """Return an interval as `lower to upper`, its level named where it is not 95 %."""
    if interval is None:
        return "–"
    level = "" if interval.level == 0.95 else f" ({100 * interval.level:g} %)"
    plain = size if unit.startswith("bytes") else share if unit == "ratio" else number
    return f"{plain(interval.lower)} to {quantity(interval.upper, unit)}{level}"


def change(measure: Measure) -> str:
    """Return how a measure differs from its baseline: a difference for ratios and counts, else percent."""
    if measure.value is None or measure.baseline is None:
        return "–"
    if measure.unit in _DIFFERENCES or measure.baseline == 0:
        difference = measure.value - measure.baseline
        return f"{'+' * (difference > 0)}{share(difference)}" if measure.unit == "ratio" else signed(difference)
    return f"{signed(100 * (measure.value / measure.baseline - 1), 2)} %"


def label(name: str) -> str:
    """Return a measure's name for people: `p95_latency` becomes `p95 latency`."""
    return name.replace("_", " ")


def prose(text: str) -> str:
    """Return a reason with real minus signs before its numbers, as everywhere else in the report."""
    return _MINUS.sub("−", text)


def shortened(text: str, limit: int) -> str:
    """Return text of at most `limit` characters, its middle left out where it is longer: both ends of a label tell it apart."""
    if len(text) <= limit:
        return text
    head = limit // 2
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"
