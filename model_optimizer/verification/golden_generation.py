"""Golden items whose answers are written: greedy generation through the Runtime protocol, shard by shard.

A shard's items depend on the whole set and on the engine's batch alone, and a shard starts with an idle engine, so a run
that was killed and goes on puts the same requests into the same batches: its answers are those of an undisturbed run, to the
last bit.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from model_optimizer.errors import ConfigError
from model_optimizer.protocols import GenerationRequest, RequestId, Runtime
from model_optimizer.verification.golden import Generation, GoldenSet, Item
from model_optimizer.verification.golden_answers import ItemScore, Tokenizer, end_tokens

SHARD_BATCHES = 4
"""Items of a shard, in batches of the engine: its end, where the batch runs empty, is then a small part of it."""
LOOK_EVERY_TOKENS = 4
"""How often a growing answer is searched for stop strings."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One item as tokens."""

    golden_set: str
    item: str
    tokens: tuple[int, ...]
    generation: Generation


@dataclass(slots=True)
class _Answer:
    """One answer while it grows."""

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)

    def text(self, tokenizer: Tokenizer) -> tuple[str, bool]:
        """Return the text before the first stop string, and whether there was one."""
        whole = tokenizer.decode(self.tokens, skip_special_tokens=True)
        found = [at for stop in self.prompt.generation.stop if (at := whole.find(stop)) >= 0]
        return whole[: min(found)] if found else whole, bool(found)


def read_prompts(sets: Sequence[GoldenSet], tokenizer: Tokenizer, longest: int) -> Iterator[Prompt]:
    """Yield every item of sets whose answers are written.

    Raises:
        ConfigError: a prompt has no tokens, or with its answer more than `longest`; or a chat template is missing.
    """
    for golden in sets:
        generation = golden.card.generation
        for item in golden.items:
            tokens = _encode(golden, item, tokenizer)
            if not tokens:
                raise ConfigError(f"golden item {item.id!r} of {golden.card.name!r}: its prompt has no tokens")
            if len(tokens) + generation.max_new_tokens > longest:
                raise ConfigError(
                    f"golden item {item.id!r} of {golden.card.name!r} needs {len(tokens)} + {generation.max_new_tokens} tokens "
                    f"and the engine holds {longest} (max_model_len); lower generation.max_new_tokens or raise max_model_len"
                )
            yield Prompt(golden.card.name, item.id, tokens, generation)


def _encode(golden: GoldenSet, item: Item, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not golden.card.generation.chat:
        return tuple(tokenizer.encode(item.prompt))
    if tokenizer.chat_template is None:
        raise ConfigError(f"golden set {golden.card.name!r} says `chat: true` and the model has no chat template")
    message = [{"role": "user", "content": item.prompt}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def generation_shards(prompts: Iterable[Prompt], max_batch: int) -> Iterator[tuple[Prompt, ...]]:
    """Yield the prompts by length, `SHARD_BATCHES` batches at a time."""
    ordered = sorted(prompts, key=lambda prompt: (len(prompt.tokens), prompt.golden_set, prompt.item))
    step = SHARD_BATCHES * max_batch
    for start in range(0, len(ordered), step):
        yield tuple(ordered[start : start + step])


def write_answers(runtime: Runtime, shard: Sequence[Prompt], tokenizer: Tokenizer) -> tuple[ItemScore, ...]:
    """Return the answers to a shard, in its order."""
    ends = end_tokens(tokenizer)
    open_answers: dict[RequestId, _Answer] = {}
    for prompt in shard:
        request = GenerationRequest(prompt.tokens, prompt.generation.max_new_tokens, ends)
        open_answers[runtime.submit(request)] = _Answer(prompt)
    answers = list(open_answers.values())
    while open_answers:
        events = runtime.step()
        if not events:
            raise ConfigError(f"the engine gave no token for {len(open_answers)} golden items; is its KV plan too small?")
        for event in events:
            answer = open_answers.get(event.request)
            if answer is None:  # stopped within this very step
                continue
            answer.tokens.append(event.token)
            if event.finished:
                del open_answers[event.request]
            elif answer.prompt.generation.stop and len(answer.tokens) % LOOK_EVERY_TOKENS == 0 and answer.text(tokenizer)[1]:
                runtime.cancel(event.request)
                del open_answers[event.request]
    return tuple(
        ItemScore(
            golden_set=answer.prompt.golden_set,
            item=answer.prompt.item,
            text=answer.text(tokenizer)[0],
            num_tokens=len(answer.tokens),
        )
        for answer in answers
    )
