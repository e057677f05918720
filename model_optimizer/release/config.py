"""What a profile may say about releasing."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from model_optimizer.artifacts.release import Way
from model_optimizer.spec import Spec


class SignerConfig(Spec):
    key: Path = Path("~/.config/model-optimizer/key.pem")
    """EC P-256 private key in PEM form, made on first use with mode 0600."""


class ReleaseConfig(Spec):
    approval: Literal["automatic", "manual"] = Field(
        default="automatic", description="`manual`: a bundle waits until a person signs it off or refuses it"
    )
    approvers: dict[str, str] = Field(
        default={},
        description="who may sign off with a key: name as in git (e-mail address) or GitHub login -> EC P-256 public key, the "
        "base64 of its .pub file on one line, or PEM",
    )
    ways: tuple[Way, ...] | None = Field(
        default=None,
        description="how a person may answer: `key`, `form` (of Prefect; the name is only claimed), `github` (environment); left "
        "out: key where approvers are named, else form and github, and without prevent_self_review also the release key",
    )
    prevent_self_review: bool = Field(
        default=True, description="who made the source commit or started the run may not sign off its result"
    )
    wait_days: float = Field(default=30, gt=0, le=365, description="afterwards nobody can sign off any more")
    signer: SignerConfig = SignerConfig()

    @field_validator("approvers")
    @classmethod
    def _readable_keys(cls, approvers: dict[str, str]) -> dict[str, str]:
        """Bring every key to its one-line form; refuse what is no key, and one key under two names."""
        from model_optimizer.release.approvers import one_line

        keys = {}
        for name, text in approvers.items():
            if not name.strip():
                raise ValueError("an approver has no name; give the name, e-mail address or login of the key's holder")
            keys[name] = one_line(text)
            if twice := [other for other in keys if other != name and keys[other] == keys[name]]:
                raise ValueError(f"{twice[0]} and {name} have the same key; every approver has one of his own")
        return keys

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.approval == "automatic":
            stated = [name for name in ("approvers", "ways") if name in self.model_fields_set]
            if stated:
                raise ValueError(
                    f"release.{stated[0]} means nothing while approval is automatic; set approval: manual, or leave it out"
                )
        elif not self.open_ways:
            raise ValueError("release.ways is empty, so that nobody could ever sign off; allowed: key, form, github")
        elif "key" in self.open_ways and not self.approvers and self.prevent_self_review:
            raise ValueError("release.ways has key, and no approver is named; add approvers: {NAME: PUBLIC KEY}")
        elif self.approvers and not {"key", "github"} & set(self.open_ways):
            raise ValueError(f"release.approvers are named, and release.ways {list(self.open_ways)} asks none of them; add key")
        return self

    @property
    def open_ways(self) -> tuple[Way, ...]:
        """Return how a person may answer."""
        if self.approval == "automatic":
            return ()
        if self.ways is not None:
            return tuple(dict.fromkeys(self.ways))
        if self.approvers:
            return ("key",)
        return ("form", "github") if self.prevent_self_review else ("key", "form", "github")
