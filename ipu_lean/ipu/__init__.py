"""The IPU path: PopTorch options, placement, the traced step, and an emulator of PopTorch on plain PyTorch."""
