"""The report as one self-contained page: no script, no request, light and dark, narrow and wide, on paper."""

import jinja2
from markupsafe import Markup

from model_optimizer.artifacts.measure import Dimension, Verdict
from model_optimizer.artifacts.report import Report
from model_optimizer.paths import PACKAGE_ROOT
from model_optimizer.reporting import pictures, rounds, sentences, tables, text
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
        "moment": text.moment,
        "prose": text.prose,
        "label": text.label,
        "quantity": text.quantity,
    }
    page = environment.get_template(
        "report.html.j2"
    ).render(
        report=report,
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),  # our own file
        dimensions=[
            (dimension, report.dimensions[dimension], *tables.folded(tables.measure_rows(report, dimension)))
            for dimension in Dimension
            if dimension in report.dimensions
        ],
        verdict_class=lambda verdict: _CLASSES[verdict],
        accuracy=accuracy_words(report.figures),
        reference_bytes=BYTES_PER_PARAMETER * report.target.model.num_parameters,
        pictures=_pictures(report),
        shades=pictures.shade_limits(report) if report.quantized.plan else None,
        candidates=tables.candidate_rows(report.front, report.compiled.strategy),
        rounds=rounds.round_rows(report) if rounds.has_rounds(report) else (),
        golden=tables.golden_parts(report),
        timed=next((measure.reason for measure in report.measures if measure.name == "generation_speed_ratio"), ""),
        round_columns=rounds.ROUND_COLUMNS[3:-1],
        sentences={
            "latency": sentences.latency_sentence(report),
            "soak": sentences.soak_sentence(report),
            "parity": sentences.parity_sentence(report),
        },
        repaired=report.compiled.strategy != report.front.choice,
        in_scan=any(candidate.strategy == report.compiled.strategy for candidate in report.front.candidates),
        layers=tables.worst_layers(report),
        missing=tables.not_measured(report),
        environment=tables.environment_rows(report),
    )
    return page.encode()


def _pictures(report: Report) -> dict[str, Markup]:
    """Return the SVG pictures, whose texts are escaped where they are drawn."""
    return {
        "rounds": Markup(rounds.rounds_picture(report) if rounds.has_rounds(report) else ""),
        "pareto": Markup(pictures.pareto_picture(report)),
        "layers": Markup(pictures.layers_picture(report)),
        "memory": Markup(pictures.memory_picture(report)),
        "latency": Markup(pictures.latency_picture(report)),
        "golden": Markup(pictures.golden_picture(report)),
    }


RENDERERS.register("html")(Renderer("report.html", render_html))
