"""A method against its baselines on a subject.

A trial is declared in `trials/<family>/<slug>.py` as a module-level `TRIAL`. It says what is compared and how it
is measured; the runner owns seeds, pairing, processes, time, memory, resuming and the verdict.
"""

from assay.trials._runner import TrialRun, run_trial
from assay.trials._trial import Arm, Metric, Trial
from assay.trials._verdict import Cell, Verdict, judge

__all__ = ["Arm", "Cell", "Metric", "Trial", "TrialRun", "Verdict", "judge", "run_trial"]
