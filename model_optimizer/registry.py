"""Name -> implementation for every family of variants (methods, runtimes, metrics, formats).

One variant is one file in the family's folder. `Registry` imports every module of that folder on
first use, so a new file is found without editing anything else.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar

from model_optimizer.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Collect the variants of one family, e.g. `Registry("quantization method", "model_optimizer.quantization.methods")`."""

    def __init__(self, family: str, package: str):
        self._family = family
        self._package = package
        self._entries: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that files its argument under `name`; a second claim on a name is a bug."""

        def add(entry: T) -> T:
            assert name not in self._entries, f"{self._family} {name!r} is registered twice"
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """Return the variant called `name`.

        Raises:
            ConfigError: no such variant; the message lists the known ones.
        """
        if name not in self.names():
            raise ConfigError(f"unknown {self._family} {name!r}; known: {', '.join(self.names())}")
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        """Return every registered name, sorted."""
        if not self._loaded:
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
            self._loaded = True
        return tuple(sorted(self._entries))
