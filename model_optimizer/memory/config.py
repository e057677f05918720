"""What a profile may say about memory."""

from pydantic import Field

from model_optimizer.spec import Spec


class MemoryConfig(Spec):
    utilization_ratio: float = Field(default=0.9, gt=0, le=0.95, description="share of free memory that the engine may use")
    breathing_room_ratio: float = Field(default=0.1, ge=0, lt=0.5, description="left free of what it may use")
    page_tokens: int = Field(default=16, ge=1, le=256)
