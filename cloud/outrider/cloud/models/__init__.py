"""Sources of targets: the embedded family, folders, GGUF files, pip and the hub."""
