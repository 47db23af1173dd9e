"""`study:` which variants `ipu-lean study` compares. `train` and the other commands do not read it."""

from typing import Any, Dict, List, Optional

from pydantic import Field, field_validator

from ipu_lean.config.ranges import counted
from ipu_lean.config.section import Section, setting


class ExpectConfig(Section):
    """What a variant is to come to beside `study.reference`, seed by seed."""

    within: Optional[float] = setting(
        None,
        "The mean difference in loss is at most this share of the reference's loss, or the spread of the differences over the "
        "seeds if that is larger.",
        gt=0,
    )
    worse_by: Optional[float] = setting(
        None, "The mean loss is higher by at least this share of the reference's loss, whatever the spread.", gt=0
    )
    norm_within: Optional[float] = setting(
        None, "The norm of all weights at the end is within this share of the reference's, with every seed.", gt=0
    )


class StudyConfig(Section):
    """Named variants of one run, trained on equal terms: the same data in the same order, the same seeds and updates."""

    variants: Dict[str, Dict[str, Any]] = Field(
        default_factory=dict,
        description="Name -> {key path: value}: what a variant changes, such as `mean: {model.stack.coupling: mean}`. An empty "
        "one is the run as it stands. Data, batch and number of updates belong to all of them.",
    )
    reference: Optional[str] = setting(
        None, "The variant that the others are compared with, seed by seed: their mean difference in loss is shown."
    )
    expect: Dict[str, ExpectConfig] = Field(
        default_factory=dict,
        description="Name of a variant -> what it is to come to beside the reference. Gives the study a verdict.",
    )
    seeds: List[int] = Field(
        default_factory=lambda: [0],
        description="Seeds that each variant is trained with: a list, or a number N for the seeds 0 to N-1.",
        json_schema_extra={"type": ["array", "integer"]},
    )
    workers: int = setting(2, "Worker processes, one thread each.", ge=1, le=1024)
    final_share: float = setting(
        0.1, "The training loss of a variant is the mean over this share of its updates, the last ones.", gt=0, le=1
    )

    @field_validator("seeds", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        return counted(value)

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, value: List[int]) -> List[int]:
        if not value or len(set(value)) < len(value):
            raise ValueError("at least one seed, and all different")
        return value
