"""What a request may ask of a runtime, whichever runtime it is; all refusals name the value, the limit and what to do."""

from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.errors import ConfigError
from model_optimizer.protocols import GenerationRequest


def check_tokens(tokens: tuple[int, ...], plan: KvPlan, vocab_size: int, num_new: int = 0) -> None:
    """Refuse a sequence that a runtime of this plan and vocabulary cannot read.

    Raises:
        ConfigError: it is empty, too long with `num_new` tokens to come, or holds unknown tokens.
    """
    if not tokens:
        raise ConfigError("the prompt is empty; give at least one token")
    if len(tokens) + num_new > (limit := plan.max_model_len):
        raise ConfigError(f"{len(tokens)} prompt + {num_new} new tokens exceed max_model_len {limit}; shorten the prompt")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ConfigError(f"tokens {min(tokens)}..{max(tokens)} leave the vocabulary 0..{vocab_size - 1}")


def check_request(request: GenerationRequest, plan: KvPlan, vocab_size: int) -> None:
    """Refuse a request that could never run; its sampling is not looked at.

    Raises:
        ConfigError: it asks for no token, its prompt is refused by `check_tokens`, or it needs more pages than there are.
    """
    if request.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {request.max_new_tokens}; ask for at least 1")
    check_tokens(request.prompt, plan, vocab_size, request.max_new_tokens)
    if (pages := pages_of(request, plan)) > plan.num_pages:
        raise ConfigError(
            f"the request needs {pages} KV pages of {plan.page_tokens} tokens and the plan holds "
            f"{plan.num_pages}; shorten it or give the engine more memory"
        )


def pages_of(request: GenerationRequest, plan: KvPlan) -> int:
    """Return the pages that a request may come to fill; the last token is never cached."""
    return -(-(len(request.prompt) + request.max_new_tokens - 1) // plan.page_tokens)
