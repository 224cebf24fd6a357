"""The command line, one file per command. Torch is imported inside the commands, so that help is fast."""
