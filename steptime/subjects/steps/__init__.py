"""Any trainer as a subject: a function of the user's that makes `Steps`, or a script of a framework whose
loop is caught (`hf`, `lit`)."""
