"""`ipu:` where layers run on IPUs, and what PopTorch is told. The CPU mirrors the IPU run, so on cpu and gpu this section is read
for its structure only.
"""

from typing import Dict, List, Literal, Optional, Union

from pydantic import field_validator

from ipu_lean.config.section import Section, setting


class IpuConfig(Section):
    """Placement and PopTorch options. Numbers of IPUs are those of one replica, counted from 0."""

    # Placement.
    layers_per_ipu: Optional[List[int]] = setting(
        None,
        "How many layers stand on each IPU of a replica, such as [0, 3, 3, 3]; their sum is model.depth. A -1 shares what the "
        "others leave, the later ones taking what is over: [0, -1, -1]. Unset: all on one.",
    )
    embedding_ipu: int = setting(0, "IPU of the embedding.", ge=0, le=255)
    head_ipu: Optional[int] = setting(
        None, "IPU of the readout and the loss. Unset: the embedding's if they are tied, else the last one.", ge=0, le=255
    )
    execution: Literal["pipelined", "sharded"] = setting(
        "pipelined", "`pipelined` keeps all IPUs busy with micro-batches in flight; `sharded` runs one IPU after another."
    )
    eval_device_iterations: Optional[int] = setting(
        None,
        "Micro-batches of each replica in one evaluation call; a pipeline of F stages needs F. Unset: the larger of F and "
        "batch.device_iterations.",
        ge=1,
    )
    # Numbers.
    partials: Literal["float", "half"] = setting("float", "Type of partial sums in matrix products of fp16 tensors.")
    stochastic_rounding: Optional[bool] = setting(
        None, "Round fp16 results up or down at random, in proportion (training only). Unset: on for fp16-ipu, off for fp32."
    )
    loss_scaling: Union[None, float, Literal["auto"]] = setting(
        None,
        "Factor on the loss before the backward pass, taken off before the update, at the base width (under muP it grows with "
        "width); a power of two. `auto`: from 1024 on, PopART moves it after each update, which needs accumulator: half. Unset: "
        "1 for fp32, 1024 for fp16-ipu.",
    )
    accumulator: Optional[Literal["float", "half"]] = setting(
        None, "Type of the gradient accumulator. Unset: half for fp16-ipu, else float."
    )
    first_moment: Optional[Literal["float", "half"]] = setting(
        None, "Type of Adam's first moment and of SGD's velocity. Unset: half for fp16-ipu, else float."
    )
    emulate_precision: bool = setting(
        False, "On `ipu-emulated`: round after each op as fp16 on the device does. Slow; an IPU needs no request."
    )
    # Memory.
    matmul_proportion: Union[None, float, List[float]] = setting(
        None,
        "Share of an IPU's memory that a matrix product may use for speed: one number, or one for each IPU. Lower it where an "
        "IPU overflows. Unset: PopTorch's 0.6.",
    )
    optimizer_state_offchip: bool = setting(False, "Keep the optimizer's state in the host's streaming memory.")
    replicated_tensor_sharding: bool = setting(False, "Spread the optimizer's state over the replicas.")
    recompute_checkpoint_every_layer: bool = setting(
        True,
        "Keep what enters each layer and compute the rest again in the backward pass, instead of whole stages at a time. Only "
        "`memory.ipu_backward: recompute` reads it.",
    )
    # The machine.
    executable_cache: Optional[str] = setting(None, "Directory of compiled programs, used again when nothing has changed.")
    synthetic_data: bool = setting(False, "Random inputs made on the device: measures speed without the host. Learns nothing.")
    offline_target: Optional[Literal["ipu1", "ipu2", "ipu21"]] = setting(
        None, "Compile for this generation without having it (`compile --offline`); such a program cannot run here."
    )
    engine_options: Dict[str, str] = setting({}, "Options of Poplar's engine by name, passed on as they are.")

    @field_validator("matmul_proportion")
    @classmethod
    def _shares(cls, value: Union[None, float, List[float]]) -> Union[None, float, List[float]]:
        shares = value if isinstance(value, list) else [] if value is None else [value]
        if value == [] or not all(0 < share <= 1 for share in shares):
            raise ValueError("this is a share of the memory, greater than 0 and at most 1, or a list of one for each IPU")
        return value

    @field_validator("loss_scaling")
    @classmethod
    def _positive(cls, value: Union[None, float, str]) -> Union[None, float, str]:
        if isinstance(value, float) and value <= 0:
            raise ValueError("the loss is multiplied by a positive number, or `auto`")
        return value
