"""`train:` how long, how often it is measured and saved, and on how many processes."""

from typing import Literal, Optional

from ipu_lean.config.section import Section, section, setting


class LossScaleConfig(Section):
    """The loss scale of `precision: fp16-mixed`: halved at an overflow, doubled after `window` clean updates."""

    init: float = setting(65536.0, "The scale at the start.", gt=0)
    window: int = setting(2000, "Clean updates before the scale doubles.", ge=1)
    minimum: float = setting(1.0, "A run whose scale would fall below this stops: its gradients do not fit fp16.", gt=0)


class SampleConfig(Section):
    """Text that `train` generates when it has finished."""

    prompt: str = setting("", "What the sample continues; empty starts at an end-of-text token or a line break.")
    tokens: int = setting(200, "Tokens to generate; 0 for no sample.", ge=0)
    temperature: float = setting(0.8, "Divides the logits; 0 takes the likeliest token each time.", ge=0)


class TrainConfig(Section):
    """A step is one weight update, on every device."""

    steps: int = setting(1000, "Weight updates to make.", ge=1)
    eval_every: int = setting(100, "Updates between evaluations; 0 evaluates only at the end.", ge=0)
    eval_batches: Optional[int] = setting(
        None, "Global batches that an evaluation reads of each set. Unset: the whole set.", ge=1
    )
    save_every: int = setting(100, "Updates between checkpoints. The last update is always saved.", ge=1)
    keep_last: int = setting(2, "Checkpoints kept besides the best; older ones are deleted.", ge=1)
    keep_best: bool = setting(True, "Keep the checkpoint whose loss on the first validation set was lowest.")
    log_every: int = setting(10, "Updates between lines of metrics.jsonl.", ge=1)
    clip: Optional[float] = setting(1.0, "Largest global norm of the gradient; null for no clipping.", gt=0)
    strategy: Literal["auto", "single", "ddp", "fsdp"] = setting(
        "auto", "`ddp` copies the model to every process, `fsdp` shards it. `auto`: single with one process, ddp with more."
    )
    processes: int = setting(1, "Processes on this host; they share batch.replicas evenly.", ge=1)
    compile: Literal["none", "branches"] = setting(
        "none",
        "`branches`: torch.compile for each attention and feed-forward, for cpu and gpu (the stack around them stays as it is, "
        "so the second runs of a recomputing engine are the same code). Needs a C++ compiler (cpu) or Triton (gpu), and a "
        "minute at the start; the numbers differ by rounding. Without what it needs, a message says so and nothing is compiled.",
    )
    fp16_scale: LossScaleConfig = section(LossScaleConfig, "The loss scale of fp16-mixed.")
    threads: Optional[int] = setting(None, "CPU threads per process. Unset: torch's own choice.", ge=1)
    sample: SampleConfig = section(SampleConfig, "Text generated at the end.")
