"""Compile parts of the forward pass that are the same in every layer, so that one compilation serves all of them.

Attention over pages stays as it is: kernels of a registry, chosen by name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

from model_optimizer.errors import UnsupportedError
from model_optimizer.runtimes.native_options import COMPILE_MODES

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Regions:
    """How a part of the forward pass is run: as it is, or compiled.

    What the compiler cannot take in one piece it cuts, and a part that is called in too many ways it runs as it is: a server
    goes on.
    """

    level: int = 0
    backend: str = "inductor"
    """Of torch.compile."""

    @property
    def compiled(self) -> bool:
        return self.level in COMPILE_MODES

    def wrap(self, part: Callable[P, R]) -> Callable[P, R]:
        """Return the part, compiled where the level says so: at its first call, and once more for several tokens."""
        if not self.compiled:
            return part
        wrapped: Callable[P, R] = torch.compile(part, backend=self.backend, mode=COMPILE_MODES[self.level])
        return wrapped


EAGER = Regions()


@contextmanager
def compiling() -> Iterator[None]:
    """Turn what the compiler raises into an error that says what to do.

    Raises:
        UnsupportedError: the compiler is missing or fails.
    """
    try:
        with torch.inference_mode():
            yield
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise UnsupportedError(
            f"torch.compile fails here: {first}; it needs a C++ compiler (g++) on a CPU and Triton on a GPU: install it, or set "
            "compile.level: 1"
        ) from error


def any_number_of_tokens(*tensors: torch.Tensor) -> None:
    """Mark the first dimension of tensors as free, so that one compilation serves every number above 1."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
