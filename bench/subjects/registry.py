"""What the harness can measure by name. A new subject is a file of its own and its line here."""

from __future__ import annotations

from bench.subjects.protocol import SubjectKind
from bench.subjects.spin import SpinKind
from bench.subjects.trainer.kind import TrainerKind
from steptime.registry import Registry

SUBJECTS: Registry[SubjectKind] = Registry("subject", TrainerKind(), SpinKind())
