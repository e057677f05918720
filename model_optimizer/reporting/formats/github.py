"""The report as a job summary of GitHub Actions, whose limit is 1 MiB per step."""

from model_optimizer.artifacts.report import Report
from model_optimizer.reporting.formats.markdown import markdown_sections
from model_optimizer.reporting.renderers import RENDERERS, Renderer

SUMMARY_LIMIT_BYTES = 1_048_576
"""Source: GitHub documentation, workflow commands, step isolation and limits."""
_NOTICE = "\n\n_The rest is left out here: a job summary holds 1 MiB. report.md in the bundle has all of it._\n"


def render_github(report: Report) -> bytes:
    """Return the Markdown report, cut between lines where it would exceed the limit."""
    return truncate("\n".join(markdown_sections(report)), SUMMARY_LIMIT_BYTES)


def truncate(text: str, limit_bytes: int) -> bytes:
    """Return UTF-8 of at most `limit_bytes`; what is cut ends at a line end and says so."""
    content = text.encode()
    if len(content) <= limit_bytes:
        return content
    room = limit_bytes - len(_NOTICE.encode())
    return content[: content.rfind(b"\n", 0, room) + 1] + _NOTICE.encode()


RENDERERS.register("github")(Renderer("summary.md", render_github))
