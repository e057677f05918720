"""The decision log: what was decided, why, and the numbers that it rests on."""

from pydantic import BaseModel, ConfigDict


class Decision(BaseModel):
    """One decision of one stage, readable by people (`sentence`) and machines (the fields)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: str
    """What the decision is about: a layer, a candidate, a budget."""
    choice: str
    """What was chosen, in a few words."""
    because: str
    """The reason in one clause."""
    numbers: dict[str, float] = {}
    """The figures behind it; each key carries its unit as a suffix, e.g. `kl_nats`."""

    def sentence(self) -> str:
        """Return `subject: choice, because reason (name value, ...)`."""
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.numbers.items())
        return f"{self.subject}: {self.choice}, because {self.because}" + (f" ({figures})" if figures else "")
