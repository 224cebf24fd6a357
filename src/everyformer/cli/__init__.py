"""The command line: one file a verb. Torch is imported inside the verbs, so that help answers at once."""
