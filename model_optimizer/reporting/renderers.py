"""Every form that a report can take: one file of `formats/` each."""

from collections.abc import Callable
from dataclasses import dataclass

from model_optimizer.artifacts.report import Report
from model_optimizer.registry import Registry


@dataclass(frozen=True, slots=True)
class Renderer:
    """A rendering and the name of the file that it makes."""

    file_name: str
    render: Callable[[Report], bytes]


RENDERERS: Registry[Renderer] = Registry("report format", "model_optimizer.reporting.formats")


def render_documents(report: Report) -> dict[str, bytes]:
    """Return the report in every registered format, by file name."""
    renderers = [RENDERERS.get(name) for name in RENDERERS.names()]
    return {renderer.file_name: renderer.render(report) for renderer in renderers}
