"""The drafter on disk: the checkpoint that z-lab, SGLang and vLLM load, read (`released`) and written
(`export`)."""
