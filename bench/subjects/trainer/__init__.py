"""The real trainer as a subject: `subject` measures it, `counts` counts it, `kind` says what else can be
asked of it."""
