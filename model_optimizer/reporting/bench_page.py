"""Draws what `bench` found as one self-contained page, in the report's style."""

from collections.abc import Iterable
from html import escape
from pathlib import Path

from model_optimizer.measurement.bench_report import BenchReport, LatencyFigure, LoadResult, Percentile
from model_optimizer.measurement.saturation import Sweep
from model_optimizer.reporting.svg import WIDTH, Canvas, Scale, ticks
from model_optimizer.reporting.text import label, moment, number

STYLE = Path(__file__).parent / "templates" / "report.css"
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, WIDTH - 16.0, 14.0, 236.0


def bench_page(report: BenchReport) -> str:
    """Return the page; it loads nothing and reads well in light and dark."""
    title = f"Load on {report.model}"
    parts = [
        f"<header><p class=eyebrow>bench · {escape(moment(report.started_at))}</p><h1>{escape(title)}</h1>",
        f"<p class=source>{escape(report.target)} · {escape(report.arrivals)} · {escape(report.lengths)} · "
        f"{'streamed' if report.stream else 'in one piece'} · seed {report.seed}</p>",
        _verdict(report),
        "</header><main>",
    ]
    if report.load is not None:
        parts += _load_parts(report.load)
    if report.sweep is not None:
        parts += _sweep_parts(report.sweep)
    notes = [*(f"The generator itself was the bottleneck: {limit}." for limit in report.limits), *report.notes]
    parts += ["<h2>What to know</h2><ul class=plain>", *(f"<li>{escape(note)}</li>" for note in notes), "</ul></main>"]
    parts.append(f"<footer><p>model-optimizer {escape(report.version)} · {escape(report.machine)}</p></footer>")
    style = STYLE.read_text(encoding="utf-8") + _MORE_STYLE
    head = f'<meta charset=utf-8><meta name=viewport content="width=device-width"><title>{escape(title)}</title>'
    return f"<!doctype html><html lang=en><head>{head}<style>{style}</style></head><body>{''.join(parts)}</body></html>"


_MORE_STYLE = """
svg .curve { fill: none; stroke: var(--accent); stroke-width: 2.25; } svg .tail { stroke: var(--dot); }
svg .ideal { stroke: var(--muted); stroke-dasharray: 4 4; }
"""


def _verdict(report: BenchReport) -> str:
    if report.load is not None and report.load.unsteady:
        return "<p class='verdict large inconclusive'>the latency never settled</p>"
    if report.limits:
        return "<p class='verdict large inconclusive'>the generator was the bottleneck</p>"
    if report.sweep is not None and any(point.limits for point in report.sweep.points):
        return "<p class='verdict large inconclusive'>the generator kept up with the rates, but was late</p>"
    return "<p class='verdict large accept'>the generator kept up</p>"


def _load_parts(load: LoadResult) -> list[str]:
    cells = [
        ("requests/s", number(load.requests_per_s), f"{load.num_requests - load.num_failed} of {load.num_requests} ended well"),
    ]
    if load.output_tok_per_s is not None:
        cells.append(("tokens/s", number(load.output_tok_per_s), f"counted by {load.tokens_counted_by}"))
    for name, words in (("ttft", "first token P99"), ("end_to_end", "whole answer P99")):
        figure = load.figure(name)
        if figure is not None:
            value = figure.at(0.99)
            cells.append((words, "failed" if value is None else f"{number(value)} ms", figure.meaning))
    if load.goodput is not None:
        limits = ", ".join(f"{label(name)} {number(limit)}" for name, limit in load.goodput.level.items())
        cells.append(("goodput", f"{100 * load.goodput.ratio:.4g} %", f"within {limits}"))
    figures = "".join(
        f"<div><dt>{escape(name)}</dt><dd class=figure-value>{escape(value)}</dd><dd class=figure-note>{escape(note)}</dd></div>"
        for name, value, note in cells
    )
    failures = "".join(f"<li>{count} failed: {escape(reason)}</li>" for reason, count in load.failures.items())
    if load.first_fault:
        failures += f"<li>the first one was told: <code>{escape(load.first_fault)}</code></li>"
    return [
        f"<dl class=figures>{figures}</dl>",
        "<h2>Latency</h2>",
        _latency_table(load.latency),
        f"<figure>{timeline_picture(load)}<figcaption>P50 and P99 of the requests due in each slice.</figcaption></figure>",
        f"<h2>Failures</h2><ul class=plain>{failures}</ul>" if failures else "",
        "<h2>The generator</h2>",
        _health_table(load),
    ]


def _table(caption: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table whose first column names the row; cells are markup."""
    head = "".join(f"<th scope=col{' class=num' if place else ''}>{escape(name)}</th>" for place, name in enumerate(columns))
    body = "".join(
        f"<tr><th scope=row>{first}</th>{''.join(f'<td class=num>{cell}</td>' for cell in rest)}</tr>" for first, *rest in rows
    )
    return (
        f"<div class=scroll tabindex=0><table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _latency_table(figures: tuple[LatencyFigure, ...]) -> str:
    names = [it.name for it in figures[0].percentiles] if figures else []
    rows = []
    for figure in figures:
        jitter = "–" if figure.jitter_ms is None else number(figure.jitter_ms)
        note = f" {escape(figure.note)}" if figure.note else ""
        name = f"{escape(label(figure.name))}<span class=why>{escape(figure.meaning)}{note}</span>"
        rows.append((name, f"{figure.num_samples:,}", *(_cell(it) for it in figure.percentiles), jitter))
    return _table("Milliseconds, with 95 % intervals", ("", "n", *names, "P99 − P50"), rows)


def _cell(it: Percentile) -> str:
    value = "failed" if it.value is None else number(it.value)
    if it.lower is None and it.upper is None:
        return value
    bounds = ["…" if bound is None else number(bound) for bound in (it.lower, it.upper)]
    return f"{value}<span class=why>{bounds[0]} to {bounds[1]}</span>"


def _health_table(load: LoadResult) -> str:
    health = load.health
    rows = [
        (f"{words}, ms", *(number(value) for value in found.values()))
        for words, found in (("sent after it was due", health.dispatch_delay_ms), ("woke late", health.loop_lag_ms))
        if found
    ]
    waited = "" if health.waited_ratio is None else f"; {100 * health.waited_ratio:.3g} % of the time it waited for one"
    table = _table("How late the generator was", ("", "P50", "P99", "P99.9", "most"), rows)
    return f"{table}<p class=quiet>{100 * health.cpu_ratio:.3g} % of a core{waited}.</p>"


def timeline_picture(load: LoadResult) -> str:
    """Return the latency of the run over its time."""
    points = [(at, median, tail) for at, median, tail, _ in load.timeline if median is not None and tail is not None]
    if len(points) < 2:
        return ""
    canvas = Canvas("timeline", 280)
    x = Scale(0, points[-1][0] or 1.0, _LEFT, _RIGHT)
    y = Scale(0, max(tail for _, _, tail in points) * 1.05 or 1.0, _BOTTOM, _TOP)
    _axes(canvas, x, y, ("seconds after the first request", "ms"))
    for css, place in (("curve", 1), ("curve tail", 2)):
        path = "L".join(f"{x(point[0])} {y(point[place])}" for point in points)
        canvas.path(f"M{path}", css)
    canvas.text((x(points[-1][0]), y(points[-1][2]) - 6), "P99", "label", "end")
    canvas.text((x(points[-1][0]), y(points[-1][1]) - 6), "P50", "label", "end")
    medians, most = [median for _, median, _ in points], max(tail for _, _, tail in points)
    words = f"P50 between {number(min(medians))} and {number(max(medians))} ms, P99 up to {number(most)} ms."
    return canvas.close("Latency over the run", words)


def _sweep_parts(sweep: Sweep) -> list[str]:
    sustained = "none" if sweep.sustained_per_s is None else f"{number(sweep.sustained_per_s)}/s"
    capacity = "not reached" if sweep.capacity_per_s is None else f"{number(sweep.capacity_per_s)}/s"
    cells = (
        ("kept up with", sustained, "the highest rate at which nothing piled up"),
        ("capacity", capacity, "ended well per second while more came"),
        ("one request alone", f"{number(sweep.base_ms)} ms", "median, from due to the end of the answer"),
    )
    figures = "".join(
        f"<div><dt>{name}</dt><dd class=figure-value>{value}</dd><dd class=figure-note>{note}</dd></div>"
        for name, value, note in cells
    )
    rows = []
    for it in sorted(sweep.points, key=lambda point: point.offered_per_s):
        values = ["–" if value is None else number(value) for value in (it.p50_ms, it.p99_ms, it.ttft_p99_ms)]
        word = "over capacity" if it.over_capacity else "generator late" if it.limits else ""
        rows.append(
            (number(it.offered_per_s), number(it.finished_per_s), f"{it.num_requests:,}", str(it.num_failed), *values, word)
        )
    columns = ("offered/s", "ended well/s", "requests", "failed", "P50 ms", "P99 ms", "first token P99 ms", "")
    return [
        f"<dl class=figures>{figures}</dl><p>Ended: {escape(sweep.ended_because)}.</p>",
        f"<figure>{sweep_picture(sweep)}<figcaption>Requests that ended well against those offered; on the dashed line the "
        "server keeps up.</figcaption></figure>",
        "<h2>Rates</h2>",
        _table("Each rate", columns, rows),
    ]


def sweep_picture(sweep: Sweep) -> str:
    """Return finished against offered rates."""
    points = sorted(sweep.points, key=lambda point: point.offered_per_s)
    most = max(point.offered_per_s for point in points) * 1.05
    canvas = Canvas("sweep", 280)
    x = Scale(0, most, _LEFT, _RIGHT)
    y = Scale(0, max(max(point.finished_per_s for point in points) * 1.15, 1e-9), _BOTTOM, _TOP)
    _axes(canvas, x, y, ("requests offered per second", "ended well per second"))
    reach = min(most, y.upper)
    canvas.line((x(0), y(0)), (x(reach), y(reach)), "ideal")
    for point in points:
        hint = f"{number(point.offered_per_s)}/s offered, {number(point.finished_per_s)}/s ended well"
        shape = "cross" if point.over_capacity else "circle"
        canvas.mark(
            (x(point.offered_per_s), y(point.finished_per_s)), shape, "stroke" if point.over_capacity else "mark strong", hint
        )
    return canvas.close("Rates", f"{len(points)} rates up to {number(points[-1].offered_per_s)} requests per second.")


def _axes(canvas: Canvas, x: Scale, y: Scale, names: tuple[str, str]) -> None:
    for value in ticks(y.lower, y.upper, 5):
        canvas.line((_LEFT, y(value)), (_RIGHT, y(value)), "grid")
        canvas.text((_LEFT - 8, y(value) + 4), number(value), "tick", "end")
    for value in ticks(x.lower, x.upper):
        canvas.text((x(value), _BOTTOM + 18), number(value), "tick", "middle")
    canvas.line((_LEFT, _BOTTOM), (_RIGHT, _BOTTOM), "axis")
    canvas.text((_RIGHT, _BOTTOM + 38), names[0], "tick", "end")
    canvas.text((_LEFT, _TOP - 2), names[1], "tick")
