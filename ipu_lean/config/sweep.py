"""`sweep:` which trials `ipu-lean sweep` runs, and by whom. `train` and the other commands do not read it."""

from typing import Any, Dict, List, Literal, Optional

from pydantic import Field, field_validator

from ipu_lean.config.ranges import counted, numbers, whole
from ipu_lean.config.section import Section, setting

_LIST_OR_TEXT = {"type": ["array", "string", "number"]}
RANGES = (
    "A list, or text such as `32,64,128`; `A..B` doubles from A to B, `A..B*4` multiplies by 4, `A..B/9` gives 9 numbers evenly "
    "spaced on a logarithmic scale; `2^-7` is a number."
)


def _listed(value: Any) -> Any:
    """A single number as a list of one."""
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else value


class SweepConfig(Section):
    """A grid: every width with every depth, learning rate, seed and value of `grid`."""

    widths: List[int] = Field(
        default_factory=list,
        description=f"Values of model.width. {RANGES} Empty: the model's own.",
        json_schema_extra=_LIST_OR_TEXT,
    )
    depths: List[int] = Field(
        default_factory=list, description="Values of model.depth, written like widths.", json_schema_extra=_LIST_OR_TEXT
    )
    lrs: List[float] = Field(
        default_factory=list, description="Values of optimizer.lr, written like widths.", json_schema_extra=_LIST_OR_TEXT
    )
    seeds: List[int] = Field(
        default_factory=list,
        description="Values of seed: a list, or a number N for the seeds 0 to N-1. Empty: the configuration's own.",
        json_schema_extra={"type": ["array", "integer", "string"]},
    )
    grid: Dict[str, List[Any]] = Field(
        default_factory=dict, description="Further axes: key path -> values, such as `optimizer.weight_decay: [0, 0.1]`."
    )
    parametrizations: Optional[List[Literal["mup", "standard"]]] = Field(
        None, description="Values of mup.parametrization, to see them side by side. Unset: the configuration's own."
    )
    executor: Literal["auto", "sequential", "local", "batched", "ray"] = setting(
        "auto",
        "`sequential`: one trial after another in this process. `local`: single-thread worker processes on this machine. "
        "`batched`: the same, with many trials of one shape in one program. `ray`: workers of a Ray cluster. `auto`: local, and "
        "batched where a short probe finds it faster.",
    )
    workers: int = setting(2, "Worker processes (`sequential` has none).", ge=1, le=1024)
    ray_address: Optional[str] = setting(None, "Address of a running Ray cluster; unset starts one on this machine.")
    final_share: float = setting(
        0.1, "The loss of a trial is the mean training loss over this share of its updates, the last ones.", gt=0, le=1
    )
    evaluate: bool = setting(False, "Measure every trial on the validation sets as well, once, at its end.")

    @field_validator("lrs", mode="before")
    @classmethod
    def _range(cls, value: Any) -> Any:
        return numbers(value) if isinstance(value, str) else _listed(value)

    @field_validator("widths", "depths", mode="before")
    @classmethod
    def _whole_range(cls, value: Any) -> Any:
        return whole(numbers(value)) if isinstance(value, str) else _listed(value)

    @field_validator("seeds", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        return whole(numbers(value)) if isinstance(value, str) else counted(value)

    @field_validator("widths", "depths", "lrs", "seeds")
    @classmethod
    def _ascending(cls, value: List[Any]) -> List[Any]:
        if len(set(value)) < len(value):
            raise ValueError(f"{next(item for item in value if value.count(item) > 1)!r} stands twice")
        return sorted(value)

    @field_validator("parametrizations")
    @classmethod
    def _once(cls, value: Optional[List[str]]) -> Optional[List[str]]:
        twice = [item for item in value or [] if (value or []).count(item) > 1]
        if twice:
            raise ValueError(f"{twice[0]!r} stands twice")
        return value

    @field_validator("grid")
    @classmethod
    def _distinct(cls, value: Dict[str, List[Any]]) -> Dict[str, List[Any]]:
        for key, items in value.items():
            if not items or any(item in items[:index] for index, item in enumerate(items)):
                raise ValueError(f"the values of {key} must be at least one, and all different")
        return value
