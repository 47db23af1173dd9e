"""ipu_lean: one YAML trains a lean (reversible, muP, low-precision) transformer on IPU, CPU or GPU.

Importing the package loads nothing heavy; each room loads torch, Lightning or matplotlib where it uses them.
"""
__version__ = "0.1.0"
