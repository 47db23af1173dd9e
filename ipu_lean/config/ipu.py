"""`ipu:` where layers run. The CPU mirrors the IPU run, so on cpu and gpu this section is checked and then not needed."""

from typing import List, Optional

from pydantic import Field

from ipu_lean.config.section import Section


class IpuConfig(Section):
    """Placement on IPUs."""

    layers_per_ipu: Optional[List[int]] = Field(
        None,
        description=(
            "How many layers stand on each IPU of a replica, such as [0, 3, 3, 3]; their sum is model.depth. Unset: all on one."
        ),
    )
