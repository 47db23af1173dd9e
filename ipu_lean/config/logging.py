"""`logging:` where the numbers go besides metrics.jsonl, which is always written."""

from typing import Literal

from ipu_lean.config.section import Section, setting


class LoggingConfig(Section):
    """Optional sinks are imported only when switched on, and written by the first process only."""

    csv: bool = setting(True, "Write metrics.csv as well, with a row for each line of metrics.jsonl.")
    tensorboard: bool = setting(False, "Write TensorBoard event files (extra `tensorboard`).")
    wandb: bool = setting(False, "Send metrics to Weights & Biases (extra `wandb`); nothing is contacted while this is false.")
    wandb_project: str = setting("ipu_lean", "The Weights & Biases project.", min_length=1)
    progress: Literal["auto", "bar", "plain", "none"] = setting(
        "auto",
        "`bar` redraws one line, `plain` prints a line at a time, `none` is silent. `auto`: a bar on a terminal, else plain.",
    )
