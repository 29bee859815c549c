"""Other trainers of drafters beside ours: the time of a step (`speed`) and its host syncs (`syncs`)."""
