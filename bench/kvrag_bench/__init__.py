"""The referee: speed, quality and size on equal terms.

Imports `cli`, `kvrag_corpus` and everything below them.
Begin with `ttft.py`; `cli/` has a command for each measurement.
"""

import os

# What is measured is reuse. A bench that wants prices measures them itself.
os.environ["KVRAG_NEVER_SLOWER"] = "off"
