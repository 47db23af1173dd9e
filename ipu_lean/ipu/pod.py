"""How a configuration fills a POD: replicas, and the accumulation that keeps its global batch.

    python -m ipu_lean.ipu.pod IPUS CONFIG [key.path=value ...]   ->   REPLICAS ACCUMULATION IPUS_PER_REPLICA CACHE

for `scripts/pod.sh`; CACHE is `-` if there is none.
"""

from __future__ import annotations

import sys
from typing import NamedTuple, Sequence

from ipu_lean.config import Config, load_config
from ipu_lean.config.layout import layout, stages
from ipu_lean.errors import ConfigError, IpuLeanError


class Fill(NamedTuple):
    """What to set in the `batch:` section."""

    replicas: int
    accumulation: int
    ipus_per_replica: int


def fill(config: Config, ipus: int) -> Fill:
    """As many replicas as `ipus` IPUs hold; accumulation shrinks in turn, so that the global batch stays.

    Raises:
        ConfigError: a replica does not fit evenly, or the global batch is too small to keep all pipelines full.
    """
    each = layout(config).ipus
    if ipus % each:
        raise ConfigError(f"a replica takes {each} IPUs, and {ipus} cannot be shared evenly", key="ipu.layers_per_ipu")
    replicas, batch = ipus // each, config.batch
    micro_batches = batch.accumulation * batch.replicas
    forward = stages(config)
    wanted = 2 * forward - 1 if forward > 1 else 1
    accumulation = micro_batches // replicas
    if micro_batches % replicas or accumulation < wanted:
        raise ConfigError(
            f"{micro_batches} micro-batches (accumulation x replicas) for {replicas} replicas leave {micro_batches / replicas:g} "
            f"each, and every replica needs the same whole number, at least {wanted}",
            key="batch.accumulation",
            value=batch.accumulation,
            suggestion=f"use {-(-max(micro_batches, wanted * replicas) // replicas) * replicas // batch.replicas}",
        )
    return Fill(replicas, accumulation, each)


def main(words: Sequence[str]) -> int:
    """Prints the numbers for the shell; a mistake is one line and an exit code."""
    try:
        config = load_config(words[1], words[2:])
        found = fill(config, int(words[0]))
    except IpuLeanError as error:
        sys.stderr.write(f"ipu-lean: error: {error}\n")
        return error.exit_code
    cache = config.ipu.executable_cache or "-"
    sys.stdout.write(f"{found.replicas} {found.accumulation} {found.ipus_per_replica} {cache}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
