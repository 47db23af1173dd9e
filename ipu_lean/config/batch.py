"""`batch:` the batch in Graphcore's words, for every device."""

from ipu_lean.config.section import Section, setting


class BatchConfig(Section):
    """Global batch = micro x accumulation x replicas sequences: what one weight update sees."""

    micro: int = setting(8, "Sequences that one forward and backward pass sees (micro-batch).", ge=1)
    accumulation: int = setting(1, "Micro-batches whose gradients are averaged before an update (gradient accumulation).", ge=1)
    replicas: int = setting(
        1,
        "Copies of the model that share a global batch. One process runs them one after another; DDP spreads them over "
        "processes.",
        ge=1,
    )
    device_iterations: int = setting(
        1,
        "Weight updates per call of the device. An IPU cannot change the learning rate inside a call, so on every device the "
        "rate of update u is schedule(device_iterations * (u // device_iterations)).",
        ge=1,
    )

    @property
    def global_batch(self) -> int:
        """Sequences in one weight update."""
        return self.micro * self.accumulation * self.replicas
