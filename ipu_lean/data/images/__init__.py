"""Images to batches: three kinds of source, one checked cache, the sampler that resumes. numpy only."""
from __future__ import annotations

from ipu_lean.data.images.batches import ImageBatches, ImageSet, image_eval_batches
from ipu_lean.data.images.prepare import PreparedImages, image_fingerprint, prepare_images, prepare_other, reopen_images
from ipu_lean.data.images.sources import absolute_images, image_size

__all__ = [
    "ImageBatches",
    "ImageSet",
    "PreparedImages",
    "absolute_images",
    "image_eval_batches",
    "image_fingerprint",
    "image_size",
    "prepare_images",
    "prepare_other",
    "reopen_images",
]
