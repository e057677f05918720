"""Answer golden sets with a runtime: choices by their log-probability, everything else by writing it.

Both are batched by length and journalled shard by shard; what the journal holds is not done again.
"""

from collections.abc import Iterable, Sequence

from model_optimizer.errors import ConfigError
from model_optimizer.journal import Journal
from model_optimizer.protocols import Progress, Runtime, TokenBatch
from model_optimizer.verification.golden import GoldenSet, Item
from model_optimizer.verification.golden_answers import ItemScore, Shard, Tokenizer
from model_optimizer.verification.golden_generation import generation_shards, read_prompts, write_answers

SHARD_TOKENS = 1280
"""Tokens scored between two journal records: a few seconds of a 135 M model on two cores, and one block of logits."""
CUDA_SHARD_TOKENS = 1 << 17
"""On a GPU, where as many take about as long."""


def score_items(
    runtime: Runtime, sets: Sequence[GoldenSet], tokenizer: Tokenizer, journal: Journal[Shard], progress: Progress
) -> dict[tuple[str, str], ItemScore]:
    """Return every item's answer by (set, item id), continuing where the journal ends.

    Raises:
        ConfigError: an item does not fit the engine, or a set is answered by a file of predictions alone.
    """
    for golden in sets:
        if golden.from_predictions:
            raise ConfigError(
                f"golden set {golden.card.name!r} is measured by {golden.card.metric}, which no language model answers; "
                "`model-optimizer eval --predictions FILE` judges it"
            )
    _score_choices(runtime, [golden for golden in sets if golden.has_choices], tokenizer, journal, progress)
    _write_texts(runtime, [golden for golden in sets if not golden.has_choices], tokenizer, journal, progress)
    wanted = {(golden.card.name, item.id) for golden in sets for item in golden.items}
    return {key: score for key, score in _held(journal).items() if key in wanted}


def _held(journal: Journal[Shard]) -> dict[tuple[str, str], ItemScore]:
    return {(score.golden_set, score.item): score for shard in journal.records for score in shard.scores}


def _write_texts(
    runtime: Runtime, sets: Sequence[GoldenSet], tokenizer: Tokenizer, journal: Journal[Shard], progress: Progress
) -> None:
    """Write the answers that the journal lacks."""
    held = _held(journal)
    facts = runtime.facts
    shards = list(generation_shards(read_prompts(sets, tokenizer, facts.max_model_len), facts.max_batch))
    missing = [shard for shard in shards if any((prompt.golden_set, prompt.item) not in held for prompt in shard)]
    for shard in progress.track(missing, f"golden answers by {facts.name}", len(missing)):
        journal.append(Shard(scores=write_answers(runtime, shard, tokenizer)))


def _score_choices(
    runtime: Runtime, sets: Sequence[GoldenSet], tokenizer: Tokenizer, journal: Journal[Shard], progress: Progress
) -> None:
    """Score the choices that the journal lacks.

    A choice is the tokens of its text put behind the tokens of the prompt, so that the border never moves; the prompt
    gets the special tokens that the tokenizer puts in front of plain text.
    """
    held = _held(journal)
    items = [(golden.card.name, item.id, _sequences(item, tokenizer)) for golden in sets for item in golden.items]
    limit = CUDA_SHARD_TOKENS if runtime.facts.device == "cuda" else SHARD_TOKENS
    shards = list(_shards([entry for entry in items if entry[:2] not in held], limit))
    for shard in progress.track(shards, f"golden sets on {runtime.facts.name}", len(shards)):
        journal.append(Shard(scores=tuple(_score_shard(runtime, shard))))


_Sequence = tuple[tuple[int, ...], int]
"""Tokens and the position where the choice begins."""
_Waiting = tuple[str, str, tuple[_Sequence, ...]]


def _sequences(item: Item, tokenizer: Tokenizer) -> tuple[_Sequence, ...]:
    prompt = tuple(tokenizer.encode(item.prompt))
    if not prompt:
        raise ConfigError(f"golden item {item.id!r}: its prompt has no tokens, and a first token cannot be scored")
    return tuple(((*prompt, *tokenizer.encode(choice, add_special_tokens=False)), len(prompt)) for choice in item.choices)


def _shards(waiting: Sequence[_Waiting], limit: int) -> Iterable[tuple[_Waiting, ...]]:
    """Yield items of similar length whose padded tokens stay below `limit` together."""
    shard: list[_Waiting] = []
    num_sequences = 0
    for entry in sorted(waiting, key=_by_length):
        longest = max(len(tokens) for tokens, _ in entry[2])
        if shard and (num_sequences + len(entry[2])) * longest > limit:
            yield tuple(shard)
            shard, num_sequences = [], 0
        shard.append(entry)
        num_sequences += len(entry[2])
    if shard:
        yield tuple(shard)


def _by_length(entry: _Waiting) -> tuple[int, int, str, str]:
    """Order by longest sequence, then by prompt, so that neighbours need little padding and score the same positions."""
    return max(len(tokens) for tokens, _ in entry[2]), entry[2][0][1], entry[0], entry[1]


def _score_shard(runtime: Runtime, shard: Sequence[_Waiting]) -> Iterable[ItemScore]:
    sequences = [sequence for _, _, found in shard for sequence in found]
    batch = TokenBatch(tuple(tokens for tokens, _ in sequences), tuple(start for _, start in sequences))
    sums = iter([float(scored.log_probs.sum(dtype="float64")) for scored in runtime.score(batch)])
    for name, item, found in shard:
        yield ItemScore(golden_set=name, item=item, log_probs=tuple(next(sums) for _ in found))
