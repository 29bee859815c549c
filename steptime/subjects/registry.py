"""What the harness can measure by name. A new subject is a file of its own and its line here; a trainer adds
its own to `SUBJECTS`."""

from __future__ import annotations

from steptime.registry import Registry
from steptime.subjects.protocol import SubjectKind
from steptime.subjects.spin import SpinKind

SUBJECTS: Registry[SubjectKind] = Registry("subject", SpinKind())
