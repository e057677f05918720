"""Runs a step's turns on the device: weights, pages, and, where one is given, a draft model that guesses ahead.

Speculation (Leviathan et al., ICML 2023): the draft proposes a few tokens, the model computes them all in one pass, and they
are kept as long as each is the token that the model itself chooses there. A choice depends on logits, seed and position
alone, so the tokens are those of a run without a draft, sampled or greedy. The draft keeps its keys and values in pages
of its own under the same numbers, so sharing, preemption and growth need no second bookkeeping.

Shape letters: T tokens of a step, X hidden size.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from model_optimizer.errors import ConfigError
from model_optimizer.memory.kv_layout import SCALED, KvLayerShape, KvLayout
from model_optimizer.memory.kv_pool import Copy
from model_optimizer.memory.kv_storage import KvStorage
from model_optimizer.runtimes.torch.batch import Ground, Piece, lay_out
from model_optimizer.runtimes.torch.model import Model
from model_optimizer.runtimes.torch.sampler import Choice, Draw, choose
from model_optimizer.runtimes.torch.scheduler import Turn
from model_optimizer.runtimes.torch.sequence import Running


class PagedModel:
    """A model with the pages that its keys and values lie in."""

    def __init__(self, model: Model, page_tokens: int, num_pages: int, precision: str):
        shape = model.config.shape
        layer = KvLayerShape(shape.num_kv_heads, shape.head_dim, shape.head_dim)
        self.model = model
        self.layout = KvLayout((layer,) * shape.num_layers, page_tokens, precision, str(model.dtype).removeprefix("torch."))
        self.storage = KvStorage(self.layout, num_pages, model.device)
        self._ground = Ground(page_tokens, model.windows, model.device)

    def choices(self, pieces: Sequence[Piece], draws: Sequence[Draw], *, hide_unwritten: bool) -> list[Choice]:
        """Write the pieces' keys and values; return a choice for every logit that they want, in order."""
        batch = lay_out(pieces, self._ground, hide_unwritten=hide_unwritten)
        with torch.inference_mode():
            hidden_TX = self.model.hidden(batch, self.storage)
            return choose(self.model.logits(hidden_TX[batch.logits_R]), draws) if draws else []


class Executor:
    """The device's side of the engine: everything that holds tensors."""

    def __init__(self, paged: PagedModel, draft: PagedModel | None = None, *, hide_unwritten: bool = False):
        """Take the models over; `hide_unwritten` where slots that nobody wrote may hold NaN.

        Raises:
            ConfigError: the draft has another vocabulary, or pages have scales, which rejected tokens would move.
        """
        if draft is not None:
            sizes = paged.model.config.shape.vocab_size, draft.model.config.shape.vocab_size
            if sizes[0] != sizes[1]:
                raise ConfigError(
                    f"the draft has {sizes[1]} tokens and the model {sizes[0]}; give a draft of the same vocabulary"
                )
            if paged.layout.precision in SCALED:
                raise ConfigError(
                    f"a draft needs pages of plain floats, these are {paged.layout.precision}: rejected tokens would change "
                    "the scales of kept ones; plan the KV cache in float32, float16 or bfloat16"
                )
        self.hide_unwritten = hide_unwritten
        self.num_drafted = self.num_accepted = 0
        self._paged = paged
        self._draft = draft

    @property
    def model(self) -> Model:
        return self._paged.model

    @property
    def layout(self) -> KvLayout:
        return self._paged.layout

    @property
    def window(self) -> int | None:
        """Return how many tokens back any layer of any model sees, the token itself counted; None where one sees all."""
        windows = [window for paged in self._all() for window in paged.model.windows]
        stated = [window for window in windows if window is not None]
        return max(stated) if len(stated) == len(windows) else None

    @property
    def weight_bytes(self) -> int:
        return sum(paged.model.num_bytes for paged in self._all())

    @property
    def pool_bytes(self) -> int:
        return sum(paged.storage.num_bytes for paged in self._all())

    @property
    def bytes_per_token(self) -> int:
        return sum(paged.layout.bytes_per_token for paged in self._all())

    def copy(self, copies: Sequence[Copy]) -> None:
        for paged in self._all():
            paged.storage.copy(copies)

    def poison(self, pages: list[int]) -> None:
        for paged in self._all():
            paged.storage.poison(pages)

    def resize(self, num_pages: int) -> None:
        for paged in self._all():
            paged.storage.resize(num_pages)

    def run(self, turns: Sequence[Turn]) -> list[list[Choice]]:
        """Compute the turns; return the next tokens of each, none where its prompt goes on."""
        drafts = self._propose(turns) if self._draft else [[] for _ in turns]
        pieces = [_piece(turn, draft) for turn, draft in zip(turns, drafts, strict=True)]
        counts = [piece.num_logits for piece in pieces]
        draws = [_draw(turn.running, ahead) for turn, count in zip(turns, counts, strict=True) for ahead in range(count)]
        choices = self._paged.choices(pieces, draws, hide_unwritten=self.hide_unwritten)
        kept = []
        for count, draft in zip(counts, drafts, strict=True):
            own, choices = choices[:count], choices[count:]
            agreed = next((at for at, token in enumerate(draft) if own[at].token != token), len(draft))
            self.num_drafted += len(draft)
            self.num_accepted += agreed
            kept.append(own[: agreed + 1])
        return kept

    def _propose(self, turns: Sequence[Turn]) -> list[list[int]]:
        """Return the draft's guesses for each turn; its keys and values are written for all that the model will compute."""
        assert self._draft is not None
        drafts: list[list[int]] = [[] for _ in turns]
        for ahead in range(1 + max(turn.num_drafts for turn in turns)):
            rows = [at for at, turn in enumerate(turns) if turn.num_drafts >= ahead]
            guessing = [at for at in rows if turns[at].num_drafts > ahead]
            pieces = [_draft_piece(turns[at], drafts[at], wants=turns[at].num_drafts > ahead) for at in rows]
            draws = [_draw(turns[at].running, ahead) for at in guessing]
            found = self._draft.choices(pieces, draws, hide_unwritten=self.hide_unwritten)
            for at, choice in zip(guessing, found, strict=True):
                drafts[at].append(choice.token)
        return drafts

    def _all(self) -> list[PagedModel]:
        return [self._paged] if self._draft is None else [self._paged, self._draft]


def _piece(turn: Turn, draft: list[int]) -> Piece:
    """Return what the model computes in a turn: its tokens and the draft's guesses."""
    running, cache, start = turn.running, turn.running.pages, turn.running.num_computed
    end = start + turn.num_tokens
    num_logits = 1 + len(draft) if turn.ends else 0
    slots = cache.slots(start, end + len(draft))
    return Piece([*running.tokens[start:end], *draft], start, cache.pages, slots, num_logits, cache.num_dropped)


def _draft_piece(turn: Turn, draft: list[int], *, wants: bool) -> Piece:
    """Return what the draft computes next: the turn's tokens at first, then its own last guess."""
    if not draft:
        first = _piece(turn, [])
        return replace(first, num_logits=int(wants))
    cache, start = turn.running.pages, turn.running.num_computed + turn.num_tokens + len(draft) - 1
    return Piece(draft[-1:], start, cache.pages, cache.slots(start, start + 1), int(wants), cache.num_dropped)


def _draw(running: Running, ahead: int) -> Draw:
    return Draw(running.request.sampling, len(running.tokens) + ahead, running.request.num_top)
