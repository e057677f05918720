"""The report for machines; `Report.model_validate_json(render(report)) == report`."""

import json

from model_optimizer.artifacts.report import Report
from model_optimizer.reporting.renderers import RENDERERS, Renderer


def render_json(report: Report) -> bytes:
    """Return the whole document, sorted keys, one space of indent."""
    return json.dumps(report.model_dump(mode="json"), sort_keys=True, indent=1, ensure_ascii=False).encode()


RENDERERS.register("json")(Renderer("report.json", render_json))
