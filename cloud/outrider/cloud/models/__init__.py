"""Where targets come from: the embedded family, folders, GGUF files, pip and the hub."""
