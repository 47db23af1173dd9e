"""Will it fit? What a training run needs on each IPU, from formulas alone: nothing in this room loads torch or numpy.

The formulas are calibrated on published training runs (published.py), and are estimates: only compiling decides.
"""

from __future__ import annotations

from ipu_lean.ipu.plan.levers import LEVERS, first_lever, levers_until_it_fits
from ipu_lean.ipu.plan.plan import Plan, make_plan
from ipu_lean.ipu.plan.workload import Network, Workload

__all__ = ["LEVERS", "Network", "Plan", "Workload", "first_lever", "levers_until_it_fits", "make_plan"]
