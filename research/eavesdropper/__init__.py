"""An observer between edge and verifier, who guesses the prompt from sizes and times of TLS records."""
