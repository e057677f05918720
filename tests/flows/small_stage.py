"""A stage that only counts how often it was made, as Prefect and the store see any stage."""

from pathlib import Path

from model_optimizer.artifacts.base import Stage, StageArtifact, StageInputs
from tasks._task import StageTask, Workplace, stage_task


class WordInputs(StageInputs):
    """Known by a word; the store takes the code's version from the package that the class belongs to."""

    __module__ = "model_optimizer.store"

    word: str


class WordMade(StageArtifact):
    word: str


def counting_stage(made: list[str]) -> StageTask[WordInputs, WordMade]:
    """Return a stage task that notes in `made` whatever it makes."""

    @stage_task(Stage.PROFILE, WordMade)
    def make(inputs: WordInputs, _workspace: Path, _place: Workplace) -> WordMade:
        made.append(inputs.word)
        return WordMade(word=inputs.word)

    return make
