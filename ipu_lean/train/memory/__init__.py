"""`memory`: bytes a parameter and bytes of activation in each precision, predicted beside measured."""

from __future__ import annotations
