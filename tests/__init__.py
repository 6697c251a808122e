import os
from pathlib import Path

# Kernels for GPUs are interpreted where there is none; Triton asks when it is first imported. Workers import this too,
# so torch is not asked.
if not list(Path("/dev").glob("nvidia*")):
    os.environ["TRITON_INTERPRET"] = "1"
