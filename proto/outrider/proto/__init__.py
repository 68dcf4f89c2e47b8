"""The contract: messages, codec, session machine, noise and errors. Imports neither torch nor ray."""
