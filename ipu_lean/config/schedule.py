"""`schedule:` how the learning rate moves, as a factor on every group's own rate."""

from typing import Literal, Optional

from ipu_lean.config.section import Section, setting


class ScheduleConfig(Section):
    """Linear warm-up to 1, then `kind` down to `final`. The unit is one weight update."""

    kind: Literal["constant", "linear", "cosine"] = setting("cosine", "Shape after the warm-up.")
    warmup: int = setting(0, "Updates over which the factor rises from 0 to 1.", ge=0)
    final: float = setting(0.1, "The factor at the end of the horizon; `constant` does not read it.", ge=0, le=1)
    steps: Optional[int] = setting(
        None, "The horizon in updates. Unset: train.steps. After it the factor stays at `final`.", ge=1
    )
