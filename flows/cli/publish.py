"""Put what the store holds into a directory of the user: whole or not at all."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from model_optimizer.disk import explained


@dataclass(frozen=True)
class Made:
    """What goes into the output directory, and what is said about it."""

    files: Mapping[str, Path]
    """Place in the output ("" = the directory itself) -> what is copied there."""
    figures: dict[str, object]
    decisions: tuple[str, ...]
    warnings: tuple[str, ...]
    recipe: dict[str, object]
    written: Mapping[str, str] = field(default_factory=dict)
    """Place in the output -> text of a small file."""


def publish(made: Made, described: str, output: Path) -> None:
    """Copy beside the destination and rename, so that `output` is never half there."""
    output.parent.mkdir(parents=True, exist_ok=True)
    staged = output.with_name(f".{output.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    with explained(output.parent):
        for place, source in made.files.items():
            target = staged / place if place else staged
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        for place, text in made.written.items():
            (staged / place).write_text(text, encoding="utf-8")
        (staged / "metadata.json").write_text(described, encoding="utf-8")
        staged.rename(output)
