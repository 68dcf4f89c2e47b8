"""`vllm serve` as its command runs it; with TRITON_INTERPRET=1 on Model Runner V2, whose kernels are interpreted."""

from __future__ import annotations

import os

# Workers, which run this file again, need it too.
if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter import prepare_interpreter

    prepare_interpreter()

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
