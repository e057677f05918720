"""The report as one self-contained page: no script, no request, light and dark, narrow and wide, on paper."""

import jinja2
from markupsafe import Markup

from model_optimizer.artifacts.measure import Dimension, Verdict
from model_optimizer.artifacts.report import Report
from model_optimizer.paths import PACKAGE_ROOT
from model_optimizer.reporting import pictures, tables, text
from model_optimizer.reporting.headline import BYTES_PER_PARAMETER, accuracy_words
from model_optimizer.reporting.renderers import RENDERERS, Renderer

TEMPLATES = PACKAGE_ROOT / "reporting" / "templates"
_CLASSES = {Verdict.ACCEPT: "accept", Verdict.REJECT: "reject", Verdict.INCONCLUSIVE: "inconclusive"}


def render_html(report: Report) -> bytes:
    """Return the page; every text in it is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": text.number,
        "size": text.size,
        "times": text.times,
        "duration": text.duration,
        "quantity": text.quantity,
    }
    page = environment.get_template("report.html.j2").render(
        report=report,
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),  # our own file
        dimensions=[(d, report.dimensions[d], tables.measure_rows(report, d)) for d in Dimension if d in report.dimensions],
        verdict_class=lambda verdict: _CLASSES[verdict],
        accuracy=accuracy_words(report.figures),
        reference_bytes=BYTES_PER_PARAMETER * report.target.model.num_parameters,
        pictures=_pictures(report),
        shades=pictures.shade_limits(report) if report.quantized.plan else None,
        candidates=tables.candidate_rows(report.front),
        golden=[(row, tables.golden_cells(row), tables.golden_note(row)) for row in report.verification.golden],
        layers=tables.worst_layers(report),
        missing=tables.not_measured(report),
        environment=tables.environment_rows(report),
    )
    return page.encode()


def _pictures(report: Report) -> dict[str, Markup]:
    """Return the SVG pictures, whose texts are escaped where they are drawn."""
    return {
        "pareto": Markup(pictures.pareto_picture(report)),
        "layers": Markup(pictures.layers_picture(report)),
        "memory": Markup(pictures.memory_picture(report)),
        "latency": Markup(pictures.latency_picture(report)),
        "golden": Markup(pictures.golden_picture(report)),
    }


RENDERERS.register("html")(Renderer("report.html", render_html))
